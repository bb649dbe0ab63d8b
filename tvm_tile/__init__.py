"""tvm_tile: a tile programming language for stock Apache TVM.

>>> import tvm_tile
>>> tvm_tile.TileError.__name__
'TileError'

Submodules load on first use: ``import tvm_tile`` alone imports neither TVM nor torch, so that :func:`load` also works
with TVM's runtime library only (``TVM_USE_RUNTIME_LIB=1``).
"""

from __future__ import annotations

import importlib
import sys

from .errors import (
    CallError,
    InternalError,
    TileError,
    TileResourceError,
    TileShapeError,
    TileSyntaxError,
    TileTargetError,
    TileTypeError,
    ToolchainError,
)

__version__ = "0.1.0"

# Public name -> (module, attribute or None for the module itself).
_LAZY = {
    "Kernel": (".runtime.kernel", "Kernel"),
    "T": (".language", None),
    "compile": (".runtime.compiler", "compile"),
    "hardware": (".hardware", None),
    "ir": (".ir", None),
    "language": (".language", None),
    "layout": (".layout", None),
    "load": (".runtime.loader", "load"),
    "lower": (".lower", None),
    "ops": (".ops", None),
    "runtime": (".runtime", None),
    "schedule": (".schedule", None),
    "simulate": (".simulate", None),
    "target": (".runtime.targets", "target"),
    "tune": (".tune", None),
}

__all__ = [
    "CallError",
    "InternalError",
    "TileError",
    "TileResourceError",
    "TileShapeError",
    "TileSyntaxError",
    "TileTargetError",
    "TileTypeError",
    "ToolchainError",
    "__version__",
    *_LAZY,
]


def __getattr__(name: str):
    try:
        module, attribute = _LAZY[name]
    except KeyError:
        raise AttributeError(f"module 'tvm_tile' has no attribute {name!r}") from None
    loaded = importlib.import_module(module, __name__)
    value = loaded if attribute is None else getattr(loaded, attribute)
    globals()[name] = value
    return value


def _register_pipeline() -> None:
    """Make ``tir_pipeline="tvm_tile"`` known to a TVM that is imported with its compiler."""
    tvm = sys.modules.get("tvm")
    if tvm is not None and hasattr(tvm, "tirx") and not tvm.base._RUNTIME_ONLY:
        importlib.import_module(".runtime.pipeline", __name__)


_register_pipeline()


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
