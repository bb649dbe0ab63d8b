"""Epilogues by TMA: boxes of warpgroups, conversions, bounds, and the refusals with their reasons."""

import pytest
import torch

import tvm_tile.language as T
from tvm_tile.lower.cuda import tma_store
from tvm_tile.ops import gemm
from tvm_tile.simulate import SimulationError

from .harness import close, decided, reason, simulated, stores

TILE = {"block_M": 128, "block_N": 128, "block_K": 64, "num_stages": 2, "threads": 256}


def inputs(m, n, k, dtype):
    kind = getattr(torch, dtype)
    if dtype == "int8":
        return torch.randint(-128, 128, (m, k), dtype=kind), torch.randint(-128, 128, (n, k), dtype=kind)
    return torch.randn(m, k).to(kind), torch.randn(n, k).to(kind)


@pytest.mark.parametrize(
    ("dtype", "out", "boxes"),
    [("bfloat16", "bfloat16", 2), ("float16", "float32", 4), ("int8", "int32", 4), ("float16", "float16", 2)],
)
@pytest.mark.parametrize("sms", [1, 8])  # persistent, and in the space that the loads leave
def test_dtypes_and_ragged_edges(dtype, out, boxes, sms):
    m, n, k = 140, 136, 80
    func = decided(gemm(m, n, k, dtype=dtype, out_dtype=out, **TILE), sms)
    assert stores(func)["C"] == ("tma", boxes, None)
    a, b = inputs(m, n, k, dtype)
    c = torch.full((m, n), 0x7F7F7F7F if out == "int32" else float("nan"), dtype=getattr(torch, out))
    simulated(func)(a, b, c)
    close(c, a.double() @ b.double().T, k)


@pytest.mark.parametrize(
    ("block_m", "block_n", "threads"), [(64, 96, 128), (64, 32, 128), (256, 64, 256), (192, 64, 384)]
)
def test_shapes_of_tiles(block_m, block_n, threads):
    m, n, k = 200, 104, 64
    func = decided(
        gemm(m, n, k, dtype="bfloat16", **{**TILE, "block_M": block_m, "block_N": block_n, "threads": threads})
    )
    assert stores(func)["C"][0] == "tma"
    a, b = inputs(m, n, k, "bfloat16")
    c = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    simulated(func)(a, b, c)
    close(c, a.double() @ b.double().T, k)


def batched(flag: bool):
    """A product a batch, stored twice: as it is, and in the middle dimension of a larger tensor under a condition."""

    @T.prim_func
    def main(
        A: T.Tensor((3, 100, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((3, 100, 64), "float16"),
        D: T.Tensor((3, 2, 100, 64), "float32"), wanted: T.int32,
    ):  # fmt: skip
        with T.Kernel(3, threads=128) as bz:
            A_s = T.alloc_shared((64, 64), "float16")
            B_s = T.alloc_shared((64, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.clear(acc)
            for _ in T.Pipelined(1, num_stages=2):
                T.copy(A[bz, 64, 0], A_s)
                T.copy(B, B_s)
                T.gemm(A_s, B_s, acc, transpose_B=True)
            if wanted > 0:
                T.copy(acc, D[bz, 1, 64:128, 0:64])
            T.copy(acc, C[bz, 64:128, 0:64])

    return main


@pytest.mark.parametrize("wanted", [0, 1])
def test_several_stores_and_conditions(wanted):
    func = decided(batched(True), 132)
    assert stores(func)["C"][0] == stores(func)["D"][0] == "tma"
    a, b = torch.randn(3, 100, 64).half(), torch.randn(64, 64).half()
    c, d = torch.full((3, 100, 64), 7.0).half(), torch.full((3, 2, 100, 64), 7.0)
    simulated(func)(a, b, c, d, wanted)
    want = a.double() @ b.double().T
    close(c[:, 64:], want[:, 64:], 64)
    assert bool((c[:, :64] == 7).all()) and bool((d[:, 0] == 7).all()) and bool((d[:, 1, :64] == 7).all())
    if wanted:
        close(d[:, 1, 64:], want[:, 64:], 64)
    else:
        assert bool((d == 7).all())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n": 129}, "no multiple of 16"),
        ({"k": 77}, "the kernel has one role"),
        ({"block_N": 40}, "not made of a warpgroup's boxes"),
        ({"dtype": "float16", "out_dtype": "bfloat16", "accum_dtype": "float16"}, "it converts float16 to bfloat16"),
    ],
)
def test_reasons_against_it(options, text):
    arguments = {"m": 128, "n": 128, "k": 128, "dtype": "bfloat16", **TILE, **options}
    m, n, k = (arguments.pop(name) for name in "mnk")
    func = decided(gemm(m, n, k, **arguments))
    assert stores(func)["C"][0] != "tma"
    assert text in reason(func, "tma_store")


@pytest.mark.parametrize("fault", ["_wait", "_publish"])
def test_a_missing_wait_is_caught(monkeypatch, fault):
    """What keeps a slot from being overwritten, or stored too early, is needed: the simulator finds its absence."""
    func = decided(gemm(256, 256, 64, dtype="bfloat16", **TILE), 1)
    monkeypatch.setattr(tma_store._Store, fault, lambda self, *_: None)
    kernel = simulated(func)
    a, b = inputs(256, 256, 64, "bfloat16")
    with pytest.raises(SimulationError):
        kernel(a, b, torch.empty(256, 256, dtype=torch.bfloat16))
