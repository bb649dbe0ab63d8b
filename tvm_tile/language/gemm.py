"""``T.gemm``: tile matrix product on tensor cores (or the CPU's matrix units)."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import TensorLoad
from tvm.tirx.script import builder

from ..errors import TileShapeError, TileTypeError
from .context import tile_op
from .copy import fill
from .dtypes import constant
from .emit import nest
from .policy import GemmWarpPolicy, policy_name
from .regions import Region, as_region, check_disjoint, check_static, const_int, scope_name, shape_text
from .values import as_expression, check_uniform, is_expression

__all__ = ["TRIPLES", "gemm"]

# (A, B) -> accumulators. What some instruction of some target computes exactly as written; the same on every target.
TRIPLES: dict[tuple[str, str], tuple[str, ...]] = {
    ("float16", "float16"): ("float32", "float16"),
    ("bfloat16", "bfloat16"): ("float32",),
    ("float32", "float32"): ("float32",),
    ("float64", "float64"): ("float64",),
    ("float8_e4m3fn", "float8_e4m3fn"): ("float32",),
    ("float8_e4m3fn", "float8_e5m2"): ("float32",),
    ("float8_e5m2", "float8_e4m3fn"): ("float32",),
    ("float8_e5m2", "float8_e5m2"): ("float32",),
    ("int8", "int8"): ("int32",),
    ("uint8", "uint8"): ("int32",),
    ("int8", "uint8"): ("int32",),
    ("uint8", "int8"): ("int32",),
}


def gemm(
    A,  # noqa: N803
    B,  # noqa: N803
    C,  # noqa: N803
    transpose_A: bool = False,  # noqa: N803
    transpose_B: bool = False,  # noqa: N803
    policy: str = GemmWarpPolicy.Square,
    clear_accum: bool = False,
    mask=None,
    mask_value=None,
    precision: str = "ieee",
) -> None:
    """``C += op(A) op(B)`` for tiles.

    Parameters
    ----------
    A : buffer or slice
        ``(M, K)``, or ``(K, M)`` with ``transpose_A``; shared tile or fragment.
    B : buffer or slice
        ``(K, N)``, or ``(N, K)`` with ``transpose_B``; shared tile.
    C : buffer or slice
        ``(M, N)`` fragment.
    policy : GemmWarpPolicy
        How warps split C.
    clear_accum : bool
        Start from zero instead of C's values.
    mask : scalar or buffer, optional
        A scalar that is false skips the whole product; a bool or int8 tile of C's shape leaves masked-out elements as
        they are.
    mask_value : scalar, optional
        With a tile mask: the value of masked-out elements.
    precision : str
        ``"ieee"``, or ``"tf32"`` to allow tensor cores for float32 operands (10-bit mantissa).

    Raises
    ------
    TileShapeError, TileTypeError
        When shapes or dtypes do not fit; the message lists the allowed dtype triples.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(
    ...     A: T.Tensor((64, 32), "float16"), B: T.Tensor((64, 32), "float16"), C: T.Tensor((64, 64), "float32")
    ... ):
    ...     with T.Kernel(1, threads=128) as bx:
    ...         a = T.alloc_shared((64, 32), "float16")
    ...         b = T.alloc_shared((64, 32), "float16")
    ...         c = T.alloc_fragment((64, 64), "float32")
    ...         T.copy(A, a)
    ...         T.copy(B, b)
    ...         T.gemm(a, b, c, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
    ...         T.copy(c, C)
    """
    context = tile_op("T.gemm")
    a, b, c = as_region(A, "T.gemm", "A"), as_region(B, "T.gemm", "B"), as_region(C, "T.gemm", "C")
    for name, flag in (("transpose_A", transpose_A), ("transpose_B", transpose_B), ("clear_accum", clear_accum)):
        if not isinstance(flag, bool | int):
            raise TileTypeError(f"T.gemm: {name} must be True or False, but it is {flag!r}")
    _check_scopes(a, b, c)
    m, n, k = _check_shapes(a, b, c, bool(transpose_A), bool(transpose_B))
    _check_dtypes(a, b, c, precision)
    check_disjoint(a, c, "T.gemm", ("A", "C"))
    attrs = {
        "tile.policy": policy_name(policy),
        "tile.trans": [int(bool(transpose_A)), int(bool(transpose_B))],
        "tile.precision": precision,
    }
    if _is_tile(mask):
        _masked(context, a, b, c, (m, n, k), attrs, as_region(mask, "T.gemm", "mask"), mask_value, clear_accum)
        return
    if mask_value is not None:
        raise TileTypeError(
            "T.gemm: mask_value needs a tile mask", advice="pass mask=<tile of C's shape>, or drop mask_value"
        )
    condition = _scalar_mask(mask)
    check_uniform([condition])
    if condition is False:
        if clear_accum:
            fill(C, 0)
        return
    if condition is None:
        _product(context, a, b, c, (m, n, k), attrs, clear=bool(clear_accum))
        return
    if clear_accum:
        fill(C, 0)
    with builder.If(condition), builder.Then(), context.scope("if"):
        _product(context, a, b, c, (m, n, k), attrs, clear=False)


def _operands(a: Region, b: Region, attrs, i, j, k, dtype):
    trans_a, trans_b = attrs["tile.trans"]
    left = a.buffer[tuple(_matrix_index(a, *((k, i) if trans_a else (i, k))))]
    right = b.buffer[tuple(_matrix_index(b, *((j, k) if trans_b else (k, j))))]
    return _cast(left, dtype), _cast(right, dtype)


def _matrix_index(region: Region, row, column) -> list:
    """Indices of element (row, column) of a region whose leading dimensions are units."""
    lead = len(region.mins) - 2
    return region.full_index([0] * lead + [row, column])


def _cast(value, dtype):
    return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)


def _product(context, a, b, c, extents, attrs, clear: bool) -> None:
    with nest(context, "gemm", extents, attrs, "SSR") as (i, j, k):
        at = _matrix_index(c, i, j)
        if clear:
            with builder.init():
                builder.buffer_store(c.buffer, constant(0, c.dtype, "T.gemm"), at)
        left, right = _operands(a, b, attrs, i, j, k, c.dtype)
        builder.buffer_store(c.buffer, c.buffer[tuple(at)] + left * right, at)


def _masked(context, a, b, c, extents, attrs, mask, mask_value, clear) -> None:
    shape = [const_int(e) for e in mask.extents]
    if shape[-2:] != [extents[0], extents[1]] or any(e != 1 for e in shape[:-2]):
        raise TileShapeError(
            f"T.gemm: the mask is {shape_text(mask.extents)}, but C is {shape_text(extents[:2])}",
            advice="a tile mask has C's shape; a single bool expression masks the whole product",
        )
    if mask.dtype not in ("bool", "int8", "uint8"):
        raise TileTypeError(
            f"T.gemm: the mask has dtype {mask.dtype}; it must be bool or int8",
            advice="allocate the mask as bool and set mask[i, j] = condition",
        )
    if mask.scope == "global":
        raise TileTypeError(
            f"T.gemm: the mask ({mask.buffer.name}) is a global tensor",
            advice="T.copy it into a shared tile or fragment first",
        )
    attrs = {**attrs, "tile.mask": 1}
    with nest(context, "gemm", extents, attrs, "SSR") as (i, j, k):
        at = _matrix_index(c, i, j)
        keep = mask.buffer[tuple(_matrix_index(mask, i, j))]
        keep = keep if mask.dtype == "bool" else keep != tirx.const(0, mask.dtype)
        if clear:
            with builder.init():
                builder.buffer_store(c.buffer, constant(0, c.dtype, "T.gemm"), at)
        left, right = _operands(a, b, attrs, i, j, k, c.dtype)
        old = c.buffer[tuple(at)]
        other = old if mask_value is None else constant(mask_value, c.dtype, "T.gemm: mask_value")
        builder.buffer_store(c.buffer, tirx.Select(keep, old + left * right, other), at)


def _is_tile(mask) -> bool:
    if mask is None or isinstance(mask, bool | int):
        return False
    return not is_expression(mask) or (
        isinstance(mask, TensorLoad) and any(isinstance(i, tirx.Ramp) for i in mask.indices)
    )


def _scalar_mask(mask):
    """None: no mask; a Python bool that is False: skip; else a bool expression."""
    if mask is None:
        return None
    if isinstance(mask, bool | int):
        return None if mask else False
    expr = as_expression(mask)
    dtype = str(expr.ty.dtype)
    if dtype == "bool":
        return expr
    if dtype.startswith(("int", "uint")):
        return expr != tirx.const(0, dtype)
    raise TileTypeError(f"T.gemm: the mask has dtype {dtype}; it must be bool or an integer")


def _check_scopes(a: Region, b: Region, c: Region) -> None:
    allowed = {"A": ("shared", "fragment"), "B": ("shared",), "C": ("fragment",)}
    fixes = {
        "A": "T.copy it into a shared tile or a fragment first",
        "B": "T.copy it into a shared tile first",
        "C": "accumulate in a T.alloc_fragment and T.copy it out afterwards",
    }
    for name, region in (("A", a), ("B", b), ("C", c)):
        if region.scope not in allowed[name]:
            where = " or ".join({"shared": "a shared tile", "fragment": "a fragment"}[s] for s in allowed[name])
            raise TileTypeError(
                f"T.gemm: {name} ({region.buffer.name}) is {scope_name(region.buffer)}; it must be {where}",
                advice=fixes[name],
            )


def _check_shapes(a: Region, b: Region, c: Region, trans_a: bool, trans_b: bool) -> tuple[int, int, int]:
    shapes = {}
    for name, region in (("A", a), ("B", b), ("C", c)):
        if region.start_only and len(region.mins) >= 1:
            raise TileShapeError(
                f"T.gemm: {name} is the single element {region}", advice="pass the buffer or a slice of it"
            )
        extents = check_static(region, "T.gemm", name)
        if len(extents) < 2 or any(e != 1 for e in extents[:-2]):
            raise TileShapeError(
                f"T.gemm: {name} ({region}) has shape {shape_text(extents)}; it must be two-dimensional",
                advice="T.reshape the tile, or slice it so that only the last two extents are not 1",
            )
        shapes[name] = tuple(extents[-2:])
    (m, k) = shapes["A"][::-1] if trans_a else shapes["A"]
    (n, k_b) = shapes["B"] if trans_b else shapes["B"][::-1]
    if k != k_b:
        raise TileShapeError(
            f"T.gemm: A is {shape_text(shapes['A'])}{' transposed' if trans_a else ''}, so K = {k}; "
            f"B is {shape_text(shapes['B'])}{' transposed' if trans_b else ''}, so K = {k_b}",
            advice=_transpose_advice(shapes, k, trans_b),
        )
    if shapes["C"] != (m, n):
        raise TileShapeError(
            f"T.gemm: op(A) op(B) is {shape_text((m, n))}, but C is {shape_text(shapes['C'])}",
            advice=f"allocate C as T.alloc_fragment({shape_text((m, n))}, ...), or check the transposes",
        )
    return m, n, k


def _transpose_advice(shapes, k: int, trans_b: bool) -> str:
    if k in shapes["B"]:
        return f"did you mean transpose_B={not trans_b}?"
    return "K of both operands must be the same"


def _check_dtypes(a: Region, b: Region, c: Region, precision: str) -> None:
    allowed = TRIPLES.get((a.dtype, b.dtype), ())
    if c.dtype not in allowed:
        lines = "; ".join(f"{x} x {y} -> {' or '.join(z)}" for (x, y), z in TRIPLES.items())
        raise TileTypeError(
            f"T.gemm: no product of {a.dtype} and {b.dtype} into {c.dtype}",
            advice=(f"accumulate {a.dtype} x {b.dtype} in {' or '.join(allowed)}" if allowed else f"possible: {lines}"),
        )
    if precision not in ("ieee", "tf32"):
        raise TileTypeError(
            f"T.gemm: precision must be 'ieee' or 'tf32', but it is {precision!r}",
            advice="'tf32' allows tensor cores for float32 operands",
        )
    if precision == "tf32" and a.dtype != "float32":
        raise TileTypeError(
            f"T.gemm: precision='tf32' is for float32 operands, but A is {a.dtype}", advice="drop precision="
        )
