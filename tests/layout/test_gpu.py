"""The tables of this package against the hardware: mma.sync, ldmatrix, stmatrix and wgmma on one warp or warpgroup.

One CUDA file with a kernel a case is generated from the layout functions, compiled with nvcc, and fed through ctypes.
Operands are small integers, so that every dtype gives the exact product.
"""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

from tvm_tile.layout import (
    INSTRUCTIONS,
    MMA,
    WGMMA,
    SharedLayout,
    a_atom,
    b_atom,
    c_atom,
    load_a,
    load_b,
    operand_descriptor,
    store_c,
)

pytestmark = pytest.mark.gpu

FP8_CODES = {"float8_e4m3fn": {0: 0, 1: 0x38, 2: 0x40}, "float8_e5m2": {0: 0, 1: 0x3C, 2: 0x40}}


def encode(values, dtype):
    """Bits of small integers in a dtype, as the unsigned type of its width."""
    if dtype in FP8_CODES:
        code = np.vectorize(lambda v: FP8_CODES[dtype][abs(int(v))] | (0x80 if v < 0 else 0), otypes=[np.uint8])
        return code(values)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype in ("tf32", "float32"):
        return values.astype(np.float32).view(np.uint32)
    return values.astype(dtype).view(np.uint8 if dtype in ("int8", "uint8") else np.uint32)


def decode_accumulator(words, dtype):
    """Accumulator elements of packed 32-bit registers."""
    return words.view({"float32": np.float32, "float16": np.float16, "int32": np.int32}[dtype]).astype(np.float64)


def operand(rng, shape, dtype):
    return rng.integers(0 if dtype == "uint8" else -2, 3, shape)


def pack(fragment, tile, dtype):
    """32-bit registers (thread, word) of a tile."""
    threads, regs = np.meshgrid(np.arange(fragment.used_threads), np.arange(fragment.registers), indexing="ij")
    return np.ascontiguousarray(encode(tile[fragment.coords(threads, regs)], dtype)).view(np.uint32)


def unpack(fragment, words, dtype):
    """Tile from accumulator registers; what no register holds stays NaN."""
    values = decode_accumulator(np.ascontiguousarray(words), dtype)
    tile = np.full(fragment.shape, np.nan)
    threads, regs = np.meshgrid(np.arange(fragment.used_threads), np.arange(fragment.registers), indexing="ij")
    tile[fragment.coords(threads, regs)] = values
    return tile


def image(layout, tile, dtype):
    """Bytes of a tile in shared memory; unused bytes are poison."""
    flat = np.full(layout.size * layout.dtype_bits // 8, 0x7F, np.uint8).view(encode(tile[:1, :1], dtype).dtype)
    flat[layout.offset(*np.indices(tile.shape))] = encode(tile, dtype)
    return flat.view(np.uint8)


PRELUDE = r"""
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>
__device__ inline uint32_t smem_at(void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
template <class K>
static int launch(K kernel, int threads, const void* in, int n_in, void* out, int n_out) {
  char *a = nullptr, *b = nullptr;
  cudaMalloc(&a, n_in); cudaMalloc(&b, n_out);
  cudaMemcpy(a, in, n_in, cudaMemcpyHostToDevice); cudaMemset(b, 0x7f, n_out);
  cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024);
  kernel<<<1, threads, 200 * 1024>>>((const uint32_t*)a, (uint32_t*)b);
  cudaMemcpy(out, b, n_out, cudaMemcpyDeviceToHost);
  cudaFree(a); cudaFree(b);
  return (int)cudaGetLastError();
}
"""


def kernel_source(name, threads, body):
    return f"""
__global__ void {name}(const uint32_t* in, uint32_t* out) {{
  extern __shared__ __align__(1024) uint8_t smem[];
  int t = threadIdx.x;
{body}
}}
extern "C" int run_{name}(const void* in, int n_in, void* out, int n_out) {{
  return launch({name}, {threads}, in, n_in, out, n_out);
}}
"""


def asm(ptx, outputs, inputs, constraint="+r"):
    """Inline assembly with braces round register lists; outputs and inputs are lists of lists of C expressions."""
    number = iter(range(10000))
    groups = ["{" + ", ".join(f"%{next(number)}" for _ in group) + "}" for group in outputs]
    binds = ", ".join(f'"{constraint}"({v})' for group in outputs for v in group)
    groups += ["{" + ", ".join(f"%{next(number)}" for _ in group) + "}" for group in inputs]
    reads = ", ".join(f'"r"({v})' for group in inputs for v in group)
    return groups, binds, reads


def mma_case(name, inst):
    na, nb, nc = inst.a_registers, inst.b_registers, inst.c_registers
    groups, binds, reads = asm(inst.ptx, [[f"d[{i}]" for i in range(nc)]],
                               [[f"in[t * {na} + {i}]" for i in range(na)],
                                [f"in[{32 * na} + t * {nb} + {i}]" for i in range(nb)]])
    body = f"""  uint32_t d[{nc}] = {{0}};
  asm volatile("{inst.ptx} {groups[0]}, {groups[1]}, {groups[2]}, {groups[0]};" : {binds} : {reads});
  for (int i = 0; i < {nc}; i++) out[t * {nc} + i] = d[i];"""
    return kernel_source(name, 32, body)


def copy_in(words, offset=0):
    return (f"  for (int i = t; i < {words}; i += blockDim.x) ((uint32_t*)smem)[i] = in[{offset} + i];\n"
            "  __syncthreads();\n")


def ldmatrix_case(name, move, layout):
    """Input: the image, then each lane's byte address."""
    words = layout.bytes // 4
    regs = ", ".join(f"%{i}" for i in range(move.count))
    binds = ", ".join(f'"=r"(d[{i}])' for i in range(move.count))
    body = copy_in(words) + f"""  uint32_t d[{move.count}];
  asm volatile("{move.ptx} {{{regs}}}, [%{move.count}];" : {binds} : "r"(smem_at(smem) + in[{words} + t]));
  for (int i = 0; i < {move.count}; i++) out[t * {move.count} + i] = d[i];"""
    return kernel_source(name, 32, body)


def stmatrix_case(name, move, layout):
    """Input: each lane's byte address, then its registers; output: the image."""
    regs = ", ".join(f"%{i + 1}" for i in range(move.count))
    reads = ", ".join(f'"r"(in[32 + t * {move.count} + {i}])' for i in range(move.count))
    words = layout.bytes // 4
    body = f"""  for (int i = t; i < {words}; i += 32) ((uint32_t*)smem)[i] = 0x7f7f7f7f;
  __syncthreads();
  asm volatile("{move.ptx} [%0], {{{regs}}};" :: "r"(smem_at(smem) + in[t]), {reads} : "memory");
  __syncthreads();
  for (int i = t; i < {words}; i += 32) out[i] = ((uint32_t*)smem)[i];"""
    return kernel_source(name, 32, body)


def wgmma_case(name, inst, a_words, b_at, b_words, a_descs, b_descs, registers_a, trans):
    """Input: image(s) as laid out in shared memory, then for the RS form A's registers of each K step."""
    nc = inst.c_registers
    body = copy_in(b_at // 4 + b_words)
    body += f"""  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  uint32_t d[{nc}];
  for (int i = 0; i < {nc}; i++) d[i] = 0;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
"""
    for step, (da, db) in enumerate(zip(a_descs, b_descs, strict=True)):
        dregs = ", ".join(f"%{i}" for i in range(nc))
        binds = ", ".join(f'"+r"(d[{i}])' for i in range(nc))
        base = "((uint64_t)((smem_at(smem) >> 4) & 0x3FFF))"
        extra = ", 1, 1" if inst.c_dtype != "int32" else ""
        if registers_a:
            start = b_at // 4 + b_words + step * 128 * 4
            a_text = "{" + ", ".join(f"%{nc + i}" for i in range(4)) + "}"
            reads = ", ".join(f'"r"(in[{start} + t * 4 + {i}])' for i in range(4))
            used, imm = nc + 4, f", {trans[1]}" if inst.operand_bits == 16 else ""
        else:
            a_text, reads, used = f"%{nc}", f'"l"(0x{da:x}ull + {base})', nc + 1
            imm = f", {trans[0]}, {trans[1]}" if inst.operand_bits == 16 else ""
        body += (f'  asm volatile("{inst.ptx} {{{dregs}}}, {a_text}, %{used}, 1{extra}{imm};" : {binds} : {reads}, '
                 f'"l"(0x{db:x}ull + {base}));\n')
    body += f"""  asm volatile("wgmma.commit_group.sync.aligned;\\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < {nc}; i++) out[t * {nc} + i] = d[i];"""
    return kernel_source(name, 128, body)


# ---- cases ----------------------------------------------------------------------------------------------------------

MMAS = {f"mma_{i}": inst for i, inst in enumerate(INSTRUCTIONS[MMA])}


def _moves():
    by_bits = {16: INSTRUCTIONS[MMA][0]}
    for inst in INSTRUCTIONS[MMA]:
        by_bits.setdefault(inst.operand_bits, inst)
    moves = {}
    for bits, inst in by_bits.items():
        for form, move in (("a4", load_a(inst)), ("b2", load_b(inst)), ("b4", load_b(inst, 4))):
            moves[f"ld_{form}_{bits}"] = (inst, form[0], move)
    f16 = by_bits[16]
    moves["ld_a4t_16"] = (f16, "a", load_a(f16, trans=True))
    moves["ld_b4t_16"] = (f16, "b", load_b(f16, 4, True))
    return moves


MOVES = _moves()
STORES = {"st_4": store_c(), "st_4t": store_c(trans=True), "st_2": store_c(2)}


def _wgmmas():
    """name -> (instruction, span, A form: K, MN or R (registers), B K-major, extents beyond one instruction)."""
    found = {}
    for base in INSTRUCTIONS[WGMMA]:
        for n in (8, 64, 192):
            found[f"wg_{base.a_dtype}_{base.b_dtype}_{base.c_dtype}_{n}"] = (base.with_n(n), 128, "K", True)
        found[f"wg_{base.a_dtype}_{base.b_dtype}_{base.c_dtype}_rs"] = (base.with_n(32), 128, "R", True)
    bf16 = next(i for i in INSTRUCTIONS[WGMMA] if i.a_dtype == "bfloat16")
    for span in (128, 64, 32):
        for a_form in "KMR":
            for b_major in (True, False):
                found[f"wg_{span}_{a_form}_{'K' if b_major else 'M'}"] = (bf16.with_n(96), span, a_form, b_major)
        for dtype, n in (("int8", 96), ("tf32", 24)):
            inst = next(i for i in INSTRUCTIONS[WGMMA] if i.a_dtype == dtype)
            found[f"wg_{span}_{dtype}"] = (inst.with_n(n), span, "K", True)
    return found


WGMMAS = _wgmmas()


class WgmmaTiles:
    """Shared tiles of one wgmma case, larger than the instruction, which starts in their middle."""

    def __init__(self, inst, span, a_form, b_major):
        bits = inst.operand_bits
        per_span = span * 8 // bits
        self.steps, mn_step = 2 if span == 32 else 4, per_span if bits == 16 else 8
        self.k = inst.k * self.steps
        wide_k = max(self.k, per_span) // per_span * per_span + per_span
        self.k0 = wide_k - self.k
        up = lambda extent: -(-(mn_step + extent) // per_span) * per_span  # noqa: E731
        self.a_mn0 = self.b_mn0 = mn_step
        a_shape = (72, wide_k) if a_form == "K" else (wide_k, up(64))
        b_shape = (mn_step + inst.n, wide_k) if b_major else (wide_k, up(inst.n))
        if a_form == "K":
            self.a_mn0 = 8
        self.a_layout = SharedLayout.swizzled(a_shape, bits, span)
        self.b_layout = SharedLayout.swizzled(b_shape, bits, span)
        self.b_at = -(-self.a_layout.bytes // 1024) * 1024
        self.a = operand_descriptor(self.a_layout, 64, a_form == "K") if a_form != "R" else None
        self.b = operand_descriptor(self.b_layout, inst.n, b_major)
        self.a_form, self.b_major = a_form, b_major

    def descriptors(self, inst):
        ks = [self.k0 + s * inst.k for s in range(self.steps)]
        a = [self.a.bits + (self.a.start(self.a_mn0, k) >> 4) if self.a else 0 for k in ks]
        return a, [self.b.bits + ((self.b_at + self.b.start(self.b_mn0, k)) >> 4) for k in ks]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Compiled kernels: ``run(name, inputs, words)`` gives the output's 32-bit words."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    folder = tmp_path_factory.mktemp("layout_gpu")
    (folder / "cases.cu").write_text(source())
    subprocess.run([nvcc, "-O1", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-gencode",
                    "arch=compute_90a,code=sm_90a", "-o", folder / "cases.so", folder / "cases.cu"], check=True,
                   timeout=500)
    loaded = ctypes.CDLL(str(folder / "cases.so"))

    def run(name, inputs, words):
        data = np.concatenate([np.ascontiguousarray(i).view(np.uint8).ravel() for i in inputs])
        out = np.full(words, 0x7F7F7F7F, np.uint32)
        code = getattr(loaded, f"run_{name}")(data.ctypes.data_as(ctypes.c_void_p), data.nbytes,
                                              out.ctypes.data_as(ctypes.c_void_p), out.nbytes)
        assert code == 0, f"CUDA error {code}"
        return out
    return run


def move_layout(inst, move):
    rows, columns = move.extent
    bits = inst.operand_bits
    return SharedLayout.swizzled((rows + 8, 2 * max(columns, 1024 // bits)), bits, 128)


def store_layout(move):
    return SharedLayout.swizzled((move.extent[0] + 8, 64), 16, 128)


def source():
    parts = [PRELUDE]
    parts += [mma_case(name, inst) for name, inst in MMAS.items()]
    parts += [ldmatrix_case(name, move, move_layout(inst, move)) for name, (inst, _, move) in MOVES.items()]
    parts += [stmatrix_case(name, move, store_layout(move)) for name, move in STORES.items()]
    for name, (inst, span, a_form, b_major) in WGMMAS.items():
        tiles = WgmmaTiles(inst, span, a_form, b_major)
        a, b = tiles.descriptors(inst)
        trans = (0 if a_form == "K" else 1, tiles.b.trans)
        parts.append(wgmma_case(name, inst, tiles.a_layout.bytes // 4, tiles.b_at, tiles.b_layout.bytes // 4, a, b,
                                a_form == "R", trans))
    return "".join(parts)


@pytest.mark.parametrize("name", MMAS)
def test_mma(library, name):
    inst, rng = MMAS[name], np.random.default_rng(len(name))
    a, b = operand(rng, (16, inst.k), inst.a_dtype), operand(rng, (inst.k, 8), inst.b_dtype)
    out = library(name, [pack(a_atom(inst), a, inst.a_dtype), pack(b_atom(inst), b, inst.b_dtype)],
                  32 * inst.c_registers)
    np.testing.assert_array_equal(unpack(c_atom(inst), out.reshape(32, -1), inst.c_dtype), a @ b)


@pytest.mark.parametrize("name", MOVES)
def test_ldmatrix(library, name):
    inst, which, move = MOVES[name]
    rng = np.random.default_rng(5)
    layout = move_layout(inst, move)
    stored = operand(rng, layout.shape, inst.a_dtype)
    row0, col0 = 8, layout.columns - move.extent[1]
    rows, cols = (np.broadcast_to(v, 32) for v in move.address(np.arange(32)))
    addresses = (layout.offset(row0 + rows, col0 + cols) * layout.dtype_bits // 8).astype(np.uint32)
    out = library(name, [image(layout, stored, inst.a_dtype), addresses], 32 * move.count)
    part = stored[row0:row0 + move.extent[0], col0:col0 + move.extent[1]]
    if which == "a":
        tile, fragment = (part.T if move.trans else part), a_atom(inst)
    else:
        tile = part if move.trans else part.T
        fragment = b_atom(inst).repeat(1, move.count // inst.b_registers)
    np.testing.assert_array_equal(out.reshape(32, -1), pack(fragment, tile, inst.a_dtype))


@pytest.mark.parametrize("name", STORES)
def test_stmatrix(library, name):
    move, rng = STORES[name], np.random.default_rng(6)
    layout = store_layout(move)
    tile = operand(rng, (16, 4 * move.count), "float16")
    row0, col0 = 8, 32
    rows, cols = (np.broadcast_to(v, 32) for v in move.address(np.arange(32)))
    addresses = (layout.offset(row0 + rows, col0 + cols) * 2).astype(np.uint32)
    fragment = c_atom(INSTRUCTIONS[MMA][0]).repeat(1, move.count // 2)
    out = library(name, [addresses, pack(fragment, tile, "float16")], layout.bytes // 4).view(np.float16)
    stored = out[layout.offset(*np.indices(layout.shape))]
    part = stored[row0:row0 + move.extent[0], col0:col0 + move.extent[1]]
    np.testing.assert_array_equal(part.T if move.trans else part, tile)
    assert (stored.view(np.uint16) == 0x7F7F).sum() == stored.size - tile.size, "nothing else is written"


@pytest.mark.parametrize("name", WGMMAS)
def test_wgmma(library, name):
    inst, span, a_form, b_major = WGMMAS[name]
    rng = np.random.default_rng(7)
    tiles = WgmmaTiles(inst, span, a_form, b_major)
    a_all = operand(rng, tiles.a_layout.shape, inst.a_dtype)
    b_all = operand(rng, tiles.b_layout.shape, inst.b_dtype)
    ks = slice(tiles.k0, tiles.k0 + tiles.k)
    a = (a_all if a_form == "K" else a_all.T)[tiles.a_mn0:tiles.a_mn0 + 64, ks]
    b = (b_all.T if b_major else b_all)[ks, tiles.b_mn0:tiles.b_mn0 + inst.n]
    shared = np.full(tiles.b_at + tiles.b_layout.bytes, 0x7F, np.uint8)
    shared[:tiles.a_layout.bytes] = image(tiles.a_layout, a_all, inst.a_dtype)
    shared[tiles.b_at:] = image(tiles.b_layout, b_all, inst.b_dtype)
    registers = [pack(a_atom(inst), a[:, s * inst.k:(s + 1) * inst.k], inst.a_dtype) for s in range(tiles.steps)]
    out = library(name, [shared, *(registers if a_form == "R" else [])], 128 * inst.c_registers)
    np.testing.assert_array_equal(unpack(c_atom(inst), out.reshape(128, -1), inst.c_dtype), a @ b)
