"""pytest plugin of ``gpu_check.py``: each test's outcome in a log as it ends; no test after a CUDA error."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time

import pytest

_LOG = os.environ.get("TVM_TILE_GPU_LOG")
_LONGEST = 300.0  # seconds of a whole test, compiling and waiting for the GPU included
# pytest captures stderr: what the watchdog says must reach the process's own
_STDERR = os.dup(2)
os.environ["TVM_TILE_GPU_STDERR"] = str(_STDERR)


def _write(**entry) -> None:
    if _LOG:
        with open(_LOG, "a") as log:
            log.write(json.dumps(entry) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Note when a test starts and how it ended."""
    _write(event="start", test=item.nodeid)
    item.stash[_REPORTS] = []
    start = time.monotonic()
    faulthandler.dump_traceback_later(_LONGEST, exit=True, file=_STDERR)
    result = yield
    faulthandler.cancel_dump_traceback_later()
    reports = item.stash[_REPORTS]
    outcome = "passed"
    for report in reports:
        if report.failed:
            outcome = "failed"
        elif report.skipped and outcome == "passed":
            outcome = "skipped"
    text = "\n".join(str(r.longrepr) for r in reports if r.failed)
    _write(event="end", test=item.nodeid, outcome=outcome, seconds=time.monotonic() - start, text=text[-6000:])
    if outcome == "failed" and _cuda_is_broken():
        sys.stdout.flush()
        os._exit(70)
    return result


_REPORTS = pytest.StashKey[list]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Collect the reports of a test's phases."""
    report = yield
    item.stash[_REPORTS].append(report)
    return report


def _cuda_is_broken() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    faulthandler.dump_traceback_later(30.0, exit=True, file=_STDERR)
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").cpu()
    except RuntimeError:
        return True
    finally:
        faulthandler.cancel_dump_traceback_later()
    return False
