"""What the factories share: checks of their arguments, optional parameters, tile sizes, constants of the softmax."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from tvm import tirx
from tvm.ir import Var

from ..errors import TileShapeError, TileTypeError
from ..ir.visit import mentions
from ..layout.arith import round_up

__all__ = [
    "KEPT_GROWTH",
    "LN2",
    "LOG2E",
    "check_choice",
    "check_dtype",
    "check_positive",
    "divisor_tile",
    "dimension",
    "finish",
    "lowest_score",
    "next_power_of_two",
    "pick",
    "round_up",
    "spread",
    "target_class",
]

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
#: Growth of a row's maximum, in powers of two, that an online softmax lets pass: weights reach 2**8 then, which neither
#: float16 nor a float32 sum minds, and the accumulator is hardly ever rescaled. Source: FlashAttention-4 (T. Dao et
#: al., 2025).
KEPT_GROWTH = 8.0
_FLOAT32_MAX = 3.4028234663852886e38


def finish(func: tirx.PrimFunc, optional: Iterable[str] = ()) -> tirx.PrimFunc:
    """Drop the optional parameters that the body does not use.

    A kernel's source lists every tensor that some option needs; a factory hands out the function with those that its
    options do need.

    Parameters
    ----------
    func : PrimFunc
        The parsed kernel.
    optional : iterable of str
        Names of the parameters that may be dropped.
    """
    names = set(optional)
    keep = [p for p in func.params if p.name not in names or mentions(func.body, p)]
    if len(keep) == len(func.params):
        return func
    out = tirx.PrimFunc(keep, func.body, func.ret_type, func.attrs, func.span)
    out.__name__ = getattr(func, "__name__", None)
    return out


def check_positive(op: str, **values) -> None:
    """Every value is an int of at least 1.

    Raises
    ------
    TileTypeError, TileShapeError
        Naming the argument.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TileTypeError(f"{op}: {name} must be an int, but it is {value!r}")
        if value < 1:
            raise TileShapeError(f"{op}: {name}={value} is not positive")


def check_choice(op: str, name: str, value, choices: Iterable) -> None:
    """``value`` is one of ``choices``.

    Raises
    ------
    TileTypeError
        With the choices, and the nearest one for text.
    """
    choices = list(choices)
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1)
    raise TileTypeError(
        f"{op}: {name}={value!r} is not possible",
        advice=(f"did you mean {near[0]!r}? " if near else "") + f"possible: {', '.join(map(str, choices))}",
    )


def check_dtype(op: str, name: str, value, choices: Iterable[str]) -> str:
    """The dtype's name, which must be one of ``choices``; ``torch.bfloat16`` is accepted for ``"bfloat16"``."""
    text = str(value).removeprefix("torch.")
    check_choice(op, name, text, choices)
    return text


def dimension(op: str, name: str, value):
    """A dimension that may be symbolic: an int of at least 1, a ``T.dynamic`` variable, or None for a new one.

    Raises
    ------
    TileTypeError, TileShapeError
        For anything else.
    """
    if value is None:
        return Var(name, "int32")
    if isinstance(value, Var):
        return value
    check_positive(op, **{name: value})
    return int(value)


def next_power_of_two(value: int) -> int:
    """The least power of two that is at least ``value``."""
    return 1 << max(value - 1, 0).bit_length()


def divisor_tile(value: int, limit: int) -> int:
    """The largest divisor of ``value`` that is at most ``limit``."""
    return max(d for d in range(1, min(value, limit) + 1) if value % d == 0)


def lowest_score(scale: float) -> float:
    """What a running maximum of scores starts from: finite, and not above any finite score.

    With it ``exp2(x * scale - maximum * scale)`` is 0 for a masked score ``x = -inf`` even while no valid key was seen:
    starting from -inf would give ``-inf - (-inf) = NaN`` there, and starting from a constant such as -5e4 would be
    wrong for scores below it. The division keeps ``maximum * scale`` finite.

    Parameters
    ----------
    scale : float
        Positive factor of the scores, log2(e) included.
    """
    # two ulp inside the range, so that the product rounds to a finite float32
    return -_FLOAT32_MAX * (1 - 2.0**-22) / max(1.0, scale)


def target_class(target=None) -> str:
    """``"cpu"``, ``"sm_80"`` or ``"sm_90"``: which default tile sizes fit a target.

    Parameters
    ----------
    target : str or tvm.target.Target, optional
        None stands for the machine at hand: its GPU, else its CPU.
    """
    if target is None or str(target) == "auto":
        return _machine_class()
    kind = getattr(getattr(target, "kind", None), "name", None)
    text = str(target) if kind is None else kind
    if text in ("cpu", "llvm", "c") or text.startswith("llvm"):
        return "cpu"
    arch = str(target.attrs.get("arch", "")) if kind is not None else text
    return "sm_90" if arch.startswith(("sm_9", "sm_1")) else "sm_80"


def _machine_class() -> str:
    try:
        import torch
    except ImportError:
        return "cpu"
    if not torch.cuda.is_available():
        return "cpu"
    return "sm_90" if torch.cuda.get_device_capability()[0] >= 9 else "sm_80"


def spread(block: int, size, others: int, cores: int | None = None) -> int:
    """A CPU tile's extent, halved (to 32 at least) until each core has a tile.

    Parameters
    ----------
    block : int
        Extent to start from.
    size : int or Var
        What the tiles cover; a symbolic size counts as large.
    others : int
        Tiles along the other dimensions.
    cores : int, optional
        Those of this machine by default.
    """
    cores = cores or os.cpu_count() or 1
    while block > 32 and isinstance(size, int) and -(-size // block) * others < cores:
        block //= 2
    return block


def pick(defaults: Mapping[str, Any], **given) -> dict[str, Any]:
    """The given values, and the defaults for those that are None."""
    return {name: defaults[name] if value is None else value for name, value in given.items()}
