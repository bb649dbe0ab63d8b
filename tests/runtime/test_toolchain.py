"""nvcc: found, run, its report read; kernels for a GPU are compiled and exported without one."""

import numpy as np
import pytest

import tvm_tile
from tvm_tile.runtime import toolchain, tvm_setup

from . import kernels

needs_nvcc = pytest.mark.skipif(toolchain.find_nvcc() is None, reason="needs nvcc")

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first_kernel' for 'sm_90a'
ptxas info    : Function properties for first_kernel
    48 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 48 bytes cumulative stack size, 1024 bytes smem
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirement.
ptxas info    : Compiling entry function 'second_kernel' for 'sm_90a'
ptxas info    : Function properties for second_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""


def test_ptxas_report():
    kernels_, warnings = toolchain.parse_ptxas(PTXAS)
    assert kernels_ == [
        toolchain.PtxasKernel("first_kernel", 168, 40, 44, 48, 1024),
        toolchain.PtxasKernel("second_kernel", 40, 0, 0, 0, 0),
    ]
    assert len(warnings) == 1 and "C7508" in warnings[0]


def test_missing_nvcc(monkeypatch):
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    with pytest.raises(tvm_tile.ToolchainError) as caught:
        tvm_tile.compile(kernels.gpu_add(), "sm_90")
    assert "needs nvcc" in str(caught.value) and "pip install nvidia-cuda-nvcc" in str(caught.value)


def test_nvcc_is_found_in_order(monkeypatch, tmp_path):
    def fake(folder, version):
        path = tmp_path / folder / "bin" / "nvcc"
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release 1.0, V{version}'\n")
        path.chmod(0o755)
        return path

    on_path, home = fake("path", "1.0.1"), fake("home", "1.0.2")
    monkeypatch.delenv("TVM_TILE_NVCC", raising=False)
    monkeypatch.setenv("PATH", f"{on_path.parent}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert toolchain.find_nvcc().version == "1.0.1"
    on_path.write_text("#!/bin/sh\nexit 1\n")  # broken: the next one is taken
    toolchain._probe_nvcc.cache_clear()
    assert toolchain.find_nvcc().path == str(home)
    monkeypatch.setenv("TVM_TILE_NVCC", str(fake("named", "1.0.3")))
    assert toolchain.find_nvcc().version == "1.0.3"
    toolchain._probe_nvcc.cache_clear()


@needs_nvcc
@pytest.mark.parametrize("target, arch", [("sm_90", "sm_90a"), ("sm_80", "sm_80")])
def test_resources_and_export_without_a_gpu(target, arch, tmp_path):
    kernel = tvm_tile.compile(kernels.gpu_add(), target)
    resources = kernel.resources
    assert (resources.target, resources.threads, resources.spill_bytes, resources.shared_bytes) == (arch, 256, 0, 0)
    assert 0 < resources.registers <= 255 and resources.occupancy == 1.0
    assert "no spills" in str(resources) and f"on {arch}" in str(resources)
    assert "__global__" in kernel.source and f".target {arch}" in kernel.ptx
    loaded = tvm_tile.load(kernel.export(tmp_path / "k.so"))
    assert loaded.resources == resources
    # The library holds machine code, not source.
    data = (tmp_path / "k.so").read_bytes()
    assert b"__launch_bounds__" not in data and b"\x50\xed\x55\xba" in data
    with pytest.raises(tvm_tile.CallError, match="is on cpu, but the kernel is for cuda"):
        loaded(np.zeros(1024, "float32"), np.zeros(1024, "float32"))


@needs_nvcc
def test_sm_80_code_holds_ptx_for_newer_gpus():
    compiled = toolchain.compile_cuda('extern "C" __global__ void f(float* x) { x[threadIdx.x] = 1; }', "sm_80")
    assert [k.name for k in compiled.kernels] == ["f"]
    source = compiled.binary
    only_native = toolchain._run_nvcc(
        compiled.source, "k.fatbin", ["-fatbin", "-gencode", "arch=compute_80,code=sm_80"]
    )[0]
    assert len(source) > len(only_native)


def test_without_driver_and_c_compiler(monkeypatch, tmp_path):
    # Without the stand-in TVM would silently export CUDA source.
    monkeypatch.setenv("TVM_TILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(toolchain, "find_cc", lambda: None)
    with pytest.raises(tvm_tile.ToolchainError, match="without NVIDIA's driver needs a C compiler"):
        tvm_setup._build_stub()


@needs_nvcc
def test_source_that_does_not_compile_is_our_fault():
    with pytest.raises(tvm_tile.InternalError, match="refused generated code"):
        toolchain.compile_cuda("this is no CUDA", "sm_90a")


@needs_nvcc
def test_the_compilers_error_keeps_its_type(monkeypatch):
    def fails(*_args, **_kw):
        raise tvm_tile.InternalError("refused")

    monkeypatch.setattr(toolchain, "compile_cuda", fails)
    with pytest.raises(tvm_tile.InternalError, match="refused"):
        tvm_tile.compile(kernels.gpu_add(3), "sm_90", cache=False)


def test_versions(monkeypatch):
    assert tvm_setup.version_problems() == []
    versions = {"apache-tvm": "0.26.0", "apache-tvm-ffi": "0.1.15.post2"}
    monkeypatch.setattr(tvm_setup, "package_version", versions.get)
    problems = "; ".join(tvm_setup.version_problems())
    assert "apache-tvm is 0.26.0" in problems and "apache-tvm-ffi is 0.1.15.post2" in problems
    tvm_setup.check_versions.cache_clear()
    with pytest.raises(tvm_tile.ToolchainError, match="pip install"):
        tvm_setup.check_versions()
    tvm_setup.check_versions.cache_clear()
