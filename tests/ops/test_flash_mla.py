"""``ops.flash_mla``: heads, widths, cache layouts, lengths, splits, extreme scores, NaN."""

from __future__ import annotations

import math

import pytest
import torch

import tvm_tile
from tests.ops.harness import check, compare, generator
from tvm_tile.errors import TileError
from tvm_tile.ops import flash_mla, registry
from tvm_tile.ops.flash_mla import default_splits

TILE = {"block_H": 16, "block_N": 16}
SHAPE = {"batch": 3, "heads": 16, "kv_len": 50, "dim": 32, "pe_dim": 16, "ragged": True}


def test_the_real_widths_and_default_tiles():
    check("flash_mla", {"batch": 2, "heads": 64, "kv_len": 200, "ragged": True}, "bfloat16")


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128, 24, 5])
def test_heads(heads):
    """tilelang 348 and 1191: any number of heads, padded inside the tile."""
    check("flash_mla", {**SHAPE, "heads": heads}, "float32")


@pytest.mark.parametrize(("dim", "pe_dim"), [(512, 16), (512, 32), (64, 64), (512, 64)], ids=str)
def test_widths(dim, pe_dim):
    check("flash_mla", {**SHAPE, "dim": dim, "pe_dim": pe_dim}, "float16", **TILE)


@pytest.mark.parametrize(
    ("dtype", "lowering"),
    [("float16", "optimised"), ("bfloat16", "optimised"), ("bfloat16", "reference"), ("float32", "reference")],
)
def test_dtypes(dtype, lowering):
    check("flash_mla", SHAPE, dtype, lowering, **TILE)


@pytest.mark.parametrize(
    ("kv_len", "ragged"),
    [(1, False), (1, True), (15, True), (16, False), (17, False), (17, True), (100, True)],
    ids=str,
)
def test_lengths(kv_len, ragged):
    """Trip counts from 0; the cache holds NaN beyond each length."""
    check("flash_mla", {**SHAPE, "kv_len": kv_len, "ragged": ragged}, "float32", **TILE)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_heads_of_the_cache(kv_heads):
    check("flash_mla", {**SHAPE, "kv_heads": kv_heads}, "float32", **TILE)


def test_groups_that_no_tile_divides():
    """24 heads for each of 2 cache heads, tiles of 16: no CTA may write another group's rows."""
    check("flash_mla", {**SHAPE, "heads": 48, "kv_heads": 2}, "float32", **TILE)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_cache_layouts(packed, page_size, num_splits):
    shape = {**SHAPE, "packed": packed, "page_size": page_size, "num_splits": num_splits}
    check("flash_mla", shape, "float32", **TILE)


@pytest.mark.parametrize(("num_splits", "kv_len"), [(2, 10), (4, 100), (9, 100)], ids=str)
def test_splits(num_splits, kv_len):
    """More splits than tiles: the empty ones add nothing."""
    check("flash_mla", {**SHAPE, "kv_len": kv_len, "num_splits": num_splits}, "float32", **TILE)


@pytest.mark.parametrize("num_stages", [0, 3])
def test_stages_do_not_change_the_result(num_stages):
    check("flash_mla", SHAPE, "float32", **TILE, num_stages=num_stages)


def test_automatic_splits():
    assert default_splits(batch=128, heads=128, kv_len=4096, block_H=64, block_N=64) == 1
    # 64 CTAs on 132 SMs: two slices run at once, three would take a second turn
    assert default_splits(batch=32, heads=128, kv_len=8192, block_H=64, block_N=64) == 2
    assert default_splits(batch=8, heads=128, kv_len=8192, block_H=64, block_N=64) == 8
    # one CTA: as many slices as there are SMs would take longer to combine
    assert 16 <= default_splits(batch=1, heads=64, kv_len=8192, block_H=64, block_N=64) <= 64
    func = flash_mla(1, 16, 1024, num_splits=None)
    assert int(func.params[-4].ty.shape[2]) == default_splits(1, 16, 1024, 16, 64) > 1


def test_symbolic_length():
    kernel = tvm_tile.compile(flash_mla(2, 8, None, dim=32, pe_dim=16, dtype="float32", **TILE), "llvm")
    spec = registry.get("flash_mla")
    for kv_len in (1, 16, 45):
        shape = {**SHAPE, "batch": 2, "heads": 8, "kv_len": kv_len}
        tensors, _ = spec.inputs(shape, "float32", "cpu", generator(kv_len))
        kernel(*tensors)
        for got, want in zip(tensors[-2:], spec.reference(shape, "float32", tensors), strict=True):
            compare(got, want, (2e-5, 2e-5))


def _run(tensors, shape, **options):
    func = flash_mla(**{k: v for k, v in shape.items() if k != "ragged"}, dtype="float32", **TILE, **options)
    tvm_tile.compile(func, "llvm")(*tensors)
    return tensors[-2:]


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("base", [-6e4, -1e6, 5e4, 1e6])
def test_extreme_scores(base, num_splits):
    """Scores far below -5e4 are not taken for masked ones, large ones do not overflow, across splits too."""
    spec = registry.get("flash_mla")
    shape = {**SHAPE, "num_splits": num_splits}
    tensors, _ = spec.inputs(shape, "float32", "cpu", generator())
    q, q_pe, kv, k_pe, lengths = tensors[:5]
    lengths[:] = torch.tensor([50, 0, 33])
    kv[kv.isnan()] = 1.0
    # scores: base + 0.5 * row from the rotary part alone, exactly representable
    q.zero_(), q_pe.zero_(), k_pe.zero_()
    q_pe[..., 0] = 1.0
    k_pe[..., 0, 0] = base + 0.5 * torch.arange(50)
    out, lse = _run(tensors, shape, sm_scale=1.0)
    scores = k_pe[:, :, 0, 0].double().masked_fill(torch.arange(50) >= lengths[:, None], -math.inf)
    want = torch.einsum("bj,bjd->bd", scores.softmax(-1).nan_to_num(0.0), kv[:, :, 0].double())
    rounding = abs(base) * 2.0**-22
    compare(out, want[:, None].expand(out.shape), (2 * rounding + 1e-5, 2 * rounding + 1e-5))
    compare(lse, scores.logsumexp(-1)[:, None].expand(lse.shape), (1e-6, 1e-5))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_nan_in_a_query_stays_in_its_head(num_splits):
    spec = registry.get("flash_mla")
    shape = {**SHAPE, "num_splits": num_splits}
    tensors, _ = spec.inputs(shape, "float32", "cpu", generator())
    tensors[0][0, 5, 7] = math.nan
    out, lse = _run(tensors, shape)
    assert out[0, 5].isnan().all() and lse[0, 5].isnan()
    for got, want in zip((out, lse), spec.reference(shape, "float32", tensors), strict=True):
        compare(got, want, (2e-5, 2e-5))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_nan_in_the_cache_reaches_its_sequence_only(num_splits):
    spec = registry.get("flash_mla")
    shape = {**SHAPE, "num_splits": num_splits, "ragged": False}
    tensors, _ = spec.inputs(shape, "float32", "cpu", generator())
    tensors[3][2, 40, 0, 1] = math.nan
    out, lse = _run(tensors, shape)
    assert out[2].isnan().all() and lse[2].isnan().all() and not out[:2].isnan().any() and not lse[:2].isnan().any()


def test_finite_cache_skips_the_clearing_only():
    """With the promise kept the result is the same, bit for bit."""
    spec = registry.get("flash_mla")
    tensors, _ = spec.inputs(SHAPE, "float32", "cpu", generator())
    for cache in tensors[2:4]:
        cache[cache.isnan()] = 3.0
    first = [t.clone() for t in _run([t.clone() for t in tensors], SHAPE)]
    second = _run(tensors, SHAPE, finite_cache=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_source_is_the_classic_one():
    """What a reader of MLA kernels looks for is there, and in the printed kernel too."""
    import inspect

    from tvm_tile.ops.flash_mla import flash_mla as factory

    source = " ".join(inspect.getsource(factory).split())
    for line in [
        "KV_shared = T.alloc_shared([block_N, dim], dtype)",
        "T.use_swizzle(10)",
        "for k in T.Pipelined(loop_range, num_stages=num_stages):",
        "T.gemm(Q_pe_shared, K_pe_shared, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)",
        "T.reduce_max(acc_s, scores_max, dim=1, clear=False)",
        "T.exp2(acc_s[i, j] * scale - scores_max[i] * scale)",
        "logsum[i] = logsum[i] * scores_scale[i] + scores_sum[i]",
        "T.gemm(S_shared, KV_shared, acc_o, policy=T.GemmWarpPolicy.FullCol)",
    ]:
        assert line in source
    script = flash_mla(1, 64, 128).script()
    assert '"tile.swizzle": [10, "row"]' in script and script.count('"tile.policy": "FullCol"') == 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=16"),
        ({"pe_dim": 20}, r"pe_dim=20 is not a multiple of 16[\s\S]*pad it with zeros to 32"),
        ({"page_size": 100, "block_N": 64}, r"page_size=100 is not a multiple of block_N=64[\s\S]*use block_N=50"),
        ({"num_pages": 4}, "num_pages needs page_size"),
        ({"num_splits": 0}, "num_splits=0 is not positive"),
        ({"sm_scale": 0.0}, "sm_scale=0.0 must be a positive"),
        ({"kv_len": None, "num_splits": None}, "num_splits must be given for a symbolic kv_len"),
    ],
    ids=str,
)
def test_mistakes_are_refused(options, text):
    with pytest.raises(TileError, match=text):
        flash_mla(2, 16, **{"kv_len": 256, **options})


@pytest.mark.slow
@pytest.mark.parametrize("num_splits", [1, 4])
def test_larger_than_the_default_tiles(num_splits):
    shape = {"batch": 4, "heads": 128, "kv_len": 1000, "ragged": True, "num_splits": num_splits}
    check("flash_mla", shape, "bfloat16")
