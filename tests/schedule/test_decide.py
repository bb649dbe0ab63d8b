"""Rule sets, presets, the log, resources and explain."""

from __future__ import annotations

import json

import pytest
import tvm
import tvm_ffi
from tvm import s_tir

import tvm_tile.language as T
from tvm_tile import hardware, ir, ops
from tvm_tile.errors import InternalError, TileResourceError, TileShapeError, TileTargetError, TileTypeError
from tvm_tile.layout import default_fragment
from tvm_tile.schedule import Decision, NotApplicable, Rule, TileSchedule, decide, default_rules, explain
from tvm_tile.schedule.analysis import kernel_views
from tvm_tile.schedule.decisions import encode, read_log, read_loop, read_raster
from tvm_tile.schedule.resources import register_estimate, shared_peak, shared_uses

from . import kernels as K

SM_80, SM_90 = hardware.lookup("sm_80"), hardware.lookup("sm_90")

KERNELS = {
    "gemm": lambda: ops.gemm(512, 512, 256, split_k=2),
    "flash": lambda: ops.flash_attention(1, 2, 128, 128, 64, target="sm_80"),
    "mla": lambda: ops.flash_mla(2, 16, 512, target="sm_80"),
    "slices": lambda: K.slices(),
}


@pytest.fixture(params=KERNELS, scope="module")
def pair(request):
    func = KERNELS[request.param]()
    return func, decide(func, SM_80)


def test_deciding_again_changes_nothing(pair):
    _, decided = pair
    tvm.ir.assert_structural_equal(decide(decided, SM_80), decided)


def test_decisions_do_not_depend_on_the_process(pair):
    func, decided = pair
    tvm.ir.assert_structural_equal(decide(func, SM_80), decided)


def test_decisions_survive_json(pair):
    _, decided = pair
    tvm.ir.assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(decided)), decided)


def test_decisions_survive_the_script():
    decided = decide(K.product(), SM_80)
    tvm.ir.assert_structural_equal(tvm.script.from_source(decided.script()), decided)


def test_only_annotations_change(pair):
    func, decided = pair

    def bare(f):
        def strip(block, m):
            block = m.default_mutate(block)
            fields = {n: getattr(block, n) for n in ("iter_vars", "reads", "writes", "name_hint", "body", "init",
                                                     "alloc_buffers", "match_buffers", "span")}  # fmt: skip
            return s_tir.SBlock(**fields, annotations={})

        body = ir.visit.rewrite(f.body, [(s_tir.SBlock, strip), (tvm.tirx.For, lambda n, m: _plain_loop(n, m))])
        return tvm.tirx.PrimFunc(f.params, body, f.ret_type)

    assert tvm_ffi.structural_equal(bare(func), bare(decided))


def _plain_loop(loop, m):
    return tvm.tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, m.mutate(loop.body), loop.thread_binding, {},
                        loop.step, loop.span)  # fmt: skip


def test_decisions_are_in_the_trace():
    sch = TileSchedule(K.pipelined())
    for rule in default_rules(SM_80):
        rule.apply(sch, SM_80)
    text = str(sch.schedule.trace)
    for key in ("instruction", "partition", "fragments", "shared", "copy", "loop", "pipeline"):
        assert f'"tile.{key}"' in text, key
    again = s_tir.Schedule(tvm.IRModule({"main": K.pipelined()}))
    sch.schedule.trace.apply_to_schedule(again, remove_postproc=False)
    tvm.ir.assert_structural_equal(again.mod["main"], sch.function)


def test_rules_are_a_plain_list():
    seen = []

    def count(sch, hw):
        seen.append(hw.name)
        assert "tile.instruction" in next(s for _, s in sch.sites(ir.GemmOp)).op.annotations
        return Decision("kernel", "my subject", "my decision", "my reason")

    rules = default_rules(SM_80)
    rules.insert(1, Rule("my_rule", count))
    func = decide(K.product(), SM_80, rules)
    assert seen == ["sm_80"]
    assert ["kernel", "my subject", "my_rule", "my decision", "my reason"] in read_log(func)
    assert "my subject: my decision\n        because my reason" in explain(func)
    with pytest.raises(InternalError, match="rule bad answered 3"):
        decide(K.product(), SM_80, [Rule("bad", lambda sch, hw: 3)])
    quiet = Rule("quiet", lambda sch, hw: NotApplicable("nothing to do"))
    assert "not applied: nothing to do" in explain(decide(K.product(), SM_80, [quiet]))


def test_decide_takes_tile_functions_only():
    @tvm.script.tirx.prim_func
    def plain(a: tvm.script.tirx.handle):
        A = tvm.script.tirx.match_buffer(a, (4,), "float32")
        A[0] = tvm.script.tirx.float32(0)

    with pytest.raises(TileTypeError, match="decide takes a tile function"):
        decide(plain, SM_80)


def test_given_loop_is_kept_and_checked():
    from .test_gemm import preset

    func = K.elementwise(32, 64, 128)
    mine = default_fragment((32, 64), 128, 16, 16)
    given = preset(preset(func, "parallel", "tile.loop", encode(mine)), "parallel", "tile.convert", '["scale"]')
    decided = decide(given, SM_80)
    parallel = next(op for op in ir.tile_ops(decided.body) if isinstance(op, ir.ParallelOp))
    assert read_loop(parallel.annotations) == mine
    with pytest.raises(TileShapeError, match="does not cover its 2 axes of extents \\[32, 64\\] on 128 threads"):
        decide(preset(func, "parallel", "tile.loop", encode(default_fragment((32, 32), 128, 16))), SM_80)
    rows = default_fragment((64, 32), 128, 16).transpose()
    with pytest.raises(TileShapeError, match="the fragments scale are not at hand"):
        decide(preset(func, "parallel", "tile.loop", encode(rows)), SM_80)


# ---- rasterisation


def raster(grid, **options):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(*grid, threads=32) as (bx, by):
            T.use_swizzle(**options)
            A[0] = 1.0

    return kernel


def test_rasterisation():
    def found(func):
        return read_raster(ir.kernels_of(decide(func, SM_80))[0].block)

    assert found(raster((8, 8), panel_size=4)) == (4, "row")
    assert found(raster((8, 8), panel_size=4, order="column")) == (4, "column")
    assert found(raster((8, 8), panel_size=1)) is None
    assert found(raster((8, 1), panel_size=4)) is None


# ---- resources


def tall(stages: int, block_k: int = 128):
    func = K.pipelined(tiles=4, num_stages=stages, m=128, n=128, k=block_k)
    return func.with_attr("tile.config", {"block_M": 128, "block_N": 128, "block_K": block_k, "num_stages": stages})


def test_shared_memory_over_the_limit():
    with pytest.raises(TileResourceError) as caught:
        decide(tall(4, 64), hardware.lookup("sm_80").__class__(**{**SM_80.__dict__, "shared_per_block": 101376}))
    assert caught.value.message == (
        "shared memory: 131072 bytes are live together, but a CTA on sm_80 has 101376\n"
        "  A_shared: 65536 bytes (4 copies of 16384)\n"
        "  B_shared: 65536 bytes (4 copies of 16384)"
    )
    assert caught.value.advice == (
        "num_stages=3 fits (98304 bytes); block_M=64, block_N=64 fits (65536 bytes); block_K=32 fits (65536 bytes)"
    )


def test_advice_really_fits():
    with pytest.raises(TileResourceError, match="262144 bytes are live together"):
        decide(tall(4), SM_80)
    decide(tall(2), SM_80)
    with pytest.raises(TileResourceError) as caught:
        decide(tall(3), SM_80)
    assert "num_stages=2 fits (131072 bytes)" in caught.value.advice


def test_epilogue_tiles_reuse_the_main_loops():
    @T.prim_func
    def kernel(A: T.Tensor((2, 256, 128), "float16"), C: T.Tensor((2, 256, 128), "float16")):
        with T.Kernel(1, threads=128) as bx:
            first = T.alloc_shared((256, 128), "float16")
            second = T.alloc_shared((256, 128), "float16")
            third = T.alloc_shared((256, 128), "float16")
            T.copy(A[0, 0, 0], first)
            T.copy(first, C[0, 0, 0])
            T.copy(A[1, 0, 0], second)
            T.copy(second, C[1, 0, 0])
            T.copy(A[1, 0, 0], third)
            T.copy(third, C[1, 0, 0])

    uses = shared_uses(kernel_views(decide(kernel, SM_80))[0])
    assert shared_peak(uses) == 65536 and sum(u.total for u in uses) == 3 * 65536


def test_registers_of_live_fragments():
    kernel = kernel_views(decide(K.attention_step(), SM_80))[0]
    peak, each = register_estimate(kernel)
    assert each == {"acc_s": 32, "acc_p": 16, "acc_o": 32, "top": 2, "total": 2}
    assert peak == 32 + 16 + 2  # the second product: its operand, its result, the row sums


# ---- explain


def test_explain_names_every_decision_with_its_reason():
    text = explain(K.pipelined(), "sm_80")
    for line in (
        "decisions for sm_80",
        "gemm: mma m16n8k16, float16 x float16 -> float32",
        "because policy Square for 64 x 64",
        "A_shared: 64x32 of 16 bits: 64-byte swizzle, 1 column block, 4096 bytes",
        "copy: A -> A_shared by cp.async, 16 bytes an access",
        "loop ko: 2 stages; issued ahead: copy, copy_1; copies of tiles: A_shared x 2, B_shared x 2",
        "shared memory: 16384 of 166912 bytes live together",
        "grid: not applied: no T.use_swizzle: launch order",
    ):
        assert line in text, line
    assert all(
        not line.strip().startswith("because") or len(line.split("because ")[1]) > 3 for line in text.splitlines()
    )


def test_explain_names_the_loads_of_the_producer():
    """Not the copies that threads would make without it: those are told on a machine without TMA."""
    tiles = {"block_M": 128, "block_N": 128, "block_K": 64, "num_stages": 3, "threads": 256}
    func = ops.gemm(256, 512, 256, dtype="bfloat16", target="sm_90", **tiles)
    here, there = explain(func, "sm_90"), explain(func, "sm_80")
    assert "A -> A_shared by TMA, " in here and " slots" in here and "cp.async" not in here
    assert "A -> A_shared by cp.async, 16 bytes an access" in there and "by TMA" not in there


def test_explain_of_a_decided_function_reads_the_log():
    decided = decide(K.product(), SM_90)
    assert explain(decided) == explain(K.product(), "sm_90")
    with pytest.raises(TileTargetError, match="decided for sm_90 and cannot be decided again for sm_80"):
        explain(decided, "sm_80")


def test_explain_marks_warnings():
    assert "   !gemm: 4 x 1 warps" in explain(K.product(m=8, policy="FullRow"), "sm_80")


@pytest.mark.parametrize("target, message", [("llvm", "decide for CUDA targets"), ("sm_09", "did you mean 'sm_90'")])
def test_explain_of_unknown_targets(target, message):
    with pytest.raises(TileTargetError) as caught:
        explain(K.product(), target)
    assert message in str(caught.value)


def test_explain_takes_functions_and_kernels():
    class Compiled:
        def script(self):
            return K.product().script()

    assert "mma m16n8k16" in explain(Compiled(), "sm_80")
    assert "mma m16n8k16" in explain(tvm.IRModule({"main": K.product()}), "sm_80")
    with pytest.raises(TileTypeError, match="explain takes a tile function or a compiled kernel, not int"):
        explain(3)


def test_log_is_json(pair):
    _, decided = pair
    entries = json.loads(str(decided.attrs["tile.decisions"]))
    assert entries == read_log(decided) and all(len(e) in (5, 6) and e[4] for e in entries)
