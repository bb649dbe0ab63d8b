"""Shared memory and registers of a kernel before any code exists: what exceeds a limit is an error with a way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from tvm.ir import Var

from ..errors import TileResourceError
from ..ir.kernels import plain
from ..ir.ops import CopyOp, GemmOp, ParallelOp, ReduceOp
from .analysis import FRAGMENT, SHARED, Access, KernelView, Site, dtype_bits, static_shape
from .decisions import BACK, FRONT, read_fragments, read_pipeline, read_roles, read_shared
from .loops import plain_dims
from .rule import Decision, Rule, TileSchedule

__all__ = ["SharedUse", "live_span", "nearest_fitting", "register_estimate", "resources", "shared_peak", "shared_uses"]

#: Registers a thread that addresses, loop counters and operands of instructions take beside the fragments.
OTHER_REGISTERS = 40


@dataclass(frozen=True)
class SharedUse:
    """Shared memory of one tile, and when it is live (positions in the kernel's text)."""

    name: str
    bytes: int
    copies: int
    first: int
    last: int

    @property
    def total(self) -> int:
        """Bytes of all copies."""
        return self.bytes * self.copies

    def __str__(self) -> str:
        copies = f" ({self.copies} copies of {self.bytes})" if self.copies > 1 else ""
        return f"{self.name}: {self.total} bytes{copies}"


def live_span(kernel: KernelView, buffer: Var, renewed: bool = False) -> tuple[int, int] | None:
    """First and last position at which a buffer is live: a loop that touches it keeps it throughout.

    With ``renewed`` a loop keeps only what one of its iterations hands to the next: not what every iteration writes
    anew before it reads it.
    """
    uses = list(kernel.uses(buffer))
    if not uses:
        return None
    spans = []
    for site, _ in uses:
        low = high = site.position
        for loop in reversed(site.loops):
            users = [(s, a) for s, a in uses if loop in s.path]
            if renewed and len(users) == len(uses) and _written_first(users):
                break
            inside = [s.position for s in kernel.sites if loop in s.path]
            low, high = min(low, *inside), max(high, *inside)
        spans.append((low, high))
    return min(s[0] for s in spans), max(s[1] for s in spans)


def _handed_over(kernel: KernelView, buffer: Var, last: int) -> bool:
    """Whether the last use is element by element, so that what it writes can take the registers of what it reads."""
    return any(isinstance(s.op, CopyOp | ParallelOp) for s, _ in kernel.uses(buffer) if s.position == last)


def _written_first(users: list[tuple[Site, Access]]) -> bool:
    """Whether the first operation of several writes the whole buffer without reading it."""
    first = users[0][0]
    own = [a for s, a in users if s is first]
    if isinstance(first.op, GemmOp):
        return first.op.clear_accum and first.op.mask is None
    if isinstance(first.op, ReduceOp):
        own = [a for a in own if a.write] if first.op.clear else own
    guarded = getattr(first.op, "dst_guard", None) is not None or isinstance(first.op, ParallelOp)
    return all(a.write and plain_dims(first, a) is not None for a in own) and not guarded


def _copies(kernel: KernelView, roles: dict) -> dict[str, int]:
    """Copies of tiles that have more or less than one; 0 for what is loaded into another tile's space."""
    copies: dict[str, int] = {}
    for _, scope in kernel.loops:
        for name, count in ((read_pipeline(scope.node) or {}).get("buffers") or {}).items():
            copies[name] = max(copies.get(name, 1), int(count))
    targets = {s.name: s.op.dst.buffer.name for s in kernel.sites if isinstance(s.op, CopyOp)}
    for ring in roles.get("rings", []):
        copies |= {targets[name]: 0 if "inside" in ring else int(ring["slots"]) for name in ring["copies"]}
    for exchange in roles.get("exchanges", []):
        own = [name for name in exchange["tiles"] if name != exchange.get("over", {}).get("tile")]
        copies |= {name: int(exchange["slots"]) for name in own}
        copies |= {name: 0 for name in exchange["tiles"] if name not in own}
    return copies


def shared_uses(kernel: KernelView, roles: dict | None = None) -> list[SharedUse]:
    """Every shared tile of a decided kernel; scratch of the compiler's own is not included.

    Parameters
    ----------
    kernel : KernelView
        The kernel.
    roles : dict, optional
        Warp roles that are tried, instead of those that were decided.
    """
    layouts = read_shared(kernel.info.block)
    copies = _copies(kernel, roles or read_roles(kernel.info.block) or {})
    out = []
    for buffer in kernel.buffers(SHARED):
        span = live_span(kernel, buffer)
        if span is None or buffer.name not in layouts or copies.get(buffer.name) == 0:
            continue
        if kernel.split and _beside_the_back(kernel, buffer):
            span = (0, span[1])
        layout = layouts[buffer.name]
        size = -(-layout.bytes // layout.alignment) * layout.alignment
        out.append(SharedUse(buffer.name, size, copies.get(buffer.name, 1), *span))
    return out


def _beside_the_back(kernel: KernelView, buffer: Var) -> bool:
    """Whether the front or the producer uses a tile: they run ahead, so that it is live from the start."""
    return any(s.role != BACK for s, _ in kernel.uses(buffer))


def shared_peak(uses: list[SharedUse], total_of: Callable[[SharedUse], int] = lambda u: u.total) -> int:
    """The most bytes that are live together."""
    return max((sum(total_of(o) for o in uses if o.first <= u.first <= o.last) for u in uses), default=0)


def _apply(sch: TileSchedule, hw):
    answers = []
    sch.refresh()  # the pipeline plans are on the loops by now
    for kernel in sch.kernels:
        uses = shared_uses(kernel)
        peak = shared_peak(uses)
        if peak > hw.shared_per_block:
            raise _too_large(kernel, uses, peak, hw, _config(sch))
        listed = "; ".join(map(str, uses)) or "no shared tiles"
        answers.append(
            Decision(kernel.name, "shared memory", f"{peak} of {hw.shared_per_block} bytes live together", listed)
        )
        answers.append(_registers(kernel, hw))
    return answers


def _too_large(kernel: KernelView, uses: list[SharedUse], peak: int, hw, config: dict) -> TileResourceError:
    lines = "\n".join(f"  {use}" for use in sorted(uses, key=lambda u: -u.total))
    return TileResourceError(
        f"shared memory: {peak} bytes are live together, but a CTA on {hw.name} has {hw.shared_per_block}\n{lines}",
        kernel.location,
        nearest_fitting(kernel, uses, hw.shared_per_block, config),
    )


# ---- the way out


def _config(sch: TileSchedule) -> dict[str, int]:
    config = sch.func_attributes.get("tile.config")
    data = plain(config) if config is not None else {}
    if isinstance(data, str):
        data = json.loads(data)
    return {k: v for k, v in data.items() if isinstance(v, int) and not isinstance(v, bool)}


def nearest_fitting(kernel: KernelView, uses: list[SharedUse], limit: int, config: dict[str, int]) -> str:
    """The smallest changes of the tunables under which the tiles fit, as advice.

    Tile extents that equal a ``block_*`` tunable shrink with it; tunables of equal value shrink together, since a tile
    does not tell which of them its extent came from.
    """
    shapes = {b.name: static_shape(b) for b in kernel.buffers(SHARED)}
    deepest = max((u.copies for u in uses), default=1)
    blocks: dict[int, list[str]] = {}
    for name, value in config.items():
        if name.startswith("block_") and value >= 32:
            blocks.setdefault(value, []).append(name)

    def peak(stages: int, halved: int | None) -> int:
        def total(use: SharedUse) -> int:
            size = use.bytes // 2 ** (sum(e == halved for e in shapes[use.name]) if halved else 0)
            return size * (min(use.copies, stages) if use.copies > 1 else 1)

        return shared_peak(uses, total)

    found = []
    for stages in range(deepest - 1, 0, -1):
        if peak(stages, None) <= limit:
            found.append(f"num_stages={stages} fits ({peak(stages, None)} bytes)")
            break
    for value, names in blocks.items():
        for stages in range(deepest, 0, -1):
            size = peak(stages, value)
            if size <= limit:
                change = ", ".join(f"{n}={value // 2}" for n in names)
                change += f", num_stages={stages}" if stages != deepest else ""
                found.append(f"{change} fits ({size} bytes)")
                break
    if not found:
        return "use smaller tiles: not even num_stages=1 fits" if deepest > 1 else "use smaller tiles"
    return "; ".join(found)


# ---- registers


def register_estimate(kernel: KernelView, role: str | None = None) -> tuple[int, dict[str, int]]:
    """(registers a thread that live fragments take together at most, registers of each fragment).

    A fragment that element-wise work reads last and one that it writes first can share registers. With a role, only the
    fragments of those warps are counted.
    """
    layouts = read_fragments(kernel.info.block)
    each: dict[str, int] = {}
    spans = []
    for buffer in kernel.buffers(FRAGMENT):
        span = live_span(kernel, buffer, renewed=True)
        if role is not None and all(s.role != role for s, _ in kernel.uses(buffer)):
            continue
        if span is None or buffer.name not in layouts:
            continue
        each[buffer.name] = -(-layouts[buffer.name].registers * dtype_bits(str(buffer.ty.dtype)) // 32)
        first, last = span
        spans.append((each[buffer.name], first, last if _handed_over(kernel, buffer, last) else last + 1))
    peak = max((sum(r for r, a, b in spans if a <= first < b or first == a) for _, first, _ in spans), default=0)
    return peak, each


def _registers(kernel: KernelView, hw) -> Decision:
    roles = read_roles(kernel.info.block) or {}
    if kernel.split and roles.get("registers"):
        return _registers_of_roles(kernel, roles["registers"])
    peak, each = register_estimate(kernel)
    listed = ", ".join(f"{name} {count}" for name, count in sorted(each.items(), key=lambda e: -e[1])) or "no fragments"
    limit = min(hw.registers_per_thread, hw.registers_per_block // max(kernel.threads, 1))
    over = peak + OTHER_REGISTERS > limit
    text = f"fragments take up to {peak} of {limit} registers a thread"
    return Decision(kernel.name, "registers", text, listed + ("; spills are likely" if over else ""), warning=over)


def _registers_of_roles(kernel: KernelView, registers: list[int]) -> Decision:
    texts, lists, over = [], [], False
    for role, limit in ((FRONT, registers[2]), (BACK, registers[1])):
        peak, each = register_estimate(kernel, role)
        texts.append(f"up to {peak} of {limit} in the {role}")
        lists.append(", ".join(f"{name} {count}" for name, count in sorted(each.items(), key=lambda e: -e[1])))
        over |= peak + OTHER_REGISTERS // 2 > limit  # a role's code is a part of the kernel's
    why = "; ".join(lists) + ("; spills are likely" if over else "")
    return Decision(kernel.name, "registers", f"registers a thread of fragments: {', '.join(texts)}", why, warning=over)


resources = Rule("resources", _apply)
