"""From tile IR to a running kernel: compile, call, cache, export and load.

Modules that a loaded kernel needs (``signature``, ``arguments``, ``kernel``, ``loader``) import neither the compiler
nor the language, so that they work with TVM's runtime library alone.
"""

import importlib

_LAZY = {
    "Kernel": ".kernel",
    "Resources": ".resources",
    "Signature": ".signature",
    "cache_dir": ".cache",
    "compile": ".compiler",
    "load": ".loader",
    "target": ".targets",
}

__all__ = list(_LAZY)


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name], __name__), name)
