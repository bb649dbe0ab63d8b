"""A first kernel: C = relu(A B), tile by tile. The same source runs on CPUs and on NVIDIA GPUs.

python examples/quickstart.py
"""

import torch

import tvm_tile
import tvm_tile.language as T


def matmul_relu(M, N, K, block=64):
    @T.prim_func
    def kernel(A: T.Tensor((M, K), "float32"), B: T.Tensor((K, N), "float32"), C: T.Tensor((M, N), "float32")):
        # one CTA for each 64 x 64 tile of C
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            A_tile = T.alloc_shared((block, 32), "float32")
            B_tile = T.alloc_shared((32, block), "float32")
            C_tile = T.alloc_fragment((block, block), "float32")
            T.clear(C_tile)
            # while a tile is multiplied, the next ones are on their way
            for k in T.Pipelined(T.ceildiv(K, 32), num_stages=2):
                T.copy(A[by * block, k * 32], A_tile)  # elements beyond the edge of A read as 0
                T.copy(B[k * 32, bx * block], B_tile)
                T.gemm(A_tile, B_tile, C_tile)
            for i, j in T.Parallel(block, block):
                C_tile[i, j] = T.max(C_tile[i, j], 0)
            T.copy(C_tile, C[by * block, bx * block])  # elements beyond the edge of C are dropped

    return kernel


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = torch.randn(300, 200, device=device), torch.randn(200, 333, device=device)
    c = torch.empty(300, 333, device=device)

    kernel = tvm_tile.compile(matmul_relu(300, 333, 200))  # for the GPU here, else for this CPU
    kernel(a, b, c)

    error = (c - torch.relu(a @ b)).abs().max().item()
    print(f"max error {error:.2e} on {kernel.target}")
    print("PASS" if error < 1e-3 else "FAIL")
    raise SystemExit(error >= 1e-3)
