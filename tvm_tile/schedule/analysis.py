"""What a kernel does, as the rules need it: operations with their scopes and accesses, views, loops, written memory.

No decision is made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm.s_tir import SBlockRealize
from tvm.tirx import BufferStore, For, IfThenElse, SeqStmt, While, is_buffer_var
from tvm.tirx.stmt import DeclBuffer

from ..errors import SourceLocation
from ..ir.kernels import KernelInfo, kernels_of, plain
from ..ir.ops import CopyOp, CumsumOp, GemmOp, Region, TileOp, match_op, read_op
from ..ir.visit import mentions, walk
from .decisions import FRONT, FRONT_THREADS

__all__ = [
    "FRAGMENT",
    "GLOBAL",
    "SHARED",
    "Access",
    "KernelView",
    "RawSite",
    "Scope",
    "Site",
    "Term",
    "dtype_bits",
    "kernel_views",
    "scope_of",
    "static_shape",
]

GLOBAL, SHARED, FRAGMENT = "global", "shared", "local.fragment"


def scope_of(buffer: Var) -> str:
    """Storage scope of a buffer."""
    return str(buffer.ty.storage_scope)


def dtype_bits(dtype: str) -> int:
    """Bits of an element in memory (bool takes a byte)."""
    return 8 if dtype == "bool" else int(tvm.runtime.DataType(dtype).bits)


def static_shape(buffer: Var) -> tuple[int, ...]:
    """Extents of an on-chip buffer."""
    return tuple(int(e) for e in buffer.ty.shape)


@dataclass(eq=False)
class Scope:
    """A statement around others: ``loop`` (For), ``if`` (with its branch), ``while`` or ``group`` (T.ws).

    Compared by identity: two sites are in the same branch where they share the Scope object. ``parent`` is the
    sequence of scopes outside, ``position`` its place among its siblings.
    """

    kind: str
    node: object
    branch: bool = True
    position: int = 0
    group: int = 0

    @property
    def annotations(self) -> dict:
        """A loop's annotations as plain data."""
        return {str(k): plain(v) for k, v in self.node.annotations.items()} if self.kind == "loop" else {}

    @property
    def location(self) -> SourceLocation | None:
        """Where the user wrote it."""
        return SourceLocation.from_span(getattr(self.node, "span", None))


@dataclass
class Term:
    """One index of an access: ``axis + start``, or ``start`` alone (axis None); ``start`` is free of axes."""

    axis: int | None
    start: object

    @property
    def constant(self) -> int | None:
        """The start as an int, None where it is not a constant."""
        return int(self.start.value) if isinstance(self.start, tirx.IntImm) else None


@dataclass
class Access:
    """One access of an operation. ``terms`` has None for an index that is not of the form of :class:`Term`."""

    buffer: Var
    indices: list
    terms: list[Term | None]
    write: bool
    atomic: bool = False

    @property
    def scope(self) -> str:
        """Storage scope of the buffer."""
        return scope_of(self.buffer)

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return dtype_bits(str(self.buffer.ty.dtype))


@dataclass
class RawSite:
    """A uniform statement (Bind, store to a variable) and the scopes around it."""

    stmt: object
    path: tuple[Scope, ...]
    position: int


@dataclass
class Site:
    """A tile operation in its place.

    Attributes
    ----------
    op : TileOp
        The operation.
    path : tuple of Scope
        Scopes around it, outermost first.
    position : int
        Place in the order of the kernel's text.
    threads : int
        Threads that execute it.
    """

    op: TileOp
    path: tuple[Scope, ...]
    position: int
    threads: int
    accesses: list[Access] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the block."""
        return self.op.name

    @property
    def location(self) -> SourceLocation | None:
        """Where the user wrote it."""
        return self.op.location

    @property
    def role(self) -> str | None:
        """Which group of consumer warps does it (``tile.role``), None where all do, or for a load."""
        return self.op.annotations.get("tile.role")

    @property
    def is_load(self) -> bool:
        """Whether it copies from a tensor to a shared tile."""
        op = self.op
        return isinstance(op, CopyOp) and op.src.scope == GLOBAL and op.dst.scope == SHARED

    @property
    def extents(self) -> list[int | None]:
        """Extents of the axes, None where symbolic."""
        return [axis.size for axis in self.op.axes]

    @property
    def loops(self) -> list[Scope]:
        """Enclosing loops, outermost first."""
        return [s for s in self.path if s.kind in ("loop", "while")]

    def of(self, scope: str) -> list[Access]:
        """Accesses to buffers of a storage scope."""
        return [a for a in self.accesses if a.scope == scope]


@dataclass
class KernelView:
    """One kernel: its operations in the order of the text, its views of buffers, its uniform statements."""

    info: KernelInfo
    sites: list[Site]
    raw: list[RawSite]
    loops: list[tuple[tuple[Scope, ...], Scope]]
    bases: dict[Var, Var]

    @property
    def name(self) -> str:
        """Name of the kernel block."""
        return self.info.name

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.info.threads

    @property
    def location(self) -> SourceLocation | None:
        """Where ``T.Kernel`` was written."""
        return SourceLocation.from_span(self.info.block.span)

    def base(self, buffer: Var) -> Var:
        """The allocated buffer behind a view (the buffer itself if it is none)."""
        return self.bases.get(buffer, buffer)

    @cached_property
    def names(self) -> dict[str, Var]:
        """On-chip buffers and views by name."""
        return {b.name: b for b in [*self.info.buffers, *self.bases]}

    @cached_property
    def split(self) -> bool:
        """Whether consumer warps have different roles (front and back)."""
        return any(site.role for site in self.sites)

    def buffers(self, scope: str) -> list[Var]:
        """Allocated buffers of a scope."""
        return [b for b in self.info.buffers if scope_of(b) == scope]

    def views(self, base: Var) -> list[Var]:
        """Views of a buffer."""
        return [v for v, b in self.bases.items() if b.same_as(base)]

    def uses(self, base: Var) -> Iterator[tuple[Site, Access]]:
        """Accesses to a buffer or a view of it, in the order of the text."""
        for site in self.sites:
            for access in site.accesses:
                if self.base(access.buffer).same_as(base):
                    yield site, access

    @cached_property
    def written_globals(self) -> list[Var]:
        """Global tensors that some operation of the kernel writes."""
        found: list[Var] = []
        for site in self.sites:
            for access in site.of(GLOBAL):
                if access.write and all(not access.buffer.same_as(f) for f in found):
                    found.append(access.buffer)
        return found

    @cached_property
    def uniform_reads(self) -> list[Var]:
        """Buffers that uniform statements, conditions and loop bounds read, beside the tile operations."""
        scopes = {id(scope): scope for site in [*self.sites, *self.raw] for scope in site.path}
        parts = [raw.stmt for raw in self.raw]
        for scope in scopes.values():
            if scope.kind == "loop":
                parts += [scope.node.min, scope.node.extent]
            elif scope.kind in ("if", "while"):
                parts.append(scope.node.condition)
        found: list[Var] = []
        for part in parts:
            walk(part, (TensorLoad, lambda load: found.append(load.source)))
        return [self.base(b) for b in found if is_buffer_var(b)]

    @cached_property
    def bound(self) -> dict[Var, tuple[object, RawSite]]:
        """Variables bound by uniform statements: their values and where."""
        return {r.stmt.var: (r.stmt.value, r) for r in self.raw if isinstance(r.stmt, tirx.Bind)}


def kernel_views(func: tirx.PrimFunc) -> list[KernelView]:
    """All kernels of a function."""
    return [_Reader(info).read() for info in kernels_of(func)]


class _Reader:
    def __init__(self, info: KernelInfo) -> None:
        self.info = info
        self.sites: list[Site] = []
        self.raw: list[RawSite] = []
        self.loops: list[tuple[tuple[Scope, ...], Scope]] = []
        self.bases: dict[Var, Var] = {}
        self.position = 0

    def read(self) -> KernelView:
        self._visit(self.info.block.body, ())
        return KernelView(self.info, self.sites, self.raw, self.loops, self.bases)

    def _visit(self, stmt, path: tuple[Scope, ...]) -> None:
        self.position += 1
        if isinstance(stmt, SeqStmt):
            for part in stmt.seq:
                self._visit(part, path)
        elif (matched := match_op(stmt)) is not None:
            groups = [s for s in path if s.kind == "group"]
            op = read_op(matched[1])
            # the front's warpgroup is one more than the kernel was written for
            one = groups or op.annotations.get("tile.role") == FRONT
            threads = FRONT_THREADS if one else self.info.threads
            self.sites.append(Site(op, path, self.position, threads, _accesses(op)))
        elif isinstance(stmt, For):
            scope = Scope("loop", stmt, position=self.position)
            self.loops.append((path, scope))
            self._visit(stmt.body, (*path, scope))
        elif isinstance(stmt, IfThenElse):
            self._visit(stmt.then_case, (*path, Scope("if", stmt, True, self.position)))
            if stmt.else_case is not None:
                self._visit(stmt.else_case, (*path, Scope("if", stmt, False, self.position)))
        elif isinstance(stmt, While):
            self._visit(stmt.body, (*path, Scope("while", stmt, position=self.position)))
        elif isinstance(stmt, SBlockRealize):
            group = int(stmt.block.annotations["tile.ws"]) if "tile.ws" in stmt.block.annotations else 0
            self._visit(stmt.block.body, (*path, Scope("group", stmt.block, position=self.position, group=group)))
        elif isinstance(stmt, DeclBuffer):
            self._view(stmt)
        else:
            self.raw.append(RawSite(stmt, path, self.position))

    def _view(self, stmt: DeclBuffer) -> None:
        hit: list[Var] = []
        walk(stmt.data, (Var, lambda v: hit.append(v) if is_buffer_var(v) else None))
        for buffer in hit:
            if not buffer.same_as(stmt.buffer):
                self.bases[stmt.buffer] = self.bases.get(buffer, buffer)


def _accesses(op: TileOp) -> list[Access]:
    if isinstance(op, GemmOp):
        regions = [(op.a, False), (op.b, False), (op.c, True)] + ([(op.mask, False)] if op.mask is not None else [])
        return [_of_region(r, write) for r, write in regions]
    if isinstance(op, CumsumOp):
        return [_of_region(op.src, False), _of_region(op.dst, True)]
    found: list[Access] = []
    inner: list[Var] = []
    walk(op.body, (For, lambda f: inner.append(f.loop_var)), (tirx.Bind, lambda b: inner.append(b.var)))
    addressed: list = []

    def on_call(call):
        name = getattr(call.op, "name", "")
        if name == "tirx.address_of" and isinstance(call.args[0], TensorLoad):
            load = call.args[0]
            addressed.append(load)
            found.append(Access(load.source, list(load.indices), _terms(load.indices, op, inner), True, atomic=True))

    def on_load(load):
        if is_buffer_var(load.source) and all(not load.same_as(a) for a in addressed):
            found.append(Access(load.source, list(load.indices), _terms(load.indices, op, inner), False))

    def on_store(store):
        found.append(Access(store.buffer, list(store.indices), _terms(store.indices, op, inner), True))

    for stmt in (op.init, op.body):
        if stmt is not None:
            walk(stmt, (tvm.ir.Call, on_call))
            walk(stmt, (TensorLoad, on_load), (BufferStore, on_store))
    return _unique(found)


def _unique(accesses: list[Access]) -> list[Access]:
    out: list[Access] = []
    equal = tvm_ffi.structural_equal
    for a in accesses:
        if not any(
            a.buffer.same_as(b.buffer)
            and a.write == b.write
            and a.atomic == b.atomic
            and all(equal(x, y) for x, y in zip(a.indices, b.indices, strict=True))
            for b in out
        ):
            out.append(a)
    return out


def _of_region(region: Region, write: bool) -> Access:
    terms = [Term(axis, tirx.convert(start)) for axis, start in zip(region.axes, region.mins, strict=True)]
    return Access(region.buffer, list(region.mins), terms, write)


def _terms(indices, op: TileOp, inner: list[Var]) -> list[Term | None]:
    return [_term(index, op, inner) for index in indices]


def _term(index, op: TileOp, inner: list[Var]) -> Term | None:
    index = tirx.convert(index)
    for n, axis in enumerate(op.axes):  # the usual case, without any arithmetic
        if isinstance(index, Var) and index.same_as(axis.var):
            return Term(n, tirx.const(0, "int32"))
    if any(mentions(index, v) for v in inner):
        return None
    loads: list = []
    walk(index, (TensorLoad, loads.append), (tvm.ir.Call, loads.append))
    moved = [n for n, axis in enumerate(op.axes) if mentions(index, axis.var)]
    if not moved:
        return Term(None, index) if not loads else None
    if len(moved) > 1 or loads:
        return None
    found = tvm.sym.detect_linear_equation(index, [op.axes[moved[0]].var])
    if len(found) != 2 or not isinstance(found[0], tirx.IntImm) or int(found[0].value) != 1:
        return None
    return Term(moved[0], tvm.sym.Analyzer().simplify(found[1]))
