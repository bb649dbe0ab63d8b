"""Where a kernel's buffers live: fragments in registers, tiles in the shared pool, variables in locals.

One :class:`Storage` a kernel. It turns accesses of tile-level buffers into accesses of thread-level ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm.script import tirx as T
from tvm.tirx import BufferStore, is_buffer_var

from ...errors import InternalError
from ...ir.visit import rewrite
from ...layout import Fragment, SharedLayout, contains, register_in
from ...schedule.analysis import dtype_bits
from .program import Version

__all__ = ["FragmentStorage", "SharedTile", "Storage", "dtype_bits"]


@dataclass
class FragmentStorage:
    """A fragment's registers: ``local[register]`` on each thread, laid out by ``layout``."""

    buffer: Var
    layout: Fragment
    local: Var
    words: Var | None = None  # the same registers as uint32: packed 8- and 16-bit elements, and int32

    @property
    def dtype(self) -> str:
        """Element dtype."""
        return str(self.buffer.ty.dtype)


@dataclass
class SharedTile:
    """A tile of the shared pool, ``versions`` copies of it.

    ``byte_offset`` is set by the memory planner. ``lasting`` is ``"onwards"`` where the tile's space is taken from its
    first use to the kernel's end (the copy engine may still read it), ``"always"`` where it is taken all the time.
    ``base`` is the tile whose memory this one shows in another shape or dtype (T.reshape, T.view).
    """

    buffer: Var
    layout: SharedLayout
    versions: int = 1
    byte_offset: int | None = None
    view: Var | None = None
    lasting: str = ""
    base: SharedTile | None = None

    @property
    def dtype(self) -> str:
        """Element dtype."""
        return str(self.buffer.ty.dtype)

    @property
    def version_bytes(self) -> int:
        """Bytes from one copy to the next."""
        align = self.layout.alignment
        return -(-self.layout.bytes // align) * align

    @property
    def bytes(self) -> int:
        """Bytes of all copies."""
        return self.version_bytes * self.versions

    @property
    def version_elements(self) -> int:
        """Elements from one copy to the next."""
        return self.version_bytes * 8 // dtype_bits(self.dtype)


@dataclass
class Storage:
    """All thread-level storage of one kernel.

    Attributes
    ----------
    threads : int
        Threads of the CTA.
    tx : Var
        threadIdx.x, int32.
    pool : Var
        The shared pool, uint8.
    base : Var
        Its address in shared memory, uint32.
    warpgroup : Var
        Number of the thread's warpgroup, the same in all lanes of a warp.
    maps : TensorMaps or None
        The kernel's tensor maps, where it has roles.
    persistent : bool
        Whether CTAs visit several tiles.
    stores_by_tma : bool
        Whether some copy stores through the copy engine.
    loops : int
        Loops around the operation that is being lowered.
    """

    threads: int
    tx: Var = None
    pool: Var = None
    base: Var = None
    warpgroup: Var = None
    maps: object = None
    persistent: bool = False
    stores_by_tma: bool = False
    loops: int = 0
    fragments: dict[Var, FragmentStorage] = field(default_factory=dict)
    tiles: dict[Var, SharedTile] = field(default_factory=dict)
    locals: dict[Var, Var] = field(default_factory=dict)
    allocations: list[Var] = field(default_factory=list)
    aliases: dict[Var, Var] = field(default_factory=dict)
    wide: set[Var] = field(default_factory=set)
    names: dict[str, int] = field(default_factory=dict)
    sums: dict[Var, Var] = field(default_factory=dict)

    # ---- making storage

    def unique(self, name: str) -> str:
        """A name that no other thread-level buffer has."""
        count = self.names.get(name, 0)
        self.names[name] = count + 1
        return name if count == 0 else f"{name}_{count}"

    def new_local(self, shape, dtype: str, name: str) -> Var:
        """Registers (or local memory) private to each thread."""
        buffer = tirx.decl_buffer(tuple(shape), dtype, self.unique(name), scope="local", layout=None)
        self.allocations.append(buffer)
        return buffer

    def new_fragment(self, buffer: Var, layout: Fragment) -> FragmentStorage:
        """Registers for a fragment."""
        dtype = str(buffer.ty.dtype)
        # 32-bit words: packed operands of tensor-core instructions and pair conversions address whole words, and
        # instructions take integer sums as untyped words
        per_word = max(1, 32 // dtype_bits(dtype))
        count = -(-layout.registers // per_word) * per_word
        local = self.new_local((count,), dtype, buffer.name)
        words = None
        if per_word > 1 or dtype == "int32":
            words = tirx.decl_buffer(
                (count // per_word,),
                "uint32",
                local.name + "_words",
                data=tirx.buffer_data(local),
                scope="local",
                layout=None,
            )
        made = FragmentStorage(buffer, layout, local, words)
        self.fragments[buffer] = made
        return made

    def new_tile(self, buffer: Var, layout: SharedLayout, versions: int = 1) -> SharedTile:
        """Space in the shared pool for a tile."""
        made = SharedTile(buffer, layout, versions)
        self.tiles[buffer] = made
        return made

    def new_scratch(self, shape, dtype: str, name: str, layout: SharedLayout | None = None) -> SharedTile:
        """A shared tile of the compiler's own (reductions across warps, layout conversions)."""
        buffer = tirx.decl_buffer(tuple(shape), dtype, self.unique(name), scope="shared", layout=None)
        return self.new_tile(buffer, layout or SharedLayout.row_major(shape, dtype_bits(dtype)))

    def partial_sums(self, accumulator: Var, count: int) -> Var:
        """Registers for the partial sums of products along a split K, the same for all products into a fragment."""
        if accumulator not in self.sums:
            self.sums[accumulator] = self.new_local((count,), "float32", f"{accumulator.name}_sums")
        return self.sums[accumulator]

    # ---- shared addresses

    def tile_of(self, buffer: Var) -> SharedTile:
        """The tile behind a shared buffer or a view of one."""
        if buffer not in self.tiles:
            raise InternalError(f"shared buffer {buffer.name} has no place in the pool")
        return self.tiles[buffer]

    def view(self, tile: SharedTile) -> Var:
        """The tile's copies as a typed one-dimensional buffer over the pool."""
        if tile.view is None:
            if tile.byte_offset is None:
                raise InternalError(f"shared tile {tile.buffer.name} is used before it is placed")
            size = tile.bytes * 8 // dtype_bits(tile.dtype)
            tile.view = tirx.decl_buffer(
                (size,), tile.dtype, tile.buffer.name, data=tirx.buffer_data(self.pool),
                elem_offset=tile.byte_offset * 8 // dtype_bits(tile.dtype), scope="shared.dyn", layout=None,
            )  # fmt: skip
        return tile.view

    def element(self, tile: SharedTile, coords, version: Version | None = None):
        """Index of an element in :meth:`view`."""
        at = tile.layout.offset(*coords)
        return at if version is None or tile.versions == 1 else version.index * tile.version_elements + at

    def address(self, tile: SharedTile, element) -> object:
        """Shared-memory address (uint32) of an element index of :meth:`view`."""
        bits = dtype_bits(tile.dtype)
        offset = element if bits == 8 else element * (bits // 8)
        return self.base + T.uint32(tile.byte_offset) + tirx.Cast("uint32", tirx.convert(offset))

    # ---- rewriting

    def global_indices(self, buffer: Var, indices) -> list:
        """Indices of a global access; 64-bit where the tensor may have more than 2^31 elements."""
        if buffer not in self.wide:
            return list(indices)
        return [tirx.Cast("int64", tirx.convert(i)) for i in indices]

    def rewrite(self, node, layout: Fragment | None = None, reg=None, axes=None, versions=None):
        """Thread-level form of an expression or statement.

        Parameters
        ----------
        node : expression or statement
            Over tile-level buffers.
        layout : Fragment, optional
            Layout of the iteration space that is being visited; without it no fragment may occur.
        reg : expression
            Register of ``layout`` that is being visited.
        axes : list of Var
            The iteration variables, one a dimension of ``layout``; they must already be replaced by coordinates in
            ``node`` except inside fragment indices (see :meth:`visit`).
        versions : dict, optional
            Copies of multi-buffered tiles.
        """
        versions = versions or {}

        def place(buffer, indices):
            if buffer in self.fragments:
                return self._register(buffer, indices, layout, reg, axes)
            if buffer in self.tiles:
                tile = self.tiles[buffer]
                return self.view(tile), [self.element(tile, indices, versions.get(buffer))]
            if buffer in self.locals:
                return self.locals[buffer], list(indices)
            return buffer, self.global_indices(buffer, indices)

        def on_load(load, m):
            if not is_buffer_var(load.source):
                return m.default_mutate(load)
            if load.source in self.fragments:
                buffer, at = place(load.source, load.indices)
            else:
                buffer, at = place(load.source, [m.mutate(i) for i in load.indices])
            return tirx.BufferLoad(buffer, at)

        def on_store(store, m):
            value = m.mutate(store.value)
            indices = store.indices if store.buffer in self.fragments else [m.mutate(i) for i in store.indices]
            buffer, at = place(store.buffer, indices)
            return BufferStore(buffer, value, at)

        return rewrite(node, [(TensorLoad, on_load), (BufferStore, on_store)])

    def _register(self, buffer, indices, layout, reg, axes):
        """Register of a fragment element visited by an iteration of ``layout``."""
        held = self.fragments[buffer]
        if layout is None:
            raise InternalError(f"fragment {buffer.name} is read outside of an element-wise loop")
        dims = self.fragment_dims(indices, axes)
        if dims is None or not contains(held.layout, layout, dims):
            raise InternalError(f"fragment {buffer.name} {held.layout} is not at hand in a loop laid out as {layout}")
        return held.local, [register_in(held.layout, layout, self.tx, reg, dims)]

    @staticmethod
    def fragment_dims(indices, axes) -> tuple[int, ...] | None:
        """For each fragment index the axis it is (or -1 for the constant 0); None where it is anything else."""
        dims = []
        for index in indices:
            if isinstance(index, tirx.IntImm) and int(index.value) == 0:
                dims.append(-1)
                continue
            found = [n for n, axis in enumerate(axes or []) if isinstance(index, Var) and index.same_as(axis)]
            if not found:
                return None
            dims.append(found[0])
        return tuple(dims)
