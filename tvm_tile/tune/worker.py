"""The child's side of :mod:`.process`: ``python -m tvm_tile.tune.worker`` runs tasks that arrive on its standard input.

A task is a function of ``TASKS`` that takes keyword arguments and returns something that pickles.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
import time
from typing import Any

__all__ = ["TASKS", "main"]

_HEADER = struct.Struct("<Q")


def build(
    spec, shape: dict, dtype: str, target: str, machine: str, config: dict, output: str, with_features: bool
) -> dict:
    """Compile a configuration and write its library.

    Returns
    -------
    dict
        ``seconds`` of the build, ``resources`` of the kernel, ``features`` of its lowered form where wanted.
    """
    import tvm_tile

    start = time.perf_counter()
    func = spec.make(shape, dtype, machine, **config)
    where = _target(target)
    features = _features(func, where) if with_features else None
    kernel = tvm_tile.compile(func, where)
    kernel.export(output)
    return {
        "seconds": time.perf_counter() - start,
        "resources": kernel.resources.to_json(),
        "features": features,
        "signature": kernel.signature.to_json(),
    }


def _target(text: str):
    """The TVM target of a name or of a target's JSON form."""
    import json

    from tvm.target import Target

    import tvm_tile

    return tvm_tile.target(Target(json.loads(text)) if text.startswith("{") else text)


def features(spec, shape: dict, dtype: str, target: str, machine: str, config: dict) -> dict[str, float]:
    """Counts over the lowered kernel of a configuration."""
    return _features(spec.make(shape, dtype, machine, **config), _target(target))


def _features(func, target) -> dict[str, float]:
    from ..lower import is_tile_function, lower
    from .features import lowered_features

    if not is_tile_function(func):
        return lowered_features(func)
    return lowered_features(lower(func.with_attr("global_symbol", "main"), target))


def measure(**arguments) -> dict[str, Any]:
    """See :func:`tvm_tile.tune.measure.measure`."""
    from .measure import measure as run

    return run(**arguments)


def prepare(**arguments) -> None:
    """See :func:`tvm_tile.tune.measure.prepare`."""
    from .measure import prepare as run

    run(**arguments)


def together(**arguments) -> list[list[float]]:
    """See :func:`tvm_tile.tune.measure.together`."""
    from .measure import together as run

    return run(**arguments)


TASKS = {"build": build, "features": features, "measure": measure, "prepare": prepare, "together": together}


def _text(error: Exception) -> str:
    """The message; for what is no mistake of a configuration also where it was raised."""
    import traceback

    from ..errors import TileError
    from .measure import StickyError, WrongResult

    text = str(error)[:2000]
    if isinstance(error, (TileError, WrongResult, StickyError)):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''} ({frame.filename}:{frame.lineno})"


def _answer(stream, kind: str | None, value=None, message: str = "") -> None:
    try:
        body = pickle.dumps((kind, value, message))
    except Exception as error:
        body = pickle.dumps(("InternalError", None, f"the task's result does not pickle: {error}"))
    stream.write(_HEADER.pack(len(body)) + body)
    stream.flush()


def _read(stream, size: int) -> bytes | None:
    data = stream.read(size)
    return data if len(data) == size else None


def main() -> None:
    """Run tasks until the parent closes the pipe."""
    # What kernels and libraries print must not reach the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    import tvm_tile.ops.registry  # noqa: F401  loads TVM before the first task's clock starts

    _answer(answers, None, "ready")
    while (header := _read(requests, _HEADER.size)) is not None:
        body = _read(requests, _HEADER.unpack(header)[0])
        if body is None:
            return
        try:
            task, arguments = pickle.loads(body)
            value = TASKS[task](**arguments)
        except Exception as error:
            kind = "sticky" if getattr(error, "sticky", False) else type(error).__name__
            _answer(answers, kind, None, _text(error))
            continue
        _answer(answers, None, value)


if __name__ == "__main__":
    main()
