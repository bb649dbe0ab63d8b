"""Accumulators that a loop scales by factors which mostly are one: a warp whose factors all are one skips that.

An online softmax rescales its accumulator in every iteration, although the rows' maxima soon change no more. A vote
of the warp costs a few instructions where the multiplication costs one for each register, and a branch that the
compiler moves nothing across. Measured on an H200, skipped and not: MLA decode 264 and 296 us (the multiplications
kept the other role's warps from issuing), causal attention with 128 columns 984 and 1010 us, but with 64 columns 692
and 636 us. Annotation ``tile.unit_factors`` = name of the fragment of factors on the operation, "off" to multiply in
any case; and ``tile.factored`` = 1 on what computes the factors, 0 to leave it as it is written.

Source of the idea: conditional rescaling in FlashAttention-4 (T. Dao et al., 2025).
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm_ffi import structural_equal

from ..errors import TileShapeError
from ..ir.factor import factored
from ..ir.ops import CopyOp, GemmOp, ParallelOp
from ..ir.visit import same_variables
from .analysis import FRAGMENT, KernelView, Site, scope_of, static_shape
from .decisions import OFF, read_factored
from .rule import GIVEN, Decision, NotApplicable, Rule, TileSchedule

__all__ = ["unit_factors"]

#: Registers that are multiplied for each factor from which on the vote and its branch are worth it.
WORTH = 32


def _apply(sch: TileSchedule, hw):
    answers = []
    for kernel, site in sch.sites(ParallelOp):
        found = _factors(kernel, site)
        given = sch.given(site, "tile.unit_factors")
        if given is not None:
            if given != OFF and (not isinstance(found, Var) or found.name != given):
                why = f"its factors are {found.name}" if isinstance(found, Var) else found or "it scales no accumulator"
                raise TileShapeError(f"{site.name} cannot be skipped where {given} is one: {why}", site.location)
            text = "multiplied in any case" if given == OFF else _text(given)
            answers.append(Decision(kernel.name, site.name, text, GIVEN))
            continue
        if found is None:
            continue
        if isinstance(found, str):
            answers.append(NotApplicable(f"multiplied in every iteration: {found}", kernel.name, site.name))
            continue
        sch.annotate(site, "tile.unit_factors", found.name)
        why = "a loop scales the accumulator of its product"
        answers.append(Decision(kernel.name, site.name, _text(found.name), why))
        _exact(sch, kernel, site, found)
    sch.refresh()
    for kernel, site in sch.sites(ParallelOp):
        if read_factored(site.op.annotations):
            text = "a * c - b * c computed as (a - b) * c"
            answers.append(Decision(kernel.name, site.name, text, "equal maxima give factors of exactly one"))
    return answers or NotApplicable("no accumulator that a loop scales")


def _exact(sch: TileSchedule, kernel: KernelView, site: Site, factors: Var) -> None:
    """Have the factors computed so that equal extremes give exactly one."""
    for writer in _computed_by(kernel, site, factors):
        body = writer.op.body
        if sch.given(writer, "tile.factored") is None and not structural_equal(factored(body), body):
            sch.annotate(writer, "tile.factored", 1)


def _computed_by(kernel: KernelView, site: Site, buffer: Var) -> list[Site]:
    """The element-wise operations of a loop whose results reach a fragment, through copies too."""
    found: list[Site] = []
    left, seen = [buffer], {buffer}
    while left:
        for writer in (s for s, access in kernel.uses(left.pop()) if access.write and s.path == site.path):
            if isinstance(writer.op, CopyOp) and writer.op.src.buffer not in seen:
                seen.add(writer.op.src.buffer)
                left.append(writer.op.src.buffer)
            elif isinstance(writer.op, ParallelOp):
                found.append(writer)
    return found


def _text(factors: str) -> str:
    return f"skipped by warps whose factors {factors} all are one"


def _factors(kernel: KernelView, site: Site) -> Var | str | None:
    """The fragment of factors by which an operation scales an accumulator; why that is not skipped; None for others."""
    scaled = _scaling(site.op)
    if scaled is None:
        return None
    target, factors = scaled
    loops = [s for s in site.path if s.kind == "loop"]
    products = [s for s, _ in kernel.uses(target) if isinstance(s.op, GemmOp) and s.op.c.buffer.same_as(target)]
    if not loops or not any(loops[-1] in s.path for s in products):
        return None
    if str(target.ty.dtype) != str(factors.ty.dtype) or not str(target.ty.dtype).startswith("float"):
        return f"{factors.name} is {factors.ty.dtype}"
    ratio = math.prod(static_shape(target)) // math.prod(static_shape(factors) or (1,))
    # a quad of lanes shares a row
    return factors if ratio // 4 >= WORTH else f"a factor of {factors.name} scales {ratio} elements"


def _scaling(op: ParallelOp) -> tuple[Var, Var] | None:
    """(X, V) of an operation ``X[i, j] = X[i, j] * V[i]`` over whole fragments, else None."""
    store = op.body
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, tirx.Mul):
        return None
    left, right = store.value.a, store.value.b
    for own, factor in ((left, right), (right, left)):
        if not (isinstance(own, TensorLoad) and isinstance(factor, TensorLoad)):
            continue
        if not own.source.same_as(store.buffer) or not same_variables(own.indices, store.indices):
            continue
        axes = list(factor.indices)
        along = all(any(same_variables([a], [i]) for i in store.indices) for a in axes)
        fewer = len(axes) < len(store.indices) and along
        fragments = scope_of(store.buffer) == FRAGMENT and scope_of(factor.source) == FRAGMENT
        whole = [int(a.extent) for a in op.axes if isinstance(a.extent, int | tirx.IntImm)]
        if fewer and fragments and whole == list(static_shape(store.buffer)):
            return store.buffer, factor.source
    return None


unit_factors = Rule("unit_factors", _apply)
