"""Scalar parameters on their way to the device.

TVM's launcher passes integers of 32 and 64 bits, uint32 and float32 (``pack_args.h``) and fails at the launch for any
other type: those travel as bits of a type that it knows.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import AttrStmt, Bind, Var, is_buffer_var

from ...ir.visit import mentions, rewrite, substitute

__all__ = ["carry_scalars"]

_CARRIERS = {
    "bool": "int32",
    "int8": "int32",
    "int16": "int32",
    "uint8": "int32",
    "uint16": "int32",
    "uint64": "int64",
    "float64": "int64",
}


def carry_scalars(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with scalars cast around its launches where they cannot be passed as they are.

    Parameters
    ----------
    func : PrimFunc
        Host and device code in one, launches marked by ``thread_extent``. Simplification afterwards would undo it.
    """
    carried = [p for p in func.params if not is_buffer_var(p) and str(p.ty.dtype) in _CARRIERS]
    if not carried:
        return func
    return func.with_body(rewrite(func.body, [(AttrStmt, lambda node, mutator: _launch(node, mutator, carried))]))


def _launch(node: AttrStmt, mutator, carried: list[Var]):
    if str(node.attr_key) != "thread_extent":
        return mutator.default_mutate(node)
    host: list = []
    launch = _inside(node, carried, host)
    return tirx.SeqStmt([*host, launch]) if host else launch


def _inside(node, carried: list[Var], host: list):
    """Binds behind the launch attributes, whose extents are computed on the host."""
    if isinstance(node, AttrStmt) and str(node.attr_key) == "thread_extent":
        return AttrStmt(node.node, node.attr_key, node.value, _inside(node.body, carried, host), node.span)
    arrive, replaced = [], {}
    for param in carried:
        if not mentions(node, param):
            continue
        dtype = str(param.ty.dtype)
        sent, got = Var(f"{param.name}_bits", _CARRIERS[dtype]), Var(f"{param.name}_", dtype)
        host.append(Bind(sent, _converted(param, _CARRIERS[dtype])))
        arrive.append(Bind(got, _converted(sent, dtype)))
        replaced[param] = got
    return tirx.SeqStmt([*arrive, substitute(node, replaced)]) if arrive else node


def _converted(value, dtype: str):
    if "float64" in (dtype, str(value.ty.dtype)):
        return tirx.reinterpret(dtype, value)
    return tirx.NE(value, tirx.const(0, str(value.ty.dtype))) if dtype == "bool" else tirx.Cast(dtype, value)
