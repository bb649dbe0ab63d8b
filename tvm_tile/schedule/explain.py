"""What the rules decided for a kernel and why, as text."""

from __future__ import annotations

import difflib

import tvm
from tvm import tirx

from .. import hardware
from ..errors import TileTargetError, TileTypeError
from .decide import decide
from .decisions import read_log, read_machine

__all__ = ["explain", "machine"]


def machine(target=None):
    """The GPU description of a target.

    Parameters
    ----------
    target : str, tvm.target.Target or GPU, optional
        None or ``"auto"`` stands for the GPU here, and for sm_80 on a machine without one.

    Raises
    ------
    TileTargetError
        A CPU target, whose lowering takes its decisions itself, or an unknown one.
    """
    if isinstance(target, hardware.GPU):
        return target
    if target is None or target == "auto":
        from ..runtime.targets import gpu_arch

        target = gpu_arch() or "sm_80"
    kind = getattr(getattr(target, "kind", None), "name", None)
    name = str(target.attrs.get("arch", "")) if kind == "cuda" else str(target) if kind is None else kind
    if name in ("llvm", "cpu"):
        raise TileTargetError(
            "the schedule rules decide for CUDA targets; the CPU's lowering has no decisions to explain",
            advice="name a GPU, for example target='sm_80'",
        )
    try:
        return hardware.lookup(name)
    except KeyError:
        known = [n for n in hardware.names() if n not in ("cpu", "llvm")]
        close = difflib.get_close_matches(name, known, 1)
        raise TileTargetError(
            f"no hardware description of {name!r}",
            advice=[f"did you mean {c!r}?" for c in close] + [f"known are {', '.join(known)}"],
        ) from None


def _function(func_or_kernel):
    if isinstance(func_or_kernel, tirx.PrimFunc):
        return func_or_kernel, None
    if isinstance(func_or_kernel, tvm.IRModule):
        found = [f for f in func_or_kernel.functions.values() if isinstance(f, tirx.PrimFunc)]
        if len(found) == 1:
            return found[0], None
    script = getattr(func_or_kernel, "script", None)
    if callable(script):
        arch = getattr(getattr(func_or_kernel, "_artifacts", None), "arch", None)
        return tvm.script.from_source(script()), arch
    raise TileTypeError(f"explain takes a tile function or a compiled kernel, not {type(func_or_kernel).__name__}")


def explain(func_or_kernel, target=None) -> str:
    """Every decision about a kernel's code and the reason for it, by kernel and rule.

    Parameters
    ----------
    func_or_kernel : PrimFunc or Kernel
        A tile function, decided already or not, or a compiled kernel.
    target : str, Target or GPU, optional
        For which GPU; by default the kernel's own, else the one here, else sm_80.

    Returns
    -------
    str
        One line a decision: subject, decision, reason. ``!`` marks what is worth the author's attention.

    Examples
    --------
    >>> print(tvm_tile.schedule.explain(tvm_tile.ops.gemm(128, 128, 128, dtype="float16"), "sm_80"))
    decisions for sm_80
    ...
      gemm instruction
    ...
    """
    func, arch = _function(func_or_kernel)
    if not read_log(func) or target is not None:
        func = decide(func, machine(target or arch))
    log = _without_replaced(read_log(func))
    lines = [f"decisions for {read_machine(func)}"]
    kernels = list(dict.fromkeys(e[0] for e in log if e[0]))
    for kernel in [*kernels, ""]:
        entries = [e for e in log if e[0] == kernel]
        if not entries:
            continue
        lines.append(f"{kernel}:" if kernel else "whole function:")
        rule = None
        for _, subject, name, text, why, *mark in entries:
            if name != rule:
                lines.append(f"  {name.replace('_', ' ')}")
                rule = name
            flag = "!" if mark else " "
            body = f"{text}\n        because {why}" if text else f"not applied: {why}"
            lines.append(f"   {flag}{subject + ': ' if subject else ''}{body}")
    return "\n".join(lines)


def _without_replaced(log: list[list[str]]) -> list[list[str]]:
    """The log without copies of threads that became loads of the producer."""
    loads = {(kernel, subject) for kernel, subject, rule, *_ in log if rule == "roles" and subject != "roles"}
    return [e for e in log if e[2] != "copy_instruction" or (e[0], e[1]) not in loads]
