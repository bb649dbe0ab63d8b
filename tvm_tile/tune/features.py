"""What the cost model sees of a configuration: figures of its own, and counts over the lowered kernel."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..ops.footprint import cdiv

__all__ = ["lowered_features", "own_features"]

#: Trips assumed of a loop whose extent is not known before the call.
UNKNOWN_TRIPS = 8


def own_features(space, config: Mapping[str, Any]) -> dict[str, float]:
    """Figures from the configuration, the op's footprint and the machine; no kernel is made for them.

    Decisions, shared bytes, registers, occupancy, waves of CTAs and how full the last one is, stages, iterations,
    arithmetic intensity, padding at ragged edges.
    """
    out: dict[str, float] = {}
    for name, values in space.choices.items():
        value = config[name]
        number = value if isinstance(value, int) else values.index(value)
        out[f"decision {name}"] = math.log2(1 + number)
    footprint = space.footprint(config)
    if footprint is None:
        return out
    machine = space.machine
    out |= {
        "shared bytes": footprint.shared_bytes,
        "registers": footprint.registers,
        "stages": footprint.stages,
        "iterations": footprint.iterations,
        "intensity": footprint.flops / max(1, footprint.load_bytes),
        "ctas": math.log2(1 + footprint.ctas),
        "work": math.log2(1 + footprint.ctas * footprint.iterations * max(footprint.flops, footprint.load_bytes)),
        "load per cta": math.log2(1 + footprint.load_bytes * footprint.iterations),
        "stages below iterations": float(footprint.stages < footprint.iterations),
    }
    if footprint.flops:
        useful = space.problem.spec.flops(space.problem.configured(config)[0])
        out["padding"] = footprint.ctas * footprint.iterations * footprint.flops / max(1, useful)
    if machine.kind == "cuda":
        from ..hardware import occupancy

        fit = occupancy(machine, footprint.threads, min(footprint.registers, 255), footprint.shared_bytes)
        at_once = machine.sms * max(1, fit.blocks)
        waves = footprint.ctas / at_once
        out |= {
            "resident ctas": fit.blocks,
            "occupancy": fit.fraction,
            "waves": waves,
            "last wave": waves / max(1, math.ceil(waves)),
            "flops per warp": math.log2(1 + footprint.flops * machine.warp_size / footprint.threads),
        }
    else:
        waves = footprint.ctas / machine.cores
        tiles = sum(t.bytes for t in (*footprint.shared, *footprint.fragments))
        out |= {
            "waves": waves,
            "last wave": waves / max(1, math.ceil(waves)),
            "tile bytes": math.log2(1 + tiles),
            "share of L2": tiles / (machine.l2_bytes or 2**20),
            "vectors a row": cdiv(footprint.products[0][1] * 32, machine.vector_bits) if footprint.products else 0,
        }
    return out


#: Part of an operator's name -> kind of work; the first that fits counts.
_GROUPS = {
    "mma": "tensor",
    "dp": "tensor",
    "bulk": "async copy",
    "cp_async": "async copy",
    "matrix": "matrix move",
    "barrier": "barrier",
    "sync": "barrier",
    "wait": "barrier",
    "shfl": "shuffle",
    "exp": "special",
    "log": "special",
    "sqrt": "special",
    "address": "address",
    "func_call": "device function",
    "call_extern": "extern",
}


def _group(name: str) -> str:
    """The kind of work of a called operator."""
    for part, group in _GROUPS.items():
        if part in name:
            return group
    return "call"


def lowered_features(func) -> dict[str, float]:
    """Counts over a lowered kernel, each statement weighted by the trips of the loops around it (log2 of 1 + count).

    Loads and stores by memory, arithmetic, calls by kind of work, branches, loops and local memory.
    """
    from tvm import tirx
    from tvm.ir import Call, TensorLoad

    from ..ir.visit import walk

    counts: Counter[str] = Counter()
    arithmetic = tuple(
        getattr(tirx, name) for name in ("Add", "Sub", "Mul", "Div", "Max", "Min", "FloorDiv", "FloorMod")
    )

    def leaf(node, trips: float) -> None:
        counts["statements"] += 1
        counts["executed"] += trips

        def load(n) -> None:
            counts[f"load {_scope(n.source)}"] += trips

        def store(n) -> None:
            counts[f"store {_scope(n.buffer)}"] += trips

        def call(n) -> None:
            counts[_group(str(getattr(n.op, "name", "")))] += trips

        def operation(_n) -> None:
            counts["arithmetic"] += trips

        walk(node, (TensorLoad, load), (tirx.BufferStore, store), (Call, call), *((k, operation) for k in arithmetic))

    def visit(node, trips: float) -> None:
        if isinstance(node, tirx.SeqStmt):
            for part in node.seq:
                visit(part, trips)
        elif isinstance(node, tirx.For):
            counts["loops"] += 1
            extent = int(node.extent.value) if isinstance(node.extent, tirx.IntImm) else UNKNOWN_TRIPS
            if not isinstance(node.extent, tirx.IntImm):
                counts["loops of unknown extent"] += 1
            visit(node.body, trips * extent)
        elif isinstance(node, tirx.IfThenElse):
            counts["branches"] += trips
            visit(node.then_case, trips)
            if node.else_case is not None:
                visit(node.else_case, trips)
        elif isinstance(node, tirx.While):
            visit(node.body, trips * UNKNOWN_TRIPS)
        elif isinstance(node, tirx.AttrStmt):
            extent = int(node.value.value) if isinstance(node.value, tirx.IntImm) else 1
            visit(node.body, trips * (extent if str(node.attr_key) == "thread_extent" else 1))
        elif isinstance(node, tirx.AllocBuffer):
            size = 1
            for extent in node.buffer.ty.shape:
                size *= int(extent.value) if isinstance(extent, tirx.IntImm) else UNKNOWN_TRIPS
            counts[f"elements {_scope(node.buffer)}"] += size
        else:
            leaf(node, trips)

    visit(func.body, 1.0)
    return {f"lowered {name}": math.log2(1 + value) for name, value in counts.items()}


def _scope(buffer) -> str:
    scope = str(buffer.ty.storage_scope) if hasattr(buffer.ty, "storage_scope") else ""
    return scope.split(".")[0] or "global"
