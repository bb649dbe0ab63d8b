"""A tile GEMM inside a Relax module: R.call_tir calls it beside operators that TVM itself lowers.

python examples/relax_module.py
"""

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_tile
import tvm_tile.language as T


@I.ir_module
class Module:
    @T.prim_func
    def tile_gemm(
        A: T.Tensor((100, 200), "float32"), B: T.Tensor((150, 200), "float32"), C: T.Tensor((100, 150), "float32")
    ):
        with T.Kernel(T.ceildiv(150, 64), T.ceildiv(100, 64), threads=128) as (bx, by):
            A_shared = T.alloc_shared((64, 32), "float32")
            B_shared = T.alloc_shared((64, 32), "float32")
            C_local = T.alloc_fragment((64, 64), "float32")
            T.clear(C_local)
            for k in T.Pipelined(T.ceildiv(200, 32), num_stages=2):
                T.copy(A[by * 64, k * 32], A_shared)
                T.copy(B[bx * 64, k * 32], B_shared)
                T.gemm(A_shared, B_shared, C_local, transpose_B=True)
            T.copy(C_local, C[by * 64, bx * 64])

    @R.function
    def main(x: R.Tensor((100, 200), "float32"), w: R.Tensor((150, 200), "float32")) -> R.Tensor((100, 150), "float32"):
        cls = Module
        with R.dataflow():
            product = R.call_tir(cls.tile_gemm, (x, w), R.Tensor((100, 150), "float32"))
            out = R.nn.softmax(R.nn.relu(product))
            R.output(out)
        return out


if __name__ == "__main__":
    executable = tvm.compile(Module, tvm_tile.target("llvm"), tir_pipeline="tvm_tile")
    x = np.random.randn(100, 200).astype("float32")
    w = np.random.randn(150, 200).astype("float32")
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w)).numpy()

    hidden = np.maximum(x @ w.T, 0)
    expected = np.exp(hidden - hidden.max(1, keepdims=True))
    expected /= expected.sum(1, keepdims=True)
    error = np.abs(result - expected).max()
    print(f"max error {error:.2e}")
    print("PASS" if error < 1e-4 else "FAIL")
    raise SystemExit(bool(error >= 1e-4))
