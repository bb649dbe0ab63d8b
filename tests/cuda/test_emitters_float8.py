"""float8 before sm_89: bytes are moved, only conversions know what they mean."""

import pytest
import torch
from tvm import tirx

import tvm_tile
import tvm_tile.language as T
from tvm_tile import hardware
from tvm_tile.errors import TileTypeError
from tvm_tile.ir.visit import walk
from tvm_tile.lower.cuda import lower_cuda
from tvm_tile.lower.cuda.float8 import float8_as_bytes, float8_code
from tvm_tile.simulate import simulate_module

from .emitters import DTYPES, poisoned

SM_80 = hardware.lookup("sm_80")


def _lowered(func):
    made = lower_cuda(func, tvm_tile.target("sm_80"))
    return made.with_body(float8_as_bytes(made.body, SM_80))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_codes_of_constants(dtype):
    values = [
        0.0,
        -0.0,
        1.0,
        -2.5,
        447.0,
        1e9,
        -1e9,
        float("inf"),
        2.0**-9,
        2.0**-10,
        3 * 2.0**-10,
        0.3,
        17.0,
        2.0**-17,
    ]
    limit = torch.finfo(DTYPES[dtype]).max
    for value in values:
        want = torch.tensor(value).clamp(-limit, limit).to(DTYPES[dtype]).view(torch.uint8)
        assert float8_code(value, dtype) == int(want), value
    assert torch.tensor(float8_code(float("nan"), dtype), dtype=torch.uint8).view(DTYPES[dtype]).float().isnan()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_code_is_moved_and_converted(dtype):
    @T.prim_func
    def k(A: T.Tensor((30, 33), dtype), C: T.Tensor((30, 33), dtype), D: T.Tensor((32, 32), "float16")):
        with T.Kernel(1, threads=64) as bx:
            s = T.alloc_shared((32, 32), dtype)
            f = T.alloc_fragment((32, 32), dtype)
            g = T.alloc_fragment((32, 32), "float16")
            T.copy(A[2, 3], s)
            T.copy(s, f)
            T.copy(f, C[2, 3])
            T.copy(f, g)
            for i, j in T.Parallel(32, 32):
                g[i, j] = T.if_then_else(i > j, T.cast(f[i, j], "float16"), g[i, j])
            T.copy(g, D)

    lowered = _lowered(k)
    left: list = []
    walk(lowered.body, (tirx.Cast, left.append))
    assert not any("float8" in str(c.ty.dtype) or "float8" in str(c.value.ty.dtype) for c in left)
    a = torch.arange(990).to(torch.uint8).view(DTYPES[dtype]).reshape(30, 33)
    c, d = poisoned((30, 33), dtype), poisoned((32, 32), "float16")
    simulate_module(lowered, tvm_tile.target("sm_80"))(a, c, d, undefined=(2,))
    assert torch.equal(c.view(torch.uint8)[2:, 3:], a.view(torch.uint8)[2:, 3:])
    want = torch.zeros(32, 32)
    want[:28, :30] = a.float()[2:, 3:]
    assert torch.equal(d.float().nan_to_num(nan=1e5), want.nan_to_num(nan=1e5))


def test_arithmetic_is_refused():
    @T.prim_func
    def k(A: T.Tensor((32,), "float8_e4m3fn"), C: T.Tensor((32,), "float8_e4m3fn")):
        with T.Kernel(1, threads=32) as bx:
            for i in T.Parallel(32):
                C[i] = A[i] + A[i]

    with pytest.raises(TileTypeError, match="float8_e4m3fn"):
        _lowered(k)
