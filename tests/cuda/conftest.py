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
        if device is None:
            continue
        simulated = isinstance(device, harness.Simulated)
        if simulated and any(not mark.args or device.arch in mark.args for mark in item.iter_markers("heavy")):
            item.add_marker(pytest.mark.slow)
        elif item.path.name == "test_language.py":
            # The first case of each test on each device (on a GPU all of them, as sm_80 code); code without products
            # is the same for both instruction sets.
            products = item.function.__module__.endswith("test_gemm")
            again = (item.originalname, repr(device)) in seen
            seen.add((item.originalname, repr(device)))
            if simulated:
                rare = again or (device.arch == "sm_90" and not products)
            else:
                rare = again and device.arch == "sm_90" and not products
            if rare:
                item.add_marker(pytest.mark.slow)
