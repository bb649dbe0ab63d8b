"""Every test that takes ``device`` runs in the simulator and on a GPU, for both instruction sets.

``@pytest.mark.heavy`` keeps a test's (or a parameter's) simulated runs out of the default selection;
``heavy("sm_90")`` those of one instruction set. The runs on a GPU are short, so they are never slow.
"""

from __future__ import annotations

import pytest

from . import harness


def pytest_configure(config):
    config.addinivalue_line("markers", "heavy(arch): the simulated runs (of one instruction set) are slow")


def pytest_generate_tests(metafunc):
    if "device" not in metafunc.fixturenames:
        return
    values = [pytest.param(harness.Simulated(arch), id=f"sim-{arch}") for arch in harness.ARCHITECTURES]
    values += [
        pytest.param(harness.Gpu(arch), id=f"gpu-{arch}", marks=pytest.mark.gpu) for arch in harness.ARCHITECTURES
    ]
    metafunc.parametrize("device", values)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    seen = set()
    for item in items:
        device = getattr(item, "callspec", None) and item.callspec.params.get("device")
        if not isinstance(device, harness.Simulated):
            continue
        if any(not mark.args or device.arch in mark.args for mark in item.iter_markers("heavy")):
            item.add_marker(pytest.mark.slow)
        elif item.path.name == "test_language.py":
            # the first case of each test; code without products is the same for both instruction sets
            origin = item.function.__module__.rpartition(".")[2]
            key = (item.originalname, device.arch)
            if key in seen or (device.arch == "sm_90" and origin != "test_gemm"):
                item.add_marker(pytest.mark.slow)
            seen.add(key)
