"""Options and markers of the whole suite: ``--all`` runs the slow tests, GPU tests need a GPU."""

import functools
import os
import subprocess
import sys

import pytest

# The C thread pools of TVM, torch and OpenBLAS together must not oversubscribe a small CI machine. TVM keeps all cores
# in a worker of pytest-xdist too, so that kernels really run in parallel, but must not spin while it waits.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER")
os.environ.setdefault("OMP_NUM_THREADS", "1" if _WORKER else str(os.cpu_count() or 1))
if _WORKER:
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the slow tests too")


@functools.cache
def _has_gpu() -> bool:
    # A probe in another process: asking here would initialise CUDA in processes that later fork.
    probe = "import ctypes,sys; n=ctypes.c_int(); c=ctypes.CDLL('libcuda.so.1'); sys.exit(c.cuInit(0) or c.cuDeviceGetCount(ctypes.byref(n)) or n.value == 0)"  # noqa: E501
    try:
        return subprocess.run([sys.executable, "-c", probe], capture_output=True, timeout=60).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def pytest_collection_modifyitems(config, items):
    run_slow = config.getoption("--all") or "slow" in (config.getoption("-m") or "")
    for item in items:
        if "slow" in item.keywords and not run_slow:
            item.add_marker(pytest.mark.skip(reason="slow: run with --all"))
        if "gpu" in item.keywords and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Compiled kernels of the tests go to a folder of this run, so that a stale entry can never pass a test.

    The workers of a run share it: the simulator's runtime is built once, and the cache is made for concurrent use.
    """
    if "TVM_TILE_CACHE_DIR" not in os.environ:
        base = tmp_path_factory.getbasetemp()
        folder = (base.parent if _WORKER else base) / "tvm_tile_cache"
        folder.mkdir(exist_ok=True)
        os.environ["TVM_TILE_CACHE_DIR"] = str(folder)
    yield
