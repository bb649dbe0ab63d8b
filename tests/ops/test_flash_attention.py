"""``ops.flash_attention``: every option, ragged sizes, empty rows, extreme scores, NaN."""

from __future__ import annotations

import math

import pytest
import torch

import tvm_tile
from tests.ops.harness import check, compare, generator
from tvm_tile.errors import TileError
from tvm_tile.ir import kernels_of
from tvm_tile.ops import flash_attention, registry
from tvm_tile.simulate import simulate

TILE = {"block_M": 16, "block_N": 16}
SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "seq": 50, "dim": 32}


def test_default_tiles():
    check("flash_attention", {"batch": 1, "heads": 2, "seq": 300, "dim": 64, "causal": True}, "bfloat16")


@pytest.mark.parametrize(
    ("dim", "options"),
    [
        (128, {}),
        (64, {"bias": True}),
        *(pytest.param(dim, {"causal": True}, marks=pytest.mark.slow) for dim in (64, 128, 256)),
        *(pytest.param(dim, {}, marks=pytest.mark.slow) for dim in (64, 256)),
        *(pytest.param(dim, {"bias": True}, marks=pytest.mark.slow) for dim in (128, 256)),
    ],
    ids=str,
)
def test_default_tiles_of_hopper_do_not_spill(dim, options):
    func = registry.get("flash_attention").make({**SHAPE, "seq": 512, "dim": dim, **options}, "bfloat16", "sm_90")
    assert all(kernel.spill_bytes == 0 for kernel in tvm_tile.compile(func, "sm_90").resources.kernels)


@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
def test_heads(kv_heads):
    check("flash_attention", {**SHAPE, "kv_heads": kv_heads}, "float32", **TILE)


@pytest.mark.parametrize("dim", [64, 96, 128, 256, 80, 40, 33])
def test_widths(dim):
    check("flash_attention", {"batch": 1, "heads": 2, "seq": 40, "dim": dim, "causal": True}, "float16", **TILE)


@pytest.mark.parametrize(
    ("dtype", "lowering"),
    [("float16", "optimised"), ("bfloat16", "optimised"), ("bfloat16", "reference"), ("float32", "reference")],
)
def test_dtypes(dtype, lowering):
    check("flash_attention", {**SHAPE, "causal": True}, dtype, lowering, **TILE)


@pytest.mark.parametrize(
    ("seq", "seq_kv", "causal"),
    [
        (1, 1, True),
        (1, 100, True),
        (16, 16, False),
        (17, 15, True),
        (32, 48, True),
        (50, 77, False),
        (77, 50, True),
        (100, 1, True),
        (100, 1, False),
    ],
    ids=str,
)
def test_lengths(seq, seq_kv, causal):
    """Trip counts from 0; with more queries than keys the first rows see nothing."""
    check("flash_attention", {**SHAPE, "seq": seq, "seq_kv": seq_kv, "causal": causal}, "float32", **TILE)


@pytest.mark.parametrize(
    ("window", "causal"),
    [(1, True), (1, False), (5, True), (16, True), (17, True), (17, False), (40, False), (1000, True)],
    ids=str,
)
def test_window(window, causal):
    check("flash_attention", {**SHAPE, "window": window, "causal": causal}, "float32", **TILE)


@pytest.mark.parametrize(("seq", "seq_kv"), [(20, 90), (90, 20)])
@pytest.mark.parametrize("causal", [False, True])
def test_window_with_other_lengths(seq, seq_kv, causal):
    shape = {**SHAPE, "seq": seq, "seq_kv": seq_kv, "window": 9, "causal": causal}
    check("flash_attention", shape, "float32", **TILE)


@pytest.mark.parametrize(("block_M", "block_N"), [(16, 64), (64, 16), (48, 32)])
def test_tiles_of_different_sizes(block_M, block_N):
    shape = {**SHAPE, "causal": True, "window": 20, "seq": 70}
    check("flash_attention", shape, "float32", block_M=block_M, block_N=block_N)


@pytest.mark.parametrize("num_stages", [0, 3])
def test_stages_do_not_change_the_result(num_stages):
    check("flash_attention", {**SHAPE, "causal": True}, "float32", **TILE, num_stages=num_stages)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 20}, {"bias": True}], ids=str)
def test_block_sparse(options):
    check("flash_attention", {**SHAPE, "seq": 90, "block_mask": 32, **options}, "float32", **TILE)


def test_block_sparse_rows_without_any_block():
    """A block row that is skipped whole gives 0 and -inf (a first block that is skipped must not give NaN)."""
    kernel = tvm_tile.compile(flash_attention(1, 1, 48, 48, 16, block_mask=16, dtype="float32"), "llvm")
    spec = registry.get("flash_attention")
    shape = {"batch": 1, "heads": 1, "seq": 48, "dim": 16, "block_mask": 16}
    tensors, _ = spec.inputs(shape, "float32", "cpu", generator())
    tensors[3][0, 0] = torch.tensor([[0, 0, 1], [0, 0, 0], [1, 0, 0]], dtype=torch.int8)
    kernel(*tensors)
    for got, want in zip(tensors[-2:], spec.reference(shape, "float32", tensors), strict=True):
        compare(got, want, (2e-5, 2e-5))
    assert (tensors[-2][0, 16:32] == 0).all() and (tensors[-1][0, 0, 16:32] == -math.inf).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 9}, {"window": 9}], ids=str)
def test_bias(options):
    check("flash_attention", {**SHAPE, "bias": True, **options}, "float32", **TILE)


def test_bias_broadcast_over_heads_and_minus_infinity():
    """Bias of one head for all; -inf masks, a row of -inf gives 0."""
    batch, heads, seq, dim = 2, 3, 20, 16
    func = flash_attention(batch, heads, seq, seq, dim, bias=(batch, 1), dtype="float32", **TILE)
    q, k, v = (torch.randn(batch, seq, heads, dim) for _ in range(3))
    bias = torch.randn(batch, 1, seq, seq)
    bias[0, 0, 3, :10] = -math.inf
    bias[1, 0, 5, :] = -math.inf
    out, lse = torch.full_like(q, math.nan), torch.full((batch, heads, seq), math.nan)
    tvm_tile.compile(func, "llvm")(q, k, v, bias, out, lse)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * dim**-0.5 + bias.double()
    weights = scores.softmax(-1).nan_to_num(0.0)
    compare(out, torch.einsum("bhij,bjhd->bihd", weights, v.double()), (2e-5, 2e-5))
    compare(lse, scores.logsumexp(-1), (2e-5, 2e-5))
    assert (out[1, 5] == 0).all() and (lse[1, :, 5] == -math.inf).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 9}, {"seq_kv": 90}], ids=str)
def test_variable_length(options):
    check("flash_attention", {**SHAPE, "batch": 4, "varlen": True, **options}, "float32", **TILE)


def test_variable_length_keeps_sequences_apart():
    """A NaN in one sequence reaches no other one, although their rows share tiles."""
    spec = registry.get("flash_attention")
    shape = {"batch": 3, "heads": 2, "seq": 40, "dim": 16, "varlen": True}
    kernel = tvm_tile.compile(spec.make(shape, "float32", "llvm", **TILE), "llvm")
    tensors, _ = spec.inputs(shape, "float32", "cpu", generator(3))
    cu_q, cu_k = torch.tensor([0, 10, 21, 30]), torch.tensor([0, 7, 19, 32])
    for t in (0, -2):
        tensors[t] = tensors[t][:1].repeat(30, 1, 1)
    tensors[0].normal_(generator=generator(4))
    tensors[1], tensors[2] = (torch.randn(32, 2, 16, generator=generator(s)) for s in (5, 6))
    tensors[3], tensors[4], tensors[-1] = cu_q.int(), cu_k.int(), torch.full((2, 30), math.nan)
    for t, start, stop in ((0, 10, 21), (1, 7, 19), (2, 7, 19)):
        tensors[t][start:stop] = math.nan
    kernel(*tensors)
    for got, want in zip(tensors[-2:], spec.reference(shape, "float32", tensors), strict=True):
        compare(got, want, (2e-5, 2e-5))
    assert (
        tensors[-2][10:21].isnan().all() and not tensors[-2][:10].isnan().any() and not tensors[-2][21:].isnan().any()
    )


def test_symbolic_lengths():
    kernel = tvm_tile.compile(flash_attention(1, 2, None, None, 16, causal=True, dtype="float32", **TILE), "llvm")
    spec = registry.get("flash_attention")
    for seq, seq_kv in [(1, 1), (1, 40), (33, 33), (16, 50), (40, 20)]:
        shape = {"batch": 1, "heads": 2, "seq": seq, "seq_kv": seq_kv, "dim": 16, "causal": True}
        tensors, _ = spec.inputs(shape, "float32", "cpu", generator(seq))
        kernel(*tensors)
        for got, want in zip(tensors[-2:], spec.reference(shape, "float32", tensors), strict=True):
            compare(got, want, (2e-5, 2e-5))


def test_without_lse_and_with_a_scale():
    func = flash_attention(1, 2, 20, 20, 16, lse=False, sm_scale=0.7, dtype="float32", **TILE)
    assert [p.name for p in func.params] == ["Q", "K", "V", "Out"]
    q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
    out = torch.full_like(q, math.nan)
    tvm_tile.compile(func, "llvm")(q, k, v, out)
    weights = (torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * 0.7).softmax(-1)
    compare(out, torch.einsum("bhij,bjhd->bihd", weights, v.double()), (2e-5, 2e-5))


# ---- numbers at the edges of their range


def _one_hot_scores(base: float, step: float, seq_kv: int = 40, sm_scale: float = 1.0, causal: bool = False):
    """Attention whose scores are base + step * key exactly; (output, lse) and what they must be."""
    seq = seq_kv
    q, k = torch.zeros(1, seq, 1, 16), torch.zeros(1, seq_kv, 1, 16)
    q[..., 0] = 1.0
    k[0, :, 0, 0] = base + step * torch.arange(seq_kv)
    v = torch.randn(1, seq_kv, 1, 16, generator=generator())
    out, lse = torch.full_like(q, math.nan), torch.full((1, 1, seq), math.nan)
    func = flash_attention(1, 1, seq, seq_kv, 16, sm_scale=sm_scale, causal=causal, dtype="float32", **TILE)
    tvm_tile.compile(func, "llvm")(q, k, v, out, lse)
    scores = (q[0, :, 0].double() @ k[0, :, 0].double().T) * sm_scale
    if causal:
        scores = scores.masked_fill(torch.ones(seq, seq_kv).triu(1).bool(), -math.inf)
    return out[0, :, 0], lse[0, 0], scores.softmax(-1) @ v[0, :, 0].double(), scores.logsumexp(-1)


@pytest.mark.parametrize("base", [-6e4, -5e4, -1e6, 5e4, 1e6])
@pytest.mark.parametrize("causal", [False, True])
def test_extreme_scores(base, causal):
    """Scores far below -5e4 are not taken for masked ones, scores up to 5e4 and more do not overflow."""
    out, lse, want, want_lse = _one_hot_scores(base, 0.5, causal=causal)
    rounding = abs(base) * 2.0**-22  # of the scaled scores in float32
    compare(out, want, (2 * rounding + 1e-5, 2 * rounding + 1e-5))
    compare(lse, want_lse, (1e-6, 1e-5))


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_extreme_scores_and_scales(scale):
    out, lse, want, want_lse = _one_hot_scores(-2e4, 0.25, sm_scale=scale, causal=True)
    rounding = 2e4 * scale * 2.0**-22
    compare(out, want, (2 * rounding + 1e-5, 2 * rounding + 1e-5))
    compare(lse, want_lse, (1e-6, 1e-5))


def _with_nan(tensor: int, index, causal: bool = True):
    """Outputs of causal attention with a NaN at one place of Q, K or V, and those without it."""
    spec = registry.get("flash_attention")
    shape = {"batch": 2, "heads": 2, "seq": 40, "dim": 16, "causal": causal}
    kernel = tvm_tile.compile(spec.make(shape, "float32", "llvm", **TILE), "llvm")
    clean, _ = spec.inputs(shape, "float32", "cpu", generator())
    dirty = [t.clone() for t in clean]
    dirty[tensor][index] = math.nan
    kernel(*clean)
    kernel(*dirty)
    return clean[-2:], dirty[-2:]


def test_nan_in_a_query_stays_in_its_row():
    (out, lse), (out_nan, lse_nan) = _with_nan(0, (1, 20, 1, 3))
    assert out_nan[1, 20, 1].isnan().all() and lse_nan[1, 1, 20].isnan()
    out_nan[1, 20, 1], lse_nan[1, 1, 20] = out[1, 20, 1], lse[1, 1, 20]
    assert torch.equal(out, out_nan) and torch.equal(lse, lse_nan)


def test_nan_in_a_key_reaches_the_rows_that_see_it():
    (out, lse), (out_nan, lse_nan) = _with_nan(1, (0, 20, 1, 3))
    assert out_nan[0, 20:, 1].isnan().all() and lse_nan[0, 1, 20:].isnan().all()
    out_nan[0, 20:, 1], lse_nan[0, 1, 20:] = out[0, 20:, 1], lse[0, 1, 20:]
    assert torch.equal(out, out_nan) and torch.equal(lse, lse_nan)


def test_nan_in_a_value_reaches_the_rows_that_see_it():
    """Only its own column; rows of the same tile that do not see it may have it (0 * NaN), earlier tiles not."""
    (out, _), (out_nan, _) = _with_nan(2, (0, 20, 1, 3))
    assert out_nan[0, 20:, 1, 3].isnan().all()
    assert torch.equal(out[0, :16], out_nan[0, :16]) and torch.equal(out[1], out_nan[1])
    others = [c for c in range(16) if c != 3]
    assert torch.equal(out[0, :, :, others], out_nan[0, :, :, others])


# ---- mistakes


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({"window": 0}, "window=0 is not positive"),
        ({"sm_scale": -1.0}, "sm_scale=-1.0 must be positive"),
        ({"sm_scale": "big"}, "must be a number"),
        ({"dtype": "int8"}, "dtype='int8' is not possible"),
        ({"bias": (3, 1)}, r"bias=\(3, 1\)"),
        ({"bias": True, "varlen": True}, "varlen cannot be combined with bias"),
        ({"block_mask": 48, "block_M": 32}, "block_M=32 does not divide block_mask=48"),
    ],
    ids=str,
)
def test_mistakes_are_refused(options, text):
    with pytest.raises(TileError, match=text):
        flash_attention(2, 4, 64, 64, 32, **options)


def test_too_wide_a_head_is_refused():
    with pytest.raises(TileError, match="dim=576 is above 256"):
        flash_attention(2, 4, 64, 64, 576)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"kv_heads": 1, "causal": True, "window": 100}, {"kv_heads": 8}], ids=str)
def test_larger_than_the_default_tiles(options):
    check("flash_attention", {"batch": 1, "heads": 8, "seq": 1000, "dim": 96, **options}, "bfloat16")


@pytest.mark.parametrize(
    ("heads", "seq", "beside"), [(32, 4096, 4), (32, 16384, 1), (6, 4096, 6), (6, 8192, 2), (5, 4000, 5), (32, None, 1)]
)
def test_heads_launched_together(heads, seq, beside):
    """As few as fill a large GPU with blocks of 128 rows, a divisor of the heads."""
    options = {"lse": False, "target": "sm_90"}
    func = flash_attention(2, heads, seq, seq, 128, causal=True, **options)
    tiled = flash_attention(2, heads, seq, seq, 128, **options)
    assert int(kernels_of(func)[0].grid[1]) == heads // beside
    assert int(kernels_of(tiled)[0].grid[1]) == heads
    if seq:
        assert int(kernels_of(func)[0].grid[0]) == -(-seq // 128) * beside


@pytest.mark.parametrize("heads, seq", [(6, 70), (3, 16)])
def test_longest_rows_of_all_heads_first(heads, seq):
    """Every block of rows of every head is computed, whatever the order."""
    func = flash_attention(2, heads, seq, seq, 32, causal=True, lse=False, target="sm_80", **TILE)
    q, k, v = (torch.randn(2, seq, heads, 32, generator=generator(heads)).half() for _ in range(3))
    out = torch.full_like(q, math.nan)
    simulate(func, "sm_80")(q, k, v, out)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v)), is_causal=True
    )
    torch.testing.assert_close(out.double(), want.transpose(1, 2), rtol=5e-3, atol=3e-3)


def test_maxima_that_grow_little_by_little():
    """Scores that grow by less than what the softmax lets pass with each tile, and by much more over all of them."""
    spec = registry.get("flash_attention")
    shape = spec.complete({"batch": 1, "heads": 1, "seq": 32, "dim": 32, "seq_kv": 256})
    tensors, outputs = spec.inputs(shape, "float32", "cpu", torch.Generator().manual_seed(9))
    q, k = tensors[0], tensors[1]
    q[..., 0], k[..., 0] = 4.0, torch.linspace(-80, 80, 256)[None, :, None].expand_as(k[..., 0])
    want = spec.reference(shape, "float32", tensors)
    for position in outputs:
        tensors[position].fill_(float("nan"))
    tvm_tile.compile(spec.make(shape, "float32", "cpu", block_M=32, block_N=16), "llvm")(*tensors)
    rtol, atol = spec.tolerance(shape, "float32")
    for position, value in zip(outputs, want, strict=True):
        torch.testing.assert_close(tensors[position].double(), value.double(), rtol=rtol, atol=atol)
