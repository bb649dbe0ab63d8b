"""Every op of the library with every option against plain torch, small shapes."""

from __future__ import annotations

import math

import pytest
import torch

from tvm_tile.errors import TileError
from tvm_tile.ops import dequant_gemm, flash_attention, flash_mla, gemm, grouped_gemm, registry, rmsnorm, softmax

from .harness import check_op, generator, out, rand, verify, verify_op

heavy = pytest.mark.heavy
only_sm_90 = pytest.mark.heavy("sm_80")  # of two simulated runs, the one that also covers TMA and wgmma by default
only_sm_80 = pytest.mark.heavy("sm_90")


def case(*values, marks=(), id=None):
    return pytest.param(*values, marks=marks, id=id)


# ------------------------------------------------------------------ gemm
TILE = {"block_M": 64, "block_N": 64, "block_K": 32, "threads": 128}


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float16", (100, 70, 90)),
        ("bfloat16", (65, 136, 200)),
        case("float32", (70, 66, 50), marks=only_sm_80),
        ("int8", (66, 72, 112)),
        case("bfloat16", (128, 128, 64), marks=heavy),
        case("float16", (1, 1, 1), marks=heavy),
        case("int8", (33, 77, 45), marks=heavy),
        case("float32", (128, 64, 32), marks=heavy),
    ],
)
def test_gemm_dtypes(device, dtype, size):
    """Default tiles."""
    check_op(device, "gemm", dict(zip("mnk", size, strict=True)), dtype)


@pytest.mark.parametrize(
    ("dtype", "size"), [("float8_e4m3fn", (40, 80, 96)), case("float8_e5m2", (100, 33, 65), marks=heavy)]
)
def test_gemm_float8(device, dtype, size):
    """tilelang 3004, 303: refused where the GPU has no float8 products, with the triples that it has."""
    shape = dict(zip("mnk", size, strict=True))
    if device.arch == "sm_90":
        check_op(device, "gemm", shape, dtype)
        return
    with pytest.raises(TileError, match=rf"sm_80 has no tensor-core product {dtype}[\s\S]*possible on sm_80: float16"):
        check_op(device, "gemm", shape, dtype)


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", case("float32", marks=heavy), case("int8", marks=heavy)],
)
def test_gemm_transposes(device, trans_a, trans_b, dtype):
    check_op(device, "gemm", {"m": 72, "n": 80, "k": 112, "trans_a": trans_a, "trans_b": trans_b}, dtype, **TILE)


@pytest.mark.parametrize("k", [32, 64, 96, 1, case(33, marks=heavy), case(128, marks=heavy), case(250, marks=heavy)])
@pytest.mark.parametrize("num_stages", [3, case(0, marks=heavy), case(2, marks=heavy), case(4, marks=heavy)])
def test_gemm_trip_counts(device, k, num_stages):
    """K of 1, 2, stages - 1, stages and more tiles; rows of 16-byte and of odd length."""
    check_op(device, "gemm", {"m": 40, "n": 33, "k": k}, "float16", **TILE, num_stages=num_stages)


@pytest.mark.parametrize("block_K", [24, case(8, marks=heavy), case(40, marks=heavy), case(16, marks=heavy)])
@pytest.mark.parametrize("dtype", ["float16", case("bfloat16", marks=heavy), case("float32", marks=heavy)])
def test_block_k_that_is_no_multiple_of_an_instruction(device, block_K, dtype):
    """tilelang 2381: the tail of K must not be dropped."""
    tile = {**TILE, "block_K": block_K}
    check_op(device, "gemm", {"m": 40, "n": 40, "k": 104}, dtype, **tile)


@pytest.mark.parametrize("policy", ["FullRow", "FullCol", case("Square", marks=heavy)])
@pytest.mark.parametrize(
    ("block_M", "block_N", "threads"),
    [case(128, 64, 256, marks=only_sm_90), case(64, 128, 128, marks=heavy), case(32, 48, 32, marks=only_sm_80)],
)
def test_gemm_policies_and_tiles(device, policy, block_M, block_N, threads):
    tile = {"block_M": block_M, "block_N": block_N, "block_K": 32, "threads": threads, "policy": policy}
    check_op(device, "gemm", {"m": 130, "n": 100, "k": 72}, "bfloat16", **tile)


@pytest.mark.parametrize(
    ("split_k", "k", "bias"),
    [(3, 200, True), case(2, 128, False, marks=heavy), case(5, 300, False, marks=heavy)],
)
def test_gemm_split_k(device, split_k, k, bias):
    check_op(device, "gemm", {"m": 66, "n": 40, "k": k, "split_k": split_k, "bias": bias}, "float16", **TILE)


@pytest.mark.parametrize("dtype", ["bfloat16", case("int8", marks=heavy), case("float32", marks=heavy)])
def test_gemm_bias(device, dtype):
    check_op(device, "gemm", {"m": 66, "n": 45, "k": 50, "bias": True}, dtype, **TILE)


@heavy
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("size", [(300, 200, 264), (257, 129, 65)])
def test_gemm_several_tiles(device, dtype, size):
    check_op(device, "gemm", dict(zip("mnk", size, strict=True)), dtype)


def test_gemm_symbolic_sizes(device):
    """One compiled kernel for every shape, odd ones included."""
    kernel = device.compile(gemm(None, None, None, dtype="float16", **TILE))
    for m, n, k in [(1, 1, 1), (7, 100, 33), (64, 64, 32), (101, 65, 1)]:
        a, b, c = rand((m, k), "float16", 1), rand((n, k), "float16", 2), out((m, n), "float16")
        verify(kernel, [a, b, c], {2: a.float() @ b.float().T}, (1e-3, 1e-3))


def test_gemm_one_symbolic_size(device):
    kernel = device.compile(gemm(None, 40, 56, dtype="bfloat16", **TILE))
    for m in (1, 33, 130):
        a, b, c = rand((m, 56), "bfloat16", 1), rand((40, 56), "bfloat16", 2), out((m, 40), "bfloat16")
        verify(kernel, [a, b, c], {2: a.float() @ b.float().T}, (8e-3, 1e-4))


@pytest.mark.parametrize(
    ("out_dtype", "accum_dtype", "tolerance"),
    [
        case("float32", "float32", 1e-4, marks=only_sm_90),
        case("bfloat16", "float32", 8e-3, marks=heavy),
        case("float16", "float16", 2e-2, marks=only_sm_90),
    ],
)
def test_gemm_out_and_accumulator_dtypes(device, out_dtype, accum_dtype, tolerance):
    func = gemm(66, 72, 40, dtype="float16", out_dtype=out_dtype, accum_dtype=accum_dtype, **TILE)
    a, b, c = rand((66, 40), "float16", 1), rand((72, 40), "float16", 2), out((66, 72), out_dtype)
    verify(device.compile(func), [a, b, c], {2: a.float() @ b.float().T}, (tolerance, tolerance))


def test_gemm_of_empty_tensors(device):
    """Nothing is launched for no rows."""
    kernel = device.compile(gemm(None, 16, 16, dtype="float16", **TILE))
    verify(kernel, [out((0, 16), "float16"), rand((16, 16), "float16"), out((0, 16), "float16")], {})


@heavy
def test_gemm_nan_stays_in_its_row_and_column(device):
    a, b, c = rand((70, 40), "float16", 1), rand((72, 40), "float16", 2), out((70, 72), "float16")
    a[3, 5] = math.nan
    b[71, 39] = math.nan
    verify(device.compile(gemm(70, 72, 40, **TILE)), [a, b, c], {2: a.float() @ b.float().T}, (1e-3, 1e-3))


# ------------------------------------------------------------------ flash_attention
ATTENTION = {"batch": 1, "heads": 2, "seq": 100, "dim": 64}
SMALL = {"block_M": 64, "block_N": 32, "threads": 128}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "float16"),
        ({"causal": True}, "bfloat16"),
        case({"causal": True}, "float32", marks=only_sm_80),
        ({"causal": True, "window": 40, "kv_heads": 1}, "float16"),
        ({"window": 30}, "bfloat16"),
        case({"bias": True}, "bfloat16", marks=only_sm_90),
        ({"block_mask": 64, "seq": 200}, "float16"),
        ({"varlen": True, "batch": 3, "causal": True}, "float16"),
        case({"kv_heads": 1}, "bfloat16", marks=heavy),
        case({"heads": 4, "kv_heads": 2, "causal": True}, "float16", marks=heavy),
        case({"varlen": True, "batch": 4}, "bfloat16", marks=heavy),
        case({"varlen": True, "batch": 4, "causal": True, "window": 9}, "float16", marks=heavy),
        case({"block_mask": 64, "seq": 200, "causal": True}, "bfloat16", marks=heavy),
        case({"block_mask": 32, "seq": 90, "window": 20}, "float16", marks=heavy),
        case({"block_mask": 32, "seq": 90, "bias": True}, "float16", marks=heavy),
        case({"bias": True, "causal": True, "window": 9}, "float16", marks=heavy),
        case({"bias": True}, "float32", marks=heavy),
        case({"varlen": True, "batch": 3}, "float32", marks=heavy),
    ],
    ids=str,
)
def test_attention_options(device, options, dtype):
    check_op(device, "flash_attention", {**ATTENTION, **options}, dtype)


@pytest.mark.parametrize(
    "dim",
    [
        case(128, marks=only_sm_90),
        case(256, marks=only_sm_90),
        case(80, marks=only_sm_80),
        96,
        case(40, marks=heavy),
        case(33, marks=heavy),
        case(192, marks=heavy),
    ],  # fmt: skip
)
@pytest.mark.parametrize("dtype", ["bfloat16", case("float16", marks=heavy)])
def test_attention_widths(device, dim, dtype):
    check_op(device, "flash_attention", {"batch": 1, "heads": 1, "seq": 140, "dim": dim, "causal": True}, dtype)


@pytest.mark.parametrize(
    ("seq", "seq_kv"),
    [
        (1, 100),
        case(77, 50, marks=only_sm_90),
        case(1, 1, marks=heavy),
        case(64, 32, marks=heavy),
        case(65, 31, marks=heavy),
        case(50, 77, marks=heavy),
        case(100, 1, marks=heavy),
        case(64, 96, marks=heavy),
    ],
)
@pytest.mark.parametrize("causal", [True, case(False, marks=heavy)])
def test_attention_lengths(device, seq, seq_kv, causal):
    """Trip counts from 0; with more queries than keys the first rows see nothing."""
    shape = {**ATTENTION, "seq": seq, "seq_kv": seq_kv, "causal": causal}
    check_op(device, "flash_attention", shape, "bfloat16", **SMALL)


@pytest.mark.parametrize("num_stages", [case(0, marks=only_sm_80), case(1, marks=heavy), 3])
@pytest.mark.parametrize("options", [{"causal": True}, case({"window": 20, "seq": 200}, marks=heavy)], ids=str)
def test_attention_stages(device, num_stages, options):
    check_op(device, "flash_attention", {**ATTENTION, **options}, "float16", **SMALL, num_stages=num_stages)


@heavy
@pytest.mark.parametrize("window", [1, 5, 32, 33, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_windows(device, window, causal):
    check_op(device, "flash_attention", {**ATTENTION, "window": window, "causal": causal}, "bfloat16", **SMALL)


@heavy
@pytest.mark.parametrize(
    ("block_M", "block_N", "threads"), [(64, 64, 128), (128, 64, 256), (128, 128, 256), (64, 16, 128), (16, 64, 32)]
)
def test_attention_tiles(device, block_M, block_N, threads):
    shape = {**ATTENTION, "causal": True, "window": 50, "seq": 150}
    check_op(device, "flash_attention", shape, "float16", block_M=block_M, block_N=block_N, threads=threads)


def test_attention_symbolic_lengths(device):
    kernel = device.compile(flash_attention(1, 2, None, None, 32, causal=True, dtype="float16", **SMALL))
    for seq, seq_kv in [(1, 1), (33, 33), (16, 50), (80, 20), (5, 0)]:
        shape = {"batch": 1, "heads": 2, "seq": seq, "seq_kv": seq_kv, "dim": 32, "causal": True}
        verify_op(kernel, "flash_attention", shape, "float16", seed=seq)


def test_attention_block_sparse_rows_without_any_block(device):
    """A block row that is skipped whole gives 0 and -inf; a first block that is skipped gives no NaN."""
    spec = registry.get("flash_attention")
    shape = {"batch": 1, "heads": 1, "seq": 192, "dim": 32, "block_mask": 64}
    tensors, _ = spec.inputs(shape, "float16", "cpu", generator())
    tensors[3][0, 0] = torch.tensor([[0, 0, 1], [0, 0, 0], [1, 0, 0]], dtype=torch.int8)
    want = spec.reference(shape, "float16", tensors)
    assert (want[0][0, 64:128] == 0).all() and (want[1][0, 0, 64:128] == -math.inf).all()
    kernel = device.compile(spec.make(shape, "float16", device.arch))
    verify(kernel, tensors, {4: want[0], 5: want[1]}, spec.tolerance(shape, "float16"))


@pytest.mark.parametrize("base", [-6e4, case(-1e6, marks=heavy), case(1e6, marks=heavy)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_extreme_scores(device, base, dtype):
    """flashinfer 4401, flash-attention 2082: scores far below -5e4 are not taken for masked ones."""
    seq = 40
    q, k = torch.zeros(1, seq, 1, 32), torch.zeros(1, seq, 1, 32)
    # exact in bfloat16: the scores are base' + step * key
    q[..., 0], q[..., 1] = 1.0, 1.0
    k[0, :, 0, 0] = torch.tensor(base).bfloat16().float()
    k[0, :, 0, 1] = 0.5 * torch.arange(seq)
    kind = getattr(torch, dtype)
    q, k, v = q.to(kind), k.to(kind), rand((1, seq, 1, 32), dtype, 1)
    func = flash_attention(
        1, 1, seq, seq, 32, sm_scale=1.0, causal=True, dtype=dtype, block_M=64, block_N=16, threads=128
    )
    scores = q[0, :, 0].double() @ k[0, :, 0].double().T
    scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -math.inf)
    want = {3: (scores.softmax(-1) @ v[0, :, 0].double())[None, :, None], 4: scores.logsumexp(-1)[None, None]}
    error = 2 * abs(base) * 2.0**-22 + (1e-5 if dtype == "float32" else 1.6e-2)
    args = [q, k, v, out((1, seq, 1, 32), dtype), out((1, 1, seq))]
    verify(device.compile(func), args, want, (error, error))


@heavy
def test_attention_nan_in_a_query_stays_in_its_row(device):
    spec = registry.get("flash_attention")
    shape = {"batch": 2, "heads": 2, "seq": 70, "dim": 32, "causal": True}
    tensors, _ = spec.inputs(shape, "float16", "cpu", generator())
    tensors[0][1, 20, 1, 3] = math.nan
    want = dict(enumerate(spec.reference(shape, "float16", tensors), 3))
    assert int(want[4].isnan().sum()) == 1
    verify(device.compile(spec.make(shape, "float16", device.arch)), tensors, want, (2e-3, 2e-3))


@heavy
def test_attention_without_lse_and_with_a_scale(device):
    func = flash_attention(1, 2, 50, 50, 64, lse=False, sm_scale=0.7, dtype="float16", **SMALL)
    q, k, v = (rand((1, 50, 2, 64), "float16", s) for s in range(3))
    weights = (torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * 0.7).softmax(-1)
    want = torch.einsum("bhij,bjhd->bihd", weights, v.double())
    verify(device.compile(func), [q, k, v, out((1, 50, 2, 64), "float16")], {3: want}, (2e-3, 2e-3))


# ------------------------------------------------------------------ flash_mla
MLA = {"batch": 3, "heads": 16, "kv_len": 100, "dim": 64, "pe_dim": 16, "ragged": True}
MLA_TILE = {"block_H": 64, "block_N": 32, "threads": 128}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "bfloat16"),
        case({}, "float16", marks=heavy),
        case({}, "float32", marks=only_sm_80),
        ({"packed": True, "page_size": 32, "num_splits": 3}, "bfloat16"),
        case({"packed": True}, "float16", marks=heavy),
        case({"page_size": 64}, "bfloat16", marks=only_sm_90),
        case({"num_splits": 9, "kv_len": 60}, "float16", marks=heavy),
        case({"kv_heads": 2, "heads": 48}, "bfloat16", marks=heavy),
        case({"kv_heads": 4}, "bfloat16", marks=heavy),
        case({"packed": True, "page_size": 64, "num_splits": 2}, "float32", marks=heavy),
        case({"pe_dim": 32}, "bfloat16", marks=heavy),
        ({"pe_dim": 64, "dim": 128}, "bfloat16"),
    ],
    ids=str,
)
def test_mla_options(device, options, dtype):
    check_op(device, "flash_mla", {**MLA, **options}, dtype, **(MLA_TILE if dtype != "float32" else {}))


@pytest.mark.parametrize(
    "heads", [case(8, marks=only_sm_80), case(128, marks=only_sm_90), 5, *(case(h, marks=heavy) for h in (24, 32, 64))]
)
def test_mla_heads(device, heads):
    """tilelang 348 and 1191: any number of heads, padded inside the tile."""
    check_op(device, "flash_mla", {**MLA, "heads": heads, "batch": 2, "kv_len": 60}, "bfloat16")


@pytest.mark.parametrize(
    ("heads", "pe_dim", "dtype"),
    [
        (64, 64, "bfloat16"),
        case(16, 16, "float16", marks=heavy),
        case(32, 16, "bfloat16", marks=heavy),
        case(128, 32, "bfloat16", marks=heavy),
    ],
)
def test_mla_real_width_and_default_tiles(device, heads, pe_dim, dtype):
    """tilelang 348: 32 heads with 512 + 16 dims among them."""
    shape = {"batch": 2, "heads": heads, "kv_len": 130, "pe_dim": pe_dim, "ragged": True}
    check_op(device, "flash_mla", shape, dtype)


@pytest.mark.parametrize("kv_len", [1, case(31, marks=heavy), case(32, marks=heavy), 33, case(64, marks=heavy)])
@pytest.mark.parametrize("num_stages", [2, case(0, marks=heavy), case(3, marks=heavy)])
def test_mla_lengths(device, kv_len, num_stages):
    """Trip counts from 0; the cache holds NaN beyond each length."""
    check_op(device, "flash_mla", {**MLA, "kv_len": kv_len}, "bfloat16", **MLA_TILE, num_stages=num_stages)


def test_mla_symbolic_length(device):
    kernel = device.compile(flash_mla(2, 16, None, dim=64, pe_dim=16, dtype="bfloat16", **MLA_TILE))
    for kv_len in (1, 32, 75):
        verify_op(kernel, "flash_mla", {**MLA, "batch": 2, "kv_len": kv_len}, "bfloat16", seed=kv_len)


@heavy
def test_mla_finite_cache(device):
    spec = registry.get("flash_mla")
    tensors, outputs = spec.inputs(MLA, "bfloat16", "cpu", generator())
    for cache in tensors[2:4]:
        cache[cache.isnan()] = 3.0
    options = {k: v for k, v in MLA.items() if k != "ragged"}
    func = flash_mla(**options, dtype="bfloat16", finite_cache=True, **MLA_TILE)
    want = dict(zip(outputs, spec.reference(MLA, "bfloat16", tensors), strict=True))
    verify(device.compile(func), tensors, want, spec.tolerance(MLA, "bfloat16"))


# ------------------------------------------------------------------ the other ops
@pytest.mark.parametrize(
    ("m", "group_size", "zeros", "dtype"),
    [
        (20, 48, True, "float16"),
        case(1, 32, False, "bfloat16", marks=only_sm_90),
        case(33, 96, False, "float16", marks=heavy),
        case(70, 32, True, "bfloat16", marks=heavy),
    ],
)
def test_dequant_gemm(device, m, group_size, zeros, dtype):
    shape = {"m": m, "n": 50, "k": 96, "group_size": group_size, "zeros": zeros}
    check_op(device, "dequant_gemm", shape, dtype, block_N=64, block_K=32)


@heavy
def test_dequant_gemm_symbolic_rows_and_default_tiles(device):
    spec = registry.get("dequant_gemm")
    shape = {"n": 72, "k": 128, "group_size": 64}
    kernel = device.compile(dequant_gemm(None, 72, 128, group_size=64, target=device.arch))
    for m in (1, 21):
        verify_op(kernel, spec.name, {**shape, "m": m}, "float16", m)


@pytest.mark.parametrize(
    ("total", "groups", "dtype"),
    [
        (100, 7, "bfloat16"),
        case(10, 12, "float16", marks=heavy),
        case(64, 1, "bfloat16", marks=heavy),
        case(100, 7, "float32", marks=heavy),
    ],
)
def test_grouped_gemm(device, total, groups, dtype):
    """Empty groups, groups smaller than a tile, one group."""
    check_op(device, "grouped_gemm", {"total": total, "groups": groups, "n": 50, "k": 45}, dtype, **TILE)


@heavy
def test_grouped_gemm_rows_without_group_keep_their_values(device):
    kernel = device.compile(grouped_gemm(None, 3, 40, 30, dtype="float16", **TILE))
    w = rand((3, 40, 30), "float16")
    for total, offsets in [(40, [0, 40, 40, 40]), (33, [2, 2, 19, 30])]:
        a, c = rand((total, 30), "float16", total), torch.full((total, 40), 7.0).half()
        want = c.double().clone()
        for g in range(3):
            rows = slice(offsets[g], offsets[g + 1])
            want[rows] = a[rows].double() @ w[g].double().T
        args = [a, w, torch.tensor(offsets, dtype=torch.int32), c]
        verify(kernel, args, {3: want}, (1e-3, 1e-3), undefined=False)


@pytest.mark.parametrize("op", ["softmax", "rmsnorm"])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((13, 333), "float32"),
        case((8, 128), "float16", marks=only_sm_80),
        case((1, 1), "bfloat16", marks=heavy),
        case((3, 2000), "bfloat16", marks=heavy),
        case((5, 1000), "float32", marks=heavy),
    ],
    ids=str,
)
def test_row_wise(device, op, size, dtype):
    check_op(device, op, {"rows": size[0], "columns": size[1]}, dtype)


@heavy
@pytest.mark.parametrize("op", [softmax, rmsnorm])
def test_row_wise_symbolic_sizes(device, op):
    kernel = device.compile(op(None, None, dtype="float32", block_N=64))
    for rows, columns in [(1, 1), (7, 65), (20, 300)]:
        verify_op(kernel, op.__name__, {"rows": rows, "columns": columns}, "float32", rows)


def test_softmax_edges(device):
    """Rows of -inf give 0, large values do not overflow, NaN stays in its row."""
    x = rand((5, 100))
    x[0] = -math.inf
    x[1, :70] = -math.inf
    x[2] *= 1e4
    x[3] -= 1e5
    x[4, 50] = math.nan
    want = x.double().softmax(1)
    want[0] = 0
    verify(device.compile(softmax(5, 100, dtype="float32", block_N=32)), [x, out((5, 100))], {1: want}, (1e-4, 1e-6))
