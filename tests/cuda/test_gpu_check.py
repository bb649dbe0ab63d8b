"""``scripts/gpu_check.py``: no test is lost when a process hangs, dies or fails."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import os, pytest

def test_first():
    pass

def test_dies():
    os._exit(9)

def test_wrong():
    assert 1 == 2, "one is not two"

def test_hangs():
    import time
    from tests.cuda import harness
    with harness._exclusive():
        time.sleep(60)

@pytest.mark.skip
def test_skipped():
    pass

def test_last():
    from tests.cuda import harness
    with harness._exclusive():
        pass
"""


@pytest.fixture
def gpu_check(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "gpu_check", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_every_test_gets_its_outcome(gpu_check, tmp_path, capsys):
    (tmp_path / "test_cases.py").write_text(TESTS)
    names = ("first", "dies", "wrong", "hangs", "skipped", "last")
    tests = [f"test_cases.py::test_{name}" for name in names]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TVM_TILE_GPU_LOCK": str(tmp_path / "lock"),
        "TVM_TILE_GPU_WATCHDOG": "2",
    }
    results = gpu_check.Results()
    start = time.monotonic()
    gpu_check.run_part(0, tests, tmp_path, env, start + 120, results)
    got = [results.outcomes[t] for t in tests]
    assert got == ["passed", "crashed", "failed", "crashed", "skipped", "passed"]
    assert time.monotonic() - start < 60
    assert "Timeout" in results.reports[tests[3]] and "one is not two" in results.reports[tests[2]]
    assert gpu_check.summary(tests, results, 1.0) == 1
    printed = capsys.readouterr().out
    assert "FAIL: 2 crashed, 1 failed, 2 passed, 1 skipped in 1 s" in printed


def test_time_that_is_over_is_said(gpu_check, tmp_path):
    (tmp_path / "test_cases.py").write_text(
        "import time\ndef test_long():\n    time.sleep(60)\ndef test_next():\n    pass\n"
    )
    tests = ["test_cases.py::test_long", "test_cases.py::test_next"]
    results = gpu_check.Results()
    gpu_check.run_part(0, tests, tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)}, time.monotonic() + 5, results)
    assert [results.outcomes[t] for t in tests] == ["unfinished", "unfinished"]
    assert gpu_check.summary(tests, results, 1.0) == 1
