"""Inference of fragment layouts: what follows from products and uses, and what the decisions promise to lowering."""

from __future__ import annotations

import pytest

import tvm_tile.language as T
from tvm_tile import hardware, ir, ops
from tvm_tile.errors import TileShapeError
from tvm_tile.layout import Fragment, SharedLayout, a_fragment, accumulator_fragment, contains, partition
from tvm_tile.schedule import check_layouts, decide
from tvm_tile.schedule.analysis import FRAGMENT, kernel_views, static_shape
from tvm_tile.schedule.decisions import (
    read_chunks,
    read_convert,
    read_copy,
    read_fragments,
    read_instruction,
    read_loop,
    read_partition,
    read_shared,
    read_vector,
    read_window,
)
from tvm_tile.schedule.loops import plain_dims, project, windowed

from . import kernels as K

SM_80, SM_90 = hardware.lookup("sm_80"), hardware.lookup("sm_90")

CASES = {
    "product": lambda: K.product(),
    "product of 8 rows": lambda: K.product(m=8),
    "product int8": lambda: K.product(dtype="int8", accum="int32"),
    "product float32": lambda: K.product(dtype="float32"),
    "product transposed": lambda: K.product(m=32, n=96, trans_a=True, trans_b=True),
    "attention": lambda: K.attention_step(),
    "attention, columns": lambda: K.attention_step("FullCol", "FullCol"),
    "attention, mixed": lambda: K.attention_step("FullRow", "Square"),
    "sums": lambda: K.row_sums(),
    "sums of columns": lambda: K.row_sums(dim=0, m=50, n=37),
    "sums of a shared tile": lambda: K.row_sums(source="shared", dim=0),
    "element-wise": lambda: K.elementwise(),
    "slices": lambda: K.slices(),
    "symbolic": lambda: K.symbolic(),
    "gemm": lambda: ops.gemm(100, 101, 137, dtype="bfloat16", bias=True, split_k=2),
    "flash": lambda: ops.flash_attention(1, 4, 100, 200, 64, kv_heads=2, causal=True, target="sm_80"),
    "flash, bias and mask": lambda: ops.flash_attention(1, 2, 128, 128, 96, bias=True, window=50, target="sm_80"),
    "mla": lambda: ops.flash_mla(2, 16, 500, target="sm_80", num_splits=2),
    "mla paged": lambda: ops.flash_mla(2, 8, 512, target="sm_80", page_size=64, packed=True),
    "softmax": lambda: ops.softmax(100, 1000),
}


@pytest.fixture(params=CASES, scope="module")
def decided(request):
    return decide(CASES[request.param](), SM_80)


def visits(site, loop: Fragment, window) -> set[tuple[int, tuple[int, ...]]]:
    """(thread, axis values) pairs of a loop."""
    found = set()
    for thread in range(loop.used_threads):
        for reg in range(loop.registers):
            coords = loop.coords(thread, reg)
            if all(c < n for c, n in zip(coords, loop.shape, strict=True)):
                found.add((thread, tuple(coords)))
    return found


def test_every_operation_is_decided(decided):
    for kernel in kernel_views(decided):
        fragments, shared = read_fragments(kernel.info.block), read_shared(kernel.info.block)
        for buffer in kernel.info.buffers:
            used = any(True for _ in kernel.uses(buffer))
            scope = str(buffer.ty.storage_scope)
            if scope == FRAGMENT and used:
                assert fragments[buffer.name].shape == static_shape(buffer)
                assert fragments[buffer.name].threads == kernel.threads
            if scope == "shared" and used:
                assert shared[buffer.name].shape == static_shape(buffer)
        for site in kernel.sites:
            notes = site.op.annotations
            if isinstance(site.op, ir.GemmOp):
                assert "tile.instruction" in notes
            elif not isinstance(site.op, ir.CumsumOp | ir.SyncOp):
                assert read_loop(notes) is not None, site.name
            if isinstance(site.op, ir.CopyOp):
                assert "tile.copy" in notes


def test_fragments_are_at_hand_or_converted(decided):
    """Each fragment that a loop touches is at hand in its thread, and written ones are updated in every replica."""
    for kernel in kernel_views(decided):
        fragments = read_fragments(kernel.info.block)
        for site in kernel.sites:
            notes = site.op.annotations
            staged = isinstance(site.op, ir.CopyOp) and read_copy(notes).kind == "staged"
            if isinstance(site.op, ir.GemmOp | ir.CumsumOp) or staged:
                continue
            loop, away, window = read_loop(notes), read_convert(notes), read_window(notes)
            for access in site.of(FRAGMENT):
                held = fragments[access.buffer.name]
                if access.buffer.name in away:
                    continue
                if window is not None:
                    assert windowed(site, access) and held.digits == loop.digits
                    continue
                dims = plain_dims(site, access)
                assert dims is not None and contains(held, loop, dims), (site.name, access.buffer.name)
                if access.write:
                    assert contains(project(loop, dims), held), (site.name, access.buffer.name)


def test_loops_visit_every_point(decided):
    for kernel in kernel_views(decided):
        for site in kernel.sites:
            loop = read_loop(site.op.annotations)
            if loop is None or read_window(site.op.annotations) or loop.ndim == 0:
                continue
            chunked = read_chunks(site.op.annotations)
            for n, extent in enumerate(site.extents):
                assert (n in chunked) == (extent is None)
                assert extent is None or loop.shape[n] == extent
            assert len(visits(site, loop, None)) == loop.replication * _volume(loop.shape)


def _volume(shape):
    out = 1
    for extent in shape:
        out *= extent
    return out


def test_vectors_divide_the_last_axis(decided):
    for kernel in kernel_views(decided):
        for site in kernel.sites:
            vector = read_vector(site.op.annotations)
            if vector > 1:
                loop = read_loop(site.op.annotations)
                assert loop.vector_width(loop.ndim - 1, 1, vector) == vector
                assert site.extents[-1] % vector == 0


def operands(func):
    for kernel in kernel_views(func):
        for site in kernel.sites:
            if isinstance(site.op, ir.GemmOp):
                yield site, read_fragments(kernel.info.block)


@pytest.mark.parametrize("policies", [("FullRow", "FullRow"), ("FullCol", "FullCol"), ("Square", "FullRow")])
def test_products_find_their_operands(policies):
    for site, fragments in operands(decide(K.attention_step(*policies), SM_80)):
        instruction, part = read_instruction(site.op.annotations), read_partition(site.op.annotations)
        assert fragments[site.op.c.buffer.name] == accumulator_fragment(instruction, part, 128)
        if site.op.a.scope == FRAGMENT:
            assert fragments[site.op.a.buffer.name] == a_fragment(instruction, part, site.op.k, 128)


def copy_kinds(func) -> dict:
    return {
        f"{op.src.buffer.name}->{op.dst.buffer.name}": read_copy(op.annotations).kind
        for op in ir.tile_ops(func.body)
        if isinstance(op, ir.CopyOp)
    }


def test_accumulator_feeds_the_next_product_in_registers():
    assert copy_kinds(decide(K.attention_step("FullRow", "FullRow"), SM_80))["acc_s->acc_p"] == "registers"
    assert copy_kinds(decide(K.attention_step("FullCol", "FullCol"), SM_80))["acc_s->acc_p"] == "staged"


def test_row_vectors_are_replicated_over_their_row():
    func = decide(K.attention_step(), SM_80)
    fragments = read_fragments(kernel_views(func)[0].info.block)
    assert fragments["top"] == fragments["acc_s"].reduce(1) == fragments["total"]
    assert fragments["top"].replication == 4


def test_row_vector_of_another_split_is_converted():
    """FullRow scores and Square output: the row sums of one are not at hand in the other's loop."""
    func = decide(K.attention_step("FullRow", "Square"), SM_80)
    away = [read_convert(op.annotations) for op in ir.tile_ops(func.body) if isinstance(op, ir.ParallelOp)]
    assert away == [[], ["total"]]


def test_products_that_disagree_on_an_accumulator():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.gemm(a, a, c, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
            T.gemm(a, a, c, policy=T.GemmWarpPolicy.FullCol)
            T.copy(c, C)

    with pytest.raises(TileShapeError) as caught:
        decide(kernel, SM_80)
    message = caught.value.message
    assert message.startswith("T.gemm: the accumulator c cannot be laid out for this product:")
    assert message.count("<Fragment 64x64") == 2 and "(accumulator of mma in gemm)" in message
    assert "use the same warp policy" in caught.value.advice
    assert caught.value.location.source_line().strip() == "T.gemm(a, a, c, policy=T.GemmWarpPolicy.FullCol)"


def test_slices_of_an_accumulator():
    func = decide(K.slices(), SM_80)
    kernel = kernel_views(func)[0]
    acc = read_fragments(kernel.info.block)["acc"]
    half = next(s for s in kernel.sites if isinstance(s.op, ir.GemmOp))
    tile = accumulator_fragment(read_instruction(half.op.annotations), read_partition(half.op.annotations), 128)
    assert acc == tile.repeat(1, 2)
    windows = [read_window(s.op.annotations) for s in kernel.sites if isinstance(s.op, ir.ParallelOp)]
    assert windows == ["acc"]


def test_slice_that_cuts_an_accumulator_unevenly():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 96), "float32")):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 96), "float32")
            T.copy(A, a)
            T.clear(c)
            T.gemm(a, a, c[:, 32:96])
            T.copy(c, C)

    with pytest.raises(TileShapeError, match="starts at 32 in dimension 1; slices of an accumulator divide it evenly"):
        decide(kernel, SM_80)


def test_reshaped_fragment_has_its_base_layout():
    @T.prim_func
    def kernel(A: T.Tensor((32, 64), "float32"), B: T.Tensor((32, 4, 16), "float32")):
        with T.Kernel(1, threads=64) as bx:
            a = T.alloc_fragment((32, 64), "float32")
            T.copy(A, a)
            v = T.reshape(a, (32, 4, 16))
            for i, j, k in T.Parallel(32, 4, 16):
                v[i, j, k] = v[i, j, k] + 1.0
            T.copy(v, B)

    fragments = read_fragments(kernel_views(decide(kernel, SM_80))[0].info.block)
    assert fragments["v"] == fragments["a"].reshape((32, 4, 16))


def annotated(layout_c=None, layout_a=None, policy="Square", dtype="float16"):
    layouts = (layout_c, layout_a)

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), dtype), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), dtype)
            c = T.alloc_fragment((64, 64), "float32")
            if layouts[0] is not None:
                T.annotate_layout({c: layouts[0]})
            if layouts[1] is not None:
                T.annotate_layout({a: layouts[1]})
            T.copy(A, a)
            T.gemm(a, a, c, clear_accum=True, policy=policy)
            T.copy(c, C)

    return kernel


def test_annotated_accumulator_decides_the_split():
    from tvm_tile.layout import find_instruction

    instruction = find_instruction("mma", "float16", "float16", "float32", 80, 64)
    wanted = accumulator_fragment(instruction, partition("FullCol", 64, 64, 4, instruction), 128)
    func = decide(annotated(wanted, policy="FullRow"), SM_80)
    assert read_fragments(kernel_views(func)[0].info.block)["c"] == wanted
    assert read_partition(next(operands(func))[0].op.annotations).n_warps == 4


def test_annotated_layout_that_the_instruction_cannot_read():
    from tvm_tile.layout import default_fragment

    with pytest.raises(
        TileShapeError, match="no tensor-core instruction accumulates in the layout given for c"
    ) as caught:
        check_layouts(annotated(default_fragment((64, 64), 128, 32)))
    assert caught.value.location.source_line().strip().startswith("T.gemm(a, a, c")
    with pytest.raises(TileShapeError, match=r"cannot read A \(a\).*132 bytes apart, no multiple of 16"):
        check_layouts(annotated(layout_a=SharedLayout.padded((64, 64), 16, 2)))
    # IEEE float32 runs on scalar units, which read anything
    check_layouts(annotated(default_fragment((64, 64), 128, 32), dtype="float32"))
    check_layouts(annotated(layout_a=SharedLayout.padded((64, 64), 16, 8)))


def test_annotated_shared_layout_is_honoured():
    for layout in (SharedLayout.padded((64, 64), 16, 8), SharedLayout.swizzled((64, 64), 16, 64)):
        func = decide(annotated(layout_a=layout), SM_80)
        assert read_shared(kernel_views(func)[0].info.block)["a"] == layout


def test_vector_of_a_shared_reduction_follows_the_loop():
    func = decide(K.row_sums(source="shared", dim=0), SM_80)
    kernel = kernel_views(func)[0]
    site = next(s for s in kernel.sites if isinstance(s.op, ir.ReduceOp))
    assert read_convert(site.op.annotations) == []
    assert read_fragments(kernel.info.block)["total"] == read_loop(site.op.annotations).reduce(1)


def test_column_vector_of_a_loop_over_memory_lies_as_the_loop_visits_it():
    for case in (K.elementwise(), K.elementwise(32, 64, 128), K.elementwise(64, 64, 128, "float32")):
        parallel = next(op for op in ir.tile_ops(decide(case, SM_80).body) if isinstance(op, ir.ParallelOp))
        assert read_convert(parallel.annotations) == []
    assert read_vector(parallel.annotations) == 4


def test_scalar_work_is_done_by_every_thread():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32) as bx:
            one = T.alloc_fragment((1,), "float32")
            T.fill(one, 3.0)
            A[0] = 1.0
            T.copy(one, A[1:2])

    func = decide(kernel, SM_80)
    assert read_fragments(kernel_views(func)[0].info.block)["one"].replication == 32
