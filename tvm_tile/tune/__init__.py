"""Tuning: search the configurations of an op for the machine at hand, and use what was found.

``tvm_tile.tune`` is this package and also the function that tunes::

    config = tvm_tile.tune("gemm", shape={"m": 4096, "n": 4096, "k": 4096}, trials=64)

- :func:`tvm_tile.tune.run` is the same with all options and the whole report as its result.
- :mod:`tvm_tile.tune.records` holds the winners and the rule by which ``tvm_tile.compile`` picks one.
- :func:`tvm_tile.tune.database.replay` rebuilds kernels from a database alone.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_LAZY = {
    "Report": (".report", "Report"),
    "run": (".session", "run"),
    "replay": (".database", "replay"),
    "tune": (".session", "tune"),
    "tuned_function": (".apply", "tuned_function"),
}

__all__ = [*_LAZY]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module, __name__), attribute)


class _CallableModule(ModuleType):
    """The public name ``tvm_tile.tune`` is a function and, as the folder's name, a package."""

    def __call__(self, *args, **kwargs):
        return importlib.import_module(".session", __name__).tune(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
