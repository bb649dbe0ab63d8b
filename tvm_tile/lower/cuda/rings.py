"""Rings of shared tiles between a producer and consumers: slots, mbarriers, and the counting of visits.

Each slot has a *full* mbarrier, which the load completes, and an *empty* one, at which the consumer warps arrive when
nothing of theirs reads the slot any more. Producer and consumers walk the same control flow (conditions are uniform
and read nothing that the kernel writes), so they count the same visits; slot and phase follow from the count: slot
``n % S``, phase ``(n // S) % 2``. Hence any trip count is right, also in branches and nested loops.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import tirx
from tvm.ir import Var
from tvm.script import tirx as T
from tvm.tirx import BufferStore

from ...errors import InternalError
from .build import const, evaluate, seq, when
from .program import CondNode, LoopNode, Node, OpNode, RawNode, WhileNode, walk_nodes
from .storage import Storage

__all__ = ["Ring", "Rings", "count_of", "make_rings"]


@dataclass
class Ring:
    """Slots of tiles that are filled together.

    Attributes
    ----------
    name : str
        For the generated variables.
    copies : list of str
        Copy blocks that fill a slot; they stand together in the kernel.
    slots : int
        Copies of each tile.
    buffers : list of Var
        Their tiles.
    counting : str
        ``"flat"``: the count is the iteration of the only loop around it; ``"nested"``: that plus the visits of
        earlier rounds of outer loops, kept in a variable; ``"visits"``: every visit is counted in a variable
        (branches).
    index : int
        Position among the kernel's rings.
    arrivals : (int, int)
        Warps that complete a full barrier (1 for a load) and an empty one.
    inside : (str, int) or None
        Ring and slot whose space this ring's tile takes at first; the load of that slot waits until it is read.
    writers, readers : list of str
        Operations of an exchange: the front's that fill a slot, the back's that read it.
    over : Ring or None
        The ring of whose slots an exchange's tile takes the space.
    under : Ring or None
        The exchange that takes the space of this ring's slots: they are free when its readers hand them back.
    signal : bool
        Whether it holds nothing: the front says that its products of an iteration are complete.
    """

    name: str
    copies: list[str]
    slots: int
    buffers: list[Var] = field(default_factory=list)
    counting: str = "flat"
    index: int = 0
    arrivals: tuple[int, int] = (1, 1)
    inside: tuple[str, int] | None = None
    writers: list[str] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    over: Ring | None = None
    over_tile: Var | None = None
    under: Ring | None = None
    signal: bool = False


@dataclass
class Rings:
    """All rings of a kernel and their barriers at the start of the shared pool."""

    storage: Storage
    rings: list[Ring] = field(default_factory=list)
    counters: dict[tuple[str, str], Var] = field(default_factory=dict)

    @property
    def exchanges(self) -> list[Ring]:
        """Rings that the front fills for the back."""
        return [r for r in self.rings if r.writers]

    @property
    def signal(self) -> Ring | None:
        """What the front completes when its products of an iteration are complete."""
        return next((r for r in self.rings if r.signal), None)

    @property
    def bytes(self) -> int:
        """Bytes of all barriers."""
        return sum(16 * ring.slots for ring in self.rings)

    def of_copy(self, name: str) -> Ring | None:
        """The ring that a copy fills."""
        return next((r for r in self.rings if name in r.copies), None)

    def _barrier(self, ring: Ring, count, shift: int):
        start = sum(16 * r.slots for r in self.rings[: ring.index]) + shift
        slot = slot_of(ring, count)
        base = self.storage.base + T.uint32(start)
        return base if ring.slots == 1 else base + tirx.Cast("uint32", slot) * T.uint32(8)

    def full(self, ring: Ring, count):
        """Address of the full barrier of a visit's slot."""
        return self._barrier(ring, count, 0)

    def empty(self, ring: Ring, count):
        """Address of the empty barrier of a visit's slot."""
        ring = ring.under or ring
        return self._barrier(ring, count, 8 * ring.slots)

    def counter(self, ring: Ring, role: str) -> Var:
        """The variable that counts a role's visits."""
        key = (ring.name, role)
        if key not in self.counters:
            self.counters[key] = self.storage.new_local((1,), "int32", f"{ring.name}_{role}_visits")
        return self.counters[key]

    def start_counters(self, role: str) -> list[Node]:
        """Counters begin at zero."""
        return [RawNode(BufferStore(self.counter(r, role), const(0), [0])) for r in self.rings if r.counting != "flat"]

    def advance(self, ring: Ring, role: str, by) -> RawNode:
        """Count ``by`` more visits."""
        counter = self.counter(ring, role)
        return RawNode(BufferStore(counter, counter[0] + by, [0]))

    # ---- code

    def init(self):
        """One thread makes the barriers: a load (or the front) completes a full one, every user's warp an empty one."""
        stmts = []
        for ring in self.rings:
            for slot in range(ring.slots):
                at = const(slot)
                made = [(self.full(ring, at), ring.arrivals[0])]
                if ring.under is None:  # else the exchange above makes it
                    made.append((self.empty(ring, at), ring.arrivals[1]))
                for address, count in made:
                    stmts.append(evaluate(T.ptx.mbarrier.init.shared.b64(address, T.uint32(count))))
        stmts.append(evaluate(T.ptx.fence.mbarrier_init.release.cluster()))
        stmts.append(evaluate(T.ptx.fence.proxy.async_.shared__cta()))
        return seq(stmts)

    def wait_full(self, ring: Ring, count):
        """Wait until the load of a visit has arrived."""
        return evaluate(T.cuda.mbarrier_wait(self.full(ring, count), phase_of(ring, count)))

    def wait_empty(self, ring: Ring, count):
        """Wait until the slot of a visit is free (it is at once in the first round)."""
        return evaluate(
            T.cuda.mbarrier_wait(self.empty(ring, count), tirx.bitwise_xor(phase_of(ring, count), const(1)))
        )

    def wait_guests(self, ring: Ring, count) -> list:
        """Before a slot's first load: wait until what was loaded into its space has been read."""
        guests = [r for r in self.rings if r.inside is not None and r.inside[0] == ring.name]
        wait = T.cuda.mbarrier_wait
        return [when(tirx.EQ(count, const(g.inside[1])), evaluate(wait(self.empty(g, const(0)), 0))) for g in guests]

    def release(self, ring: Ring, count, guard=None):
        """One lane of each warp hands the slot back."""
        return self._arrive(self.empty(ring, count), guard)

    def send(self, ring: Ring, count):
        """One lane of each warp of the front announces what the warp wrote, to ordinary loads and to wgmma."""
        fence = evaluate(T.ptx.fence.proxy.async_.shared__cta())
        return seq([fence, self._arrive(self.full(ring, count), None)])

    def say(self, ring: Ring, count):
        """One lane of each warp of the front says that its products of an iteration are complete."""
        return self._arrive(self.full(ring, count), None)

    def _arrive(self, barrier, guard):
        arrive = evaluate(T.ptx.mbarrier.arrive.shared.b64(barrier, T.uint32(1)))
        lane0 = tirx.EQ(tirx.floormod(self.storage.tx, 32), const(0))
        condition = lane0 if guard is None else tirx.And(lane0, guard)
        return seq([evaluate(T.cuda.warp_sync()), when(condition, arrive)])


def slot_of(ring: Ring, count):
    """Slot of a visit."""
    return const(0) if ring.slots == 1 else tirx.floormod(count, ring.slots)


def phase_of(ring: Ring, count):
    """Phase of a visit's barriers."""
    rounds = count if ring.slots == 1 else tirx.floordiv(count, ring.slots)
    return tirx.floormod(rounds, 2)


def count_of(rings: Rings, ring: Ring, role: str, loop: LoopNode | None):
    """How many visits of a ring came before the one at hand, in a body of ``loop``."""
    if ring.counting == "visits":
        return rings.counter(ring, role)[0]
    here = const(0) if loop is None else loop.var - loop.start
    return here if ring.counting == "flat" else rings.counter(ring, role)[0] + here


def make_rings(storage: Storage, nodes: list[Node], described: list[dict], exchanges=(), signal: int = 0) -> Rings:
    """The rings that the rules asked for, with their way of counting.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    nodes : list
        The kernel's tree.
    described : list of dict
        For each ring its ``name``, ``copies`` and ``slots``.
    exchanges : list of dict
        For each exchange its ``name``, ``writers``, ``readers``, ``tiles`` and ``slots``, and maybe ``over``.
    signal : int
        Slots of the front's signal, 0 for none.
    """
    rings = Rings(storage)
    for entry in [*described, *exchanges]:
        ring = Ring(str(entry["name"]), [str(c) for c in entry.get("copies", [])], int(entry["slots"]))
        ring.writers, ring.readers = ([str(n) for n in entry.get(k, [])] for k in ("writers", "readers"))
        if "inside" in entry:
            ring.inside = (str(entry["inside"]["ring"]), int(entry["inside"]["slot"]))
        path = _path(nodes, (ring.copies or ring.writers)[0], ())
        if path is None:
            raise InternalError(f"ring {ring.name} names the copy {ring.copies[0]}, which is not in the kernel")
        loops = sum(isinstance(n, LoopNode) for n in path)
        branch = any(isinstance(n, CondNode) for n in path)
        ring.counting = "visits" if branch else "nested" if loops > 1 else "flat"
        ring.index = len(rings.rings)
        for node in _ops(nodes):
            if node.op.name in ring.copies:
                ring.buffers.append(node.op.dst.buffer)
        ring.buffers += [b for b in storage.tiles if b.name in entry.get("tiles", [])]
        rings.rings.append(ring)
    for entry in exchanges:
        if "over" in entry:
            upper = next(r for r in rings.rings if r.name == entry["name"])
            upper.over = next(r for r in rings.rings if r.name == entry["over"]["ring"])
            upper.over_tile = next(b for b in upper.buffers if b.name == entry["over"]["tile"])
            upper.over.under = upper
    if signal:
        rings.rings.append(Ring("front_products", [], signal, index=len(rings.rings), signal=True))
    return rings


def _ops(nodes: list[Node]):
    return (n for n in walk_nodes(nodes) if isinstance(n, OpNode))


def _path(nodes: list[Node], name: str, path: tuple) -> tuple | None:
    for node in nodes:
        if isinstance(node, OpNode) and node.op.name == name:
            return path
        if isinstance(node, WhileNode):
            continue
        for part in ("body", "then", "orelse"):
            found = _path(getattr(node, part, []), name, (*path, node))
            if found is not None:
                return found
    return None
