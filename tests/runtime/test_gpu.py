"""Calls on a real GPU: torch's stream, CUDA graphs, alignment, devices, load in a runtime-only process."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import tvm_tile
from tvm_tile.runtime import targets

from . import kernels

pytestmark = pytest.mark.gpu
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture(scope="module")
def third():
    return tvm_tile.compile(kernels.gpu_add(1024), "auto")


def data(n=1024 * 256):
    return torch.randn(n, device="cuda"), torch.full((n,), float("nan"), device="cuda")


def test_result_and_target(third):
    a, b = data()
    third(a, b)
    torch.testing.assert_close(b, a / 3)
    assert third.target == ("sm_90a" if targets.gpu_arch() == "sm_90" else "sm_80")


def test_sm_80_code_runs_on_newer_gpus():
    kernel = tvm_tile.compile(kernels.gpu_add(64), "sm_80")
    a, b = data(64 * 256)
    kernel(a, b)
    torch.testing.assert_close(b, a / 3)


def test_runs_on_torchs_current_stream(third):
    # The side stream is busy when the kernel is launched; on any other stream the kernel would read old data.
    a, b = data()
    fresh = torch.randn_like(a)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        a.copy_(fresh)
        third(a, b)
    stream.synchronize()
    torch.testing.assert_close(b, fresh / 3)


def test_cuda_graph_capture(third):
    a, b = data()
    third(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        third(a, b)
    a.copy_(torch.randn_like(a))
    b.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(b, a / 3)


def test_misaligned_tensors_are_refused(third):
    n = 1024 * 256
    a, b = torch.randn(n + 1, device="cuda")[1:], torch.full((n,), float("nan"), device="cuda")
    with pytest.raises(tvm_tile.CallError, match=r"argument 1 \(A\) starts at an address that is no multiple of 16"):
        third(a, b)
    assert torch.isnan(b).all()


def test_tensors_of_another_device_are_refused(third):
    a, b = data()
    with pytest.raises(tvm_tile.CallError, match="is on cpu, but the kernel is for cuda"):
        third(a.cpu(), b)


def test_load_without_the_compiler(third, tmp_path):
    path = third.export(tmp_path / "third.so")
    code = f"""
        import sys; sys.path.insert(0, {ROOT!r})
        import torch, tvm_tile
        kernel = tvm_tile.load({str(path)!r})
        a = torch.randn(1024 * 256, device="cuda"); b = torch.full_like(a, float("nan"))
        kernel(a, b)
        torch.testing.assert_close(b, a / 3)
        print("compiler" if "libtvm_compiler" in open("/proc/self/maps").read() else "runtime only")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TVM_USE_RUNTIME_LIB": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "runtime only"


def test_call_overhead(third):
    import time

    a, b = data()
    third(a, b)
    torch.cuda.synchronize()
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(200):
            third(a, b)
        best = min(best, (time.perf_counter() - start) / 200)
        torch.cuda.synchronize()
    assert best < 50e-6, f"{best * 1e6:.1f} us a call"
