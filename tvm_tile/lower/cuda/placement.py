"""Storage of a kernel from its decisions: registers for fragments, tiles for the shared pool, views, locals."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Var
from tvm.tirx import is_buffer_var
from tvm.tirx.stmt import DeclBuffer

from ...errors import InternalError
from ...ir.kernels import KernelInfo
from ...ir.visit import mentions
from ...schedule.decisions import read_fragments, read_shared
from .program import Node, RawNode, walk_nodes
from .storage import Storage

__all__ = ["make_storage", "viewed_buffer"]


def make_storage(info: KernelInfo, nodes: list[Node], copies: dict[Var, int], func: tirx.PrimFunc, location) -> Storage:
    """Thread-level storage of a kernel.

    Parameters
    ----------
    info : KernelInfo
        The kernel with its layouts.
    nodes : list
        Its tree (for the views it declares).
    copies : dict
        Shared tile -> number of copies, where more than one.
    func : PrimFunc
        The function (its parameters).
    location : SourceLocation
        For errors.
    """
    storage = Storage(info.threads, tx=Var("threadIdx_x", "int32"), base=Var("smem_base", "uint32"))
    storage.warpgroup = Var("warpgroup", "int32")
    fragments, shared = read_fragments(info.block), read_shared(info.block)
    for buffer in info.buffers:
        scope = str(buffer.ty.storage_scope)
        if scope == "local.fragment":
            if buffer.name in fragments:  # a fragment that nothing uses has no layout
                storage.new_fragment(buffer, fragments[buffer.name])
        elif scope == "shared":
            if buffer.name in shared:
                storage.new_tile(buffer, shared[buffer.name], copies.get(buffer, 1))
        else:
            storage.locals[buffer] = storage.new_local(buffer.ty.shape, str(buffer.ty.dtype), buffer.name)
    _make_views(storage, info, nodes, fragments, shared, location)
    for param in func.params:
        if is_buffer_var(param) and _may_be_wide(param):
            storage.wide.add(param)
    return storage


def viewed_buffer(stmt: DeclBuffer, buffers) -> Var | None:
    """The buffer whose memory a view (T.reshape, T.view) shares."""
    data = getattr(stmt, "data", None)
    if data is None:
        return None
    return next((b for b in buffers if mentions(data, b)), None)


def _make_views(storage: Storage, info: KernelInfo, nodes: list[Node], fragments, shared, location) -> None:
    for node in walk_nodes(nodes):
        if not (isinstance(node, RawNode) and isinstance(node.stmt, DeclBuffer)):
            continue
        view = node.stmt.buffer
        base = viewed_buffer(node.stmt, [*info.buffers, *storage.fragments, *storage.tiles])
        if base is None:
            raise InternalError(f"view {view.name} of an unknown buffer", location)
        if base in storage.fragments:
            held = storage.fragments[base]
            storage.fragments[view] = type(held)(view, fragments[view.name], held.local, held.words)
        elif base in storage.tiles:
            tile = storage.tiles[base]
            if tile.versions > 1:
                raise InternalError(f"{base.name} has several copies and views", location)
            storage.new_tile(view, shared[view.name]).base = tile.base or tile
        else:
            storage.locals[view] = view


def _may_be_wide(buffer: Var) -> bool:
    """Whether element offsets may exceed 31 bits: large static tensors, and tensors of unknown size."""
    if buffer.ty.strides:
        return True
    total = 1
    for extent in buffer.ty.shape:
        if not isinstance(extent, tirx.IntImm):
            return True
        total *= int(extent.value)
    return total > 2**31 - 1
