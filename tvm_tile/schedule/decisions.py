"""Decisions as annotations: the one place that knows how they are written and read back.

Annotations of a tile function that was decided (nested values are JSON text, which prints, survives ``save_json`` and
is replayed by traces of ``Schedule.annotate``):

=====================  =================  ==========================================================================
annotation             on                 meaning
=====================  =================  ==========================================================================
``tile.fragments``     kernel block       {buffer: Fragment} of every fragment and every view of one
``tile.shared``        kernel block       {buffer: SharedLayout of one copy} of every shared tile and view
``tile.raster``        kernel block       [panel, order]: the grid is visited in panels
``tile.instruction``   gemm block         [family, A, B, C, m, n, k]; family mma, wgmma or fma (CUDA cores, 1 x 1 x 1)
``tile.partition``     gemm block         WarpPartition (mma, wgmma)
``tile.partial``       gemm block         with a partition along K: ``"first"``, ``"middle"`` or ``"last"`` of products
                                          that follow each other into one accumulator; absent: the only one. Warps add
                                          their partial sums up after the last
``tile.copy``          copy block         {"kind": ..., "vector": elements an access}, see :class:`CopyPlan`
``tile.loop``          element-wise,      Fragment over the *axes* of the operation (their order, not the buffer's): its
                       copy, reduce       ``coords(thread, register)`` are the axes' values
``tile.window``        same               fragment that is visited as a whole because the operation uses a slice of it:
                                          ``tile.loop`` is then that buffer's own layout over the *buffer's dimensions*;
                                          axis value = coordinate - start of the slice, and what lies outside of the
                                          slice is skipped
``tile.vector``        same               elements that consecutive accesses of the last axis may be joined to
``tile.chunks``        same               axes whose extent is symbolic: ``tile.loop`` covers one chunk of them, and the
                                          operation repeats serially until the extent is covered (the rest predicated)
``tile.convert``       same, gemm         fragments that are not at hand: they pass through shared memory
``tile.deferred``      reduce block       the fragment that accumulates the sum; threads combine it after the loop
``tile.unit_factors``  element-wise       the fragment of factors on which a warp votes before it multiplies, or "off"
``tile.factored``      element-wise       1: ``a * c - b * c`` is computed as ``(a - b) * c``
``tile.pipeline``      pipelined loop     {"stages", "buffers", "producers"[, "order", "stage"]}
``tile.role``          operations         "front" or "back": which of two groups of consumer warps does it
``tile.persistent``    kernel block       CTAs that visit all tiles; 0 or absent: one CTA a tile
``tile.rows``          copy block         rows that a TMA load brings, where the tensor has fewer than the tile
``tile.l2``            copy block         what L2 does with a load: "evict_first" or "evict_normal"
``tile.slots``         copy block         of kind tma: boxes of shared memory a warpgroup
``tile.alignment``     function attribute {parameter: bytes} that the base pointer has to be aligned to
``tile.machine``       function attribute name of the machine that was decided for
``tile.decisions``     function attribute the log: [[kernel, subject, rule, decision, why], ...]
=====================  =================  ==========================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ir.kernels import plain
from ..layout import Fragment, Instruction, SharedLayout, WarpPartition, find_instruction

__all__ = [
    "BACK",
    "BACK_REGISTERS",
    "COPY_KINDS",
    "CopyPlan",
    "FRONT",
    "FRONT_REGISTERS",
    "FRONT_THREADS",
    "L2_POLICIES",
    "OFF",
    "PRODUCER_REGISTERS",
    "PipelineDecision",
    "encode",
    "read_alignment",
    "read_chunks",
    "read_convert",
    "read_copy",
    "read_factored",
    "read_fragments",
    "read_instruction",
    "read_l2",
    "read_log",
    "read_loop",
    "read_machine",
    "read_partial",
    "read_partition",
    "read_persistent",
    "read_pipeline",
    "read_raster",
    "read_ring_loads",
    "read_roles",
    "read_rows",
    "read_shared",
    "read_slots",
    "read_unit_factors",
    "read_vector",
    "read_window",
]

#: Roles of consumer warps (``tile.role``): the front makes the operand of a final product, the back accumulates it.
FRONT, BACK = "front", "back"
#: Threads of the front, beside those that the kernel was written for.
FRONT_THREADS = 128
#: Registers a thread of each role: one warpgroup loads, two accumulate, one makes their operand; 512 in sum.
PRODUCER_REGISTERS, BACK_REGISTERS, FRONT_REGISTERS = 24, 160, 168

#: What L2 may do with a load (``tile.l2``) -> the policy as ``createpolicy.fractional`` makes it for all of the data;
#: None for a load without a policy.
L2_POLICIES = {"evict_first": 0x12F0000000000000, "evict_normal": None}
#: Value of ``tile.unit_factors`` that switches the vote off.
OFF = "off"

COPY_KINDS = ("cp.async", "vector", "scalar", "ldmatrix", "stmatrix", "registers", "staged", "tma")


@dataclass(frozen=True)
class CopyPlan:
    """How a copy moves its elements.

    Attributes
    ----------
    kind : str
        ``cp.async`` (global to shared), ``vector``, ``scalar``, ``ldmatrix`` (shared to fragment), ``stmatrix``
        (fragment to shared), ``registers`` (fragment to fragment without communication), ``staged`` (through shared
        scratch) or ``tma``.
    vector : int
        Elements an access.
    """

    kind: str
    vector: int = 1

    def to_json(self) -> dict:
        """A JSON-able dictionary."""
        return {"kind": self.kind, "vector": self.vector}


@dataclass(frozen=True)
class PipelineDecision:
    """Plan of a pipelined loop.

    Attributes
    ----------
    stages : int
        Iterations in flight; 1 for no overlap.
    buffers : dict
        Shared buffer -> number of copies.
    producers : tuple of str
        Copy blocks that are issued ahead.
    order, stage : tuple of int or None
        A manual schedule: one entry a statement of the body.
    """

    stages: int
    buffers: dict = field(default_factory=dict)
    producers: tuple = ()
    order: tuple | None = None
    stage: tuple | None = None

    def to_json(self) -> dict:
        """A JSON-able dictionary."""
        data: dict = {"stages": self.stages, "buffers": dict(self.buffers), "producers": list(self.producers)}
        if self.stage is not None:
            data["order"], data["stage"] = list(self.order or range(len(self.stage))), list(self.stage)
        return data


def encode(value) -> str:
    """A value as annotation text."""
    if hasattr(value, "to_json"):
        value = value.to_json()
    return json.dumps(value, separators=(",", ":"))


def _notes(holder) -> Mapping:
    """Annotations of a block, loop or operation, or a mapping as it is."""
    return holder if isinstance(holder, Mapping) or hasattr(holder, "items") else holder.annotations


def _decode(holder, key: str):
    notes = _notes(holder)
    if key not in notes:
        return None
    value = plain(notes[key])
    return json.loads(value) if isinstance(value, str) else value


def _layouts(holder, key: str, kind) -> dict:
    data = _decode(holder, key) or {}
    return {name: kind.from_json(json.loads(v) if isinstance(v, str) else v) for name, v in data.items()}


def read_fragments(block) -> dict[str, Fragment]:
    """Buffer name -> layout of a kernel's fragments."""
    return _layouts(block, "tile.fragments", Fragment)


def read_shared(block) -> dict[str, SharedLayout]:
    """Buffer name -> layout (one copy) of a kernel's shared tiles."""
    return _layouts(block, "tile.shared", SharedLayout)


def read_raster(block) -> tuple[int, str] | None:
    """(panel, order) in which a kernel's grid is visited, None for launch order."""
    data = _decode(block, "tile.raster")
    return None if not data else (int(data[0]), str(data[1]))


def read_instruction(annotations) -> Instruction | None:
    """The tensor-core instruction of a gemm block; None for the CUDA cores (``fma``)."""
    data = _decode(annotations, "tile.instruction")
    if not data or data[0] == "fma":
        return None
    family, a, b, c, _, n, k = data
    sm = 90 if family == "wgmma" else 89  # what the rule chose exists; the table's newest mma entries are of sm_89
    return find_instruction(family, a, b, c, sm, k).with_n(n)


def read_partition(annotations) -> WarpPartition | None:
    """How warps split a gemm block's output; None for the CUDA cores."""
    data = _decode(annotations, "tile.partition")
    return None if data is None else WarpPartition.from_json(data)


def read_partial(annotations) -> tuple[bool, bool]:
    """(whether a product along split K begins its partial sums, whether it adds them up)."""
    value = _notes(annotations).get("tile.partial")
    place = None if value is None else str(plain(value))
    return place in (None, "first"), place in (None, "last")


def read_copy(annotations) -> CopyPlan | None:
    """How a copy block moves its elements."""
    data = _decode(annotations, "tile.copy")
    return None if data is None else CopyPlan(str(data["kind"]), int(data.get("vector", 1)))


def read_loop(annotations) -> Fragment | None:
    """Layout in which an operation's iteration space is visited."""
    data = _decode(annotations, "tile.loop")
    return None if data is None else Fragment.from_json(data)


def read_window(annotations) -> str | None:
    """The fragment that is visited as a whole because the operation uses a slice of it."""
    value = _notes(annotations).get("tile.window")
    return None if value is None else str(plain(value))


def read_vector(annotations) -> int:
    """Elements of the last axis that one access to global or shared memory may join."""
    value = _notes(annotations).get("tile.vector")
    return 1 if value is None else int(plain(value))


def read_chunks(annotations) -> list[int]:
    """Axes of symbolic extent, which are visited chunk by chunk."""
    return [int(v) for v in _decode(annotations, "tile.chunks") or []]


def read_convert(annotations) -> list[str]:
    """Fragments of an operation that are not at hand in its loop."""
    return [str(v) for v in _decode(annotations, "tile.convert") or []]


def read_pipeline(annotations) -> dict | None:
    """A loop's plan as a dictionary (see :class:`PipelineDecision`), None where nothing overlaps."""
    return _decode(annotations, "tile.pipeline")


def read_persistent(block) -> int | None:
    """CTAs of a persistent kernel; 0 for one CTA a tile, None where nothing was decided."""
    data = _decode(block, "tile.persistent")
    return None if data is None else int(data)


def read_slots(annotations) -> int:
    """Boxes of shared memory that a TMA store has in each warpgroup."""
    return int(plain(_notes(annotations).get("tile.slots", 0)))


def read_rows(annotations) -> int | None:
    """Rows that a load of a tile brings; None for all rows of the tile."""
    value = _notes(annotations).get("tile.rows")
    return None if value is None else int(plain(value))


def read_l2(annotations) -> str | None:
    """What L2 does with a load, None where nothing was decided."""
    value = _notes(annotations).get("tile.l2")
    return None if value is None else str(plain(value))


def read_deferred(annotations) -> str | None:
    """The fragment in which a sum is accumulated uncombined, None for a sum that is combined at once."""
    value = _notes(annotations).get("tile.deferred")
    return None if value is None else str(plain(value))


def read_unit_factors(annotations) -> str | None:
    """The fragment of factors that a warp votes on before it multiplies, None to multiply in any case."""
    value = _notes(annotations).get("tile.unit_factors")
    return None if value is None or str(plain(value)) == OFF else str(plain(value))


def read_factored(annotations) -> bool:
    """Whether differences of products are computed as a product of the difference."""
    return bool(int(plain(_notes(annotations).get("tile.factored", 0))))


def read_roles(block) -> dict | None:
    """Warp roles of a kernel.

    ``{"rings": [{"name", "copies", "slots"}], "registers": [producer, consumer], "turns"}``. With a front and a back
    also ``"exchanges": [{"name", "writers", "readers", "tiles", "slots"}]``, maybe ``"over": {"ring", "tile"}``: a tile
    takes the slots of a ring that the front has read. Registers are [producer, back, front], and a ring may be
    ``"inside": {"ring", "slot"}``, the slot whose space it takes before the loop. ``"signal"``: slots of the barriers
    at which the back's product waits for the front's next ones.
    """
    return _decode(block, "tile.roles")


def read_ring_loads(block) -> dict[str, dict]:
    """Copy -> the ring that it fills: what a kernel's producer loads; empty without one."""
    rings = (read_roles(block) or {}).get("rings", ())
    return {str(name): ring for ring in rings for name in ring["copies"]}


def _attribute(func, key: str):
    attrs = func.attrs
    return json.loads(str(attrs[key])) if attrs is not None and key in attrs else None


def read_alignment(func) -> dict[str, int]:
    """Parameter -> bytes that its base pointer has to be aligned to."""
    return {k: int(v) for k, v in (_attribute(func, "tile.alignment") or {}).items()}


def read_machine(func) -> str | None:
    """Name of the machine that a function was decided for, None if it was not decided."""
    return _attribute(func, "tile.machine")


def read_log(func) -> list[list[str]]:
    """The decision log of a decided function: [kernel, subject, rule, decision, why] each."""
    return _attribute(func, "tile.decisions") or []
