"""Says in the kernel's own terms what does not fit, when a call's arguments do not match the signature."""

from __future__ import annotations

import math
import numbers
from typing import Any

import tvm_ffi

from ..errors import CallError
from .arguments import Described, compact_strides, describe
from .signature import Parameter, Signature, evaluate, free_names, show

__all__ = ["check_arguments", "check_scalar", "scalar_range"]


def scalar_range(dtype: str) -> tuple[int, int] | None:
    """Smallest and largest value of an integer type that a call can pass; None for a float.

    TVM's calling convention carries integers as int64, so that the upper half of uint64 cannot be passed.
    """
    if dtype == "bool":
        return 0, 1
    for prefix, signed in (("uint", False), ("int", True)):
        if dtype.startswith(prefix):
            bits = int(dtype[len(prefix) :])
            return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2 ** min(bits, 63) - 1)
    return None


def check_scalar(signature: Signature, position: int, value: Any):
    """The scalar as a Python number; a :class:`CallError` where it does not fit the parameter."""
    parameter = signature.parameters[position]
    bounds = scalar_range(parameter.dtype)
    where = f"argument {position + 1} ({parameter.name})"
    if bounds is None:
        if not isinstance(value, numbers.Real):
            raise CallError(
                f"{signature.name}: {where} must be a number ({parameter.dtype}), but is {_describe_value(value)}",
                advice="pass float(x)" if describe(value) is not None else None,
            )
        return float(value)
    if not isinstance(value, numbers.Integral):
        raise CallError(
            f"{signature.name}: {where} must be an integer ({parameter.dtype}), but is {_describe_value(value)}",
            advice="pass int(x)" if describe(value) is not None or isinstance(value, numbers.Real) else None,
        )
    value = int(value)
    if not bounds[0] <= value <= bounds[1]:
        raise CallError(
            f"{signature.name}: {where} = {value} is outside of {parameter.dtype} ({bounds[0]} to {bounds[1]})",
            advice="integers are passed as int64" if parameter.dtype == "uint64" and value > 0 else None,
        )
    return value


def _describe_value(value: Any) -> str:
    described = describe(value)
    if described is not None:
        return f"a {described.kind} of shape {described.shape} and dtype {described.dtype}"
    if value is None:
        return "None"
    return f"{value!r:.60} of type {type(value).__name__}"


def check_arguments(signature: Signature, args: tuple) -> None:
    """Raise a :class:`CallError` for the first thing that does not fit; return when everything does.

    The order is: count, kinds and dtypes, devices, ranks, sizes (with the symbolic ones), strides, memory, overlaps,
    conditions.
    """
    name, parameters = signature.name, signature.parameters
    if len(args) != len(parameters):
        missing = [str(p) for p in parameters[len(args) :]]
        raise CallError(
            f"{name}: expected {len(parameters)} arguments, got {len(args)}"
            + (f"; missing {', '.join(missing)}" if missing else ""),
            advice=f"the signature is {signature}",
        )
    tensors: list[tuple[int, Parameter, Described]] = []
    values: dict[str, Any] = {}
    for i, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        if not parameter.is_tensor:
            values[parameter.name] = check_scalar(signature, i, value)
            continue
        described = describe(value)
        where = f"argument {i + 1} ({parameter.name})"
        if described is None:
            raise CallError(
                f"{name}: {where} must be a tensor {parameter}, but is {_describe_value(value)}",
                advice="pass a torch, NumPy or TVM tensor, or anything else with __dlpack__",
            )
        if described.problem:
            raise CallError(f"{name}: {where} cannot be passed without a copy: {described.problem}")
        if described.dtype != parameter.dtype:
            raise CallError(
                f"{name}: {where} must have dtype {parameter.dtype}, but has {described.dtype}",
                advice=f"convert it to {parameter.dtype}" if not parameter.written else None,
            )
        tensors.append((i, parameter, described))
    _check_devices(signature, tensors)
    for i, parameter, described in tensors:
        if len(described.shape) != len(parameter.shape):
            raise CallError(
                f"{name}: argument {i + 1} must have {len(parameter.shape)} dimensions, {parameter}, "
                f"but has {len(described.shape)}: {described.shape}"
            )
    _check_shapes(signature, tensors, values)
    for i, parameter, described in tensors:
        _check_memory(name, i, parameter, described, values)
    _check_overlaps(name, tensors)
    for condition in signature.conditions:
        if free_names(condition) <= set(values) and not evaluate(condition, values):
            given = ", ".join(f"{n} = {values[n]}" for n in sorted(free_names(condition)))
            raise CallError(f"{name}: the kernel assumes {show(condition)}, but {given}")


def _check_overlaps(name: str, tensors: list[tuple[int, Parameter, Described]]) -> None:
    """Refuse a written tensor that shares memory with another argument: loads and stores would change places."""
    spans = []
    for i, parameter, described in tensors:
        if described.address is None or 0 in described.shape:
            continue
        # elements of views with strides may lie between each other's: of those only a common start is certain
        compact = parameter.strides is None
        size = max(1, tvm_ffi.dtype(described.dtype).itemsize)
        reach = size * math.prod(described.shape) if compact else 1
        spans.append((i, parameter, described.address, described.address + reach))
    for i, parameter, start, stop in spans:
        for other, other_parameter, low, high in spans:
            if other != i and parameter.written and start < high and low < stop:
                raise CallError(
                    f"{name}: argument {i + 1} ({parameter.name}) is written by the kernel and shares memory with "
                    f"argument {other + 1} ({other_parameter.name})",
                    advice="pass a tensor of its own, or declare one parameter that is read and written",
                )


def _check_devices(signature: Signature, tensors: list[tuple[int, Parameter, Described]]) -> None:
    first: str | None = None
    for i, parameter, described in tensors:
        where = f"argument {i + 1} ({parameter.name})"
        if described.device.split(":")[0] != signature.device:
            advice = {
                "cpu": "move it with .cpu(), or compile the kernel for the GPU (target='cuda')",
                "cuda": "move it with .cuda(), or compile the kernel for the CPU (target='llvm')",
            }[signature.device]
            raise CallError(
                f"{signature.name}: {where} is on {described.device}, but the kernel is for {signature.device}",
                advice=advice,
            )
        if first is None:
            first = described.device
        elif described.device != first:
            raise CallError(f"{signature.name}: {where} is on {described.device}, but the others are on {first}")


def _check_shapes(signature: Signature, tensors: list, values: dict[str, Any]) -> None:
    bound_by: dict[str, str] = {n: f"argument {n}" for n in values}
    for _, parameter, described in tensors:
        for axis, (want, have) in enumerate(zip(parameter.shape, described.shape, strict=True)):
            if isinstance(want, str) and want not in values:
                values[want] = have
                bound_by[want] = f"dimension {axis} of {parameter.name}"
    for i, parameter, described in tensors:
        for axis, (want, have) in enumerate(zip(parameter.shape, described.shape, strict=True)):
            unknown = free_names(want) - set(values)
            if unknown:
                raise CallError(
                    f"{signature.name}: the size {show(want)} of {parameter.name} cannot be derived from the arguments",
                    advice=f"use {', '.join(sorted(unknown))} alone as a dimension of some tensor, or as a parameter",
                )
            expected = evaluate(want, values)
            if expected == have:
                continue
            message = (
                f"{signature.name}: argument {i + 1} must be {parameter}, but dimension {axis} is {have} "
                f"(shape {described.shape})"
            )
            if isinstance(want, int):
                raise CallError(f"{message}, expected {want}")
            given = " and ".join(f"{n} = {values[n]} is set by {bound_by[n]}" for n in sorted(free_names(want)))
            raise CallError(f"{message}, expected {show(want)} = {expected}", advice=given)


def _check_memory(name: str, i: int, parameter: Parameter, described: Described, values: dict[str, Any]) -> None:
    where = f"argument {i + 1} ({parameter.name})"
    empty = 0 in described.shape
    if described.strides is not None and not empty:
        expected = _expected_strides(parameter, described, values)
        differs = [
            axis
            for axis, (want, have, extent) in enumerate(zip(expected, described.strides, described.shape, strict=True))
            if want != have and extent != 1
        ]
        if differs:
            if parameter.strides is None:
                raise CallError(
                    f"{name}: {where} must be contiguous, but has the strides {described.strides} for the shape "
                    f"{described.shape}",
                    advice="pass x.contiguous() (torch) or numpy.ascontiguousarray(x), or declare T.StridedTensor"
                    if not parameter.written
                    else "write into a contiguous tensor, or declare the parameter T.StridedTensor",
                )
            raise CallError(f"{name}: {where} has the strides {described.strides}, expected {tuple(expected)}")
    if described.address is not None and not empty and described.address % parameter.align:
        raise CallError(
            f"{name}: {where} starts at an address that is no multiple of {parameter.align} bytes",
            advice="pass x.clone() (a slice of a larger tensor may start anywhere)",
        )
    if parameter.written and not described.writeable:
        raise CallError(f"{name}: {where} is written by the kernel, but the {described.kind} is read-only")


def _expected_strides(parameter: Parameter, described: Described, values: dict[str, Any]) -> list[int]:
    if parameter.strides is None:
        return list(compact_strides(described.shape))
    for stride, have in zip(parameter.strides, described.strides, strict=True):
        # A stride named by a variable of its own takes whatever the tensor has.
        if isinstance(stride, str):
            values.setdefault(stride, have)
    return [evaluate(stride, values) for stride in parameter.strides]
