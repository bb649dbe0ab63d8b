"""Names of targets, and what compile takes."""

import pytest
import tvm

import tvm_tile
from tvm_tile import T
from tvm_tile.layout import SharedLayout
from tvm_tile.lower import lower
from tvm_tile.runtime import targets

from . import kernels


def test_limits_of_gpus():
    sm_90, sm_80 = tvm_tile.target("sm_90"), tvm_tile.target("sm_80")
    assert (str(sm_90.attrs["arch"]), int(sm_90.attrs["max_shared_memory_per_block"])) == ("sm_90a", 232448)
    assert (str(sm_80.attrs["arch"]), int(sm_80.attrs["max_shared_memory_per_block"])) == ("sm_80", 166912)
    assert sm_90.host.kind.name == "llvm" and str(tvm_tile.target("sm_90a")) == str(sm_90)


def test_a_tvm_target_gets_the_real_limit():
    given = tvm.target.Target({"kind": "cuda", "arch": "sm_90", "max_shared_memory_per_block": 49152}, host="llvm")
    made = tvm_tile.target(given)
    assert int(made.attrs["max_shared_memory_per_block"]) == 232448 and str(made.attrs["arch"]) == "sm_90a"
    llvm = tvm.target.Target({"kind": "llvm", "mcpu": "skylake"})
    assert tvm_tile.target(llvm).same_as(llvm)


def test_a_declared_limit_below_the_architectures_is_kept():
    """A kernel of 144 KB was compiled for a GPU of 99 KB and failed at its launch."""

    @T.prim_func
    def copy(A: T.Tensor((9, 128, 128), "float32"), B: T.Tensor((9, 128, 128), "float32")):
        with T.Kernel(3, threads=128) as bx:
            tiles = T.alloc_shared((3, 96, 128), "float32")
            T.copy(A[bx * 3 : bx * 3 + 3, 0:96, :], tiles)
            T.copy(tiles, B[bx * 3 : bx * 3 + 3, 0:96, :])

    given = {"kind": "cuda", "arch": "sm_80", "max_shared_memory_per_block": 101376}
    where = tvm_tile.target(tvm.target.Target(given, host="llvm"))
    assert int(where.attrs["max_shared_memory_per_block"]) == 101376
    with pytest.raises(tvm_tile.TileResourceError, match="has 101376"):
        lower(copy, where)
    lower(copy, tvm_tile.target("sm_80"))


def test_cpus_behind_a_hypervisor_are_named_by_their_features():
    amx = {"amx-bf16", "amx-int8", "amx-tile", "avx512fp16", "avx512f"}
    assert targets.cpu_name("rocketlake", amx) == "sapphirerapids"
    assert targets.cpu_name("rocketlake", amx | {"amx-fp16"}) == "graniterapids"
    assert targets.cpu_name("rocketlake", {"avx512f"}) == "rocketlake"
    assert targets.cpu_name("sapphirerapids", amx) == "sapphirerapids"
    assert targets.cpu_name("znver5", {"avx512f"}) == "znver5"


@pytest.mark.parametrize("lowering", ["optimised", "reference"])
def test_layouts_that_no_instruction_reads_are_refused_on_cpus_too(lowering):
    @T.prim_func
    def product(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), "float16")
            b = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.annotate_layout({a: SharedLayout.padded((64, 64), 16, 1)})
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, C)

    for where in ("llvm", "sm_80") if lowering == "optimised" else ("llvm",):
        with pytest.raises(tvm_tile.TileShapeError, match="layout"):
            lower(product, tvm_tile.target(where), lowering)


def on_gpu(monkeypatch, facts):
    monkeypatch.setattr(targets, "_device_facts", lambda: facts)


def test_auto_is_the_cpu_without_a_gpu(monkeypatch):
    on_gpu(monkeypatch, None)
    target = tvm_tile.target("auto")
    assert target.kind.name == "llvm" and int(target.attrs["num-cores"]) >= 1
    with pytest.raises(tvm_tile.TileTargetError, match="there is no CUDA GPU here"):
        tvm_tile.target("cuda")


@pytest.mark.parametrize(
    "facts, expected",
    [
        (("sm_90", 232448), ("sm_90a", 232448)),
        (("sm_80", 166912), ("sm_80", 166912)),
        (("sm_89", 101376), ("sm_80", 101376)),
        (("sm_100", 232448), ("sm_80", 166912)),
    ],
)
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_targets_of_gpus(monkeypatch, facts, expected, name):
    # sm_90a code runs on sm_90 only; other GPUs run sm_80's PTX within their own shared memory.
    on_gpu(monkeypatch, facts)
    attrs = tvm_tile.target(name).attrs
    assert (str(attrs["arch"]), int(attrs["max_shared_memory_per_block"])) == expected


def test_a_gpu_that_is_too_old(monkeypatch):
    on_gpu(monkeypatch, ("sm_75", 65536))
    with pytest.raises(tvm_tile.TileTargetError, match="older than sm_80"):
        tvm_tile.target("auto")


def test_unknown_names():
    with pytest.raises(tvm_tile.TileTargetError) as caught:
        tvm_tile.target("sm_9")
    assert "did you mean 'sm_90'?" in str(caught.value) and "auto, cuda, llvm" in str(caught.value)
    with pytest.raises(tvm_tile.TileTargetError, match="not for 'opencl'"):
        tvm_tile.target(tvm.target.Target("opencl"))
    with pytest.raises(tvm_tile.TileTargetError, match="a name or a TVM Target"):
        tvm_tile.target(90)


def test_an_architecture_without_a_description():
    given = tvm.target.Target({"kind": "cuda", "arch": "sm_86"}, host="llvm")
    with pytest.raises(tvm_tile.TileTargetError, match="sm_86 is not one of sm_80, sm_90"):
        tvm_tile.target(given)


@pytest.mark.parametrize("name", ["my kernel", "1st", "a-b", ""])
def test_names_that_are_no_identifier(name):
    with pytest.raises(tvm_tile.TileError, match="is no C identifier"):
        tvm_tile.compile(kernels.constant(1.0).with_attr("global_symbol", name), "llvm")


def test_things_that_are_no_kernel():
    with pytest.raises(tvm_tile.TileTypeError, match="not function") as caught:
        tvm_tile.compile(kernels.scaled_add, "llvm")
    assert "call the factory first" in str(caught.value)
    two = tvm.IRModule({"f": kernels.constant(1.0), "g": kernels.constant(2.0)})
    with pytest.raises(tvm_tile.TileTypeError, match=r"the module has 2 functions \(f, g\)"):
        tvm_tile.compile(two, "llvm")
    with pytest.raises(tvm_tile.TileError, match="unknown lowering 'fast'"):
        tvm_tile.compile(kernels.constant(1.0), "llvm", lowering="fast")


def test_a_module_with_one_function():
    assert tvm_tile.compile(tvm.IRModule({"only": kernels.constant(1.0)}), "llvm").name == "only"
