"""Exported libraries: load with the runtime alone, and check their arguments as the compiled kernel does."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tvm

import tvm_tile

from . import kernels

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    kernel = tvm_tile.compile(kernels.scaled_add().with_attr("tile.config", {"block_M": 64}), "llvm")
    return kernel.export(tmp_path_factory.mktemp("export") / "add.so")


def test_export_and_load_in_this_process(library):
    kernel = tvm_tile.load(library)
    a = np.random.default_rng(0).standard_normal((5, 128), dtype="float32")
    c = np.full_like(a, np.nan)
    kernel(a, a[0], 2, c)
    np.testing.assert_allclose(c, a + a[0] * 2, rtol=1e-5, atol=1e-6)
    assert kernel.config == {"block_M": 64} and kernel.name == "scaled_add" and kernel.resources.threads > 0
    with pytest.raises(tvm_tile.TileError, match="holds no source"):
        _ = kernel.source
    with pytest.raises(tvm_tile.TileError, match="PTX is a GPU's"):
        _ = kernel.ptx


LOAD = """
    import sys; sys.path.insert(0, {root!r})
    import numpy as np
    {before}
    import tvm_tile
    kernel = tvm_tile.load({path!r})
    a = np.random.default_rng(1).standard_normal((5, 128), dtype="float32")
    c = np.full_like(a, np.nan)
    kernel(a, a[0], 2, c)
    np.testing.assert_allclose(c, a + a[0] * 2, rtol=1e-5, atol=1e-6)
    try:
        kernel(a, a[0], 2, c[:3])
    except tvm_tile.CallError as error:
        print(error.message)
    libraries = open("/proc/self/maps").read()
    print("compiler" if "libtvm_compiler" in libraries else "runtime only")
"""


@pytest.mark.parametrize(
    "before, runtime_only",
    [("", False), ("", True), ("import tvm; assert tvm.base._RUNTIME_ONLY", True)],
    ids=["plain", "runtime only", "runtime only beside tvm"],
)
def test_load_in_a_process_without_the_compiler(library, before, runtime_only):
    code = textwrap.dedent(LOAD).format(root=ROOT, path=str(library), before=before)
    environment = {k: v for k, v in os.environ.items() if k != "TVM_USE_RUNTIME_LIB"}
    if runtime_only:
        environment["TVM_USE_RUNTIME_LIB"] = "1"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    message, libraries = result.stdout.strip().splitlines()
    assert "argument 4 must be C: float32[m, 128], but dimension 0 is 3" in message
    assert libraries == "runtime only"


def test_plain_tvm_loads_it_too(library):
    function = tvm.runtime.load_module(str(library))["scaled_add"]
    a = tvm.runtime.tensor(np.ones((2, 128), "float32"))
    c = tvm.runtime.tensor(np.zeros((2, 128), "float32"))
    function(a, tvm.runtime.tensor(np.ones(128, "float32")), 3, c)
    assert (c.numpy() == 4).all()


def test_export_replaces_a_file_at_once(library, tmp_path):
    path = tmp_path / "k.so"
    path.write_text("old")
    tvm_tile.load(library).export(path)
    assert path.read_bytes() == library.read_bytes() and list(tmp_path.iterdir()) == [path]


def test_files_that_are_no_kernels(tmp_path, library):
    with pytest.raises(tvm_tile.TileError, match="there is no such file"):
        tvm_tile.load(tmp_path / "missing.so")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    with pytest.raises(tvm_tile.TileError, match="no shared library for this machine"):
        tvm_tile.load(broken)
    other = tmp_path / "other.so"
    tvm.compile(kernels.constant(1.0), "llvm").export_library(str(other))
    with pytest.raises(tvm_tile.TileError, match="was not exported by tvm_tile"):
        tvm_tile.load(other)
    with pytest.raises(tvm_tile.TileError, match="the folder .* does not exist"):
        tvm_tile.load(library).export(tmp_path / "none" / "k.so")


def test_without_a_c_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    kernel = tvm_tile.compile(kernels.constant(8.0), "llvm")
    a, b = np.ones(16, "float32"), np.zeros(16, "float32")
    kernel(a, b)
    assert (b == 9).all() and not kernel.from_cache
    with pytest.raises(tvm_tile.ToolchainError, match="needs a C compiler"):
        kernel.export(tmp_path / "k.so")
