"""What a kernel expects of its arguments, in a form that travels inside an exported library (JSON, no TVM objects).

Symbolic sizes are expression trees: an ``int``, a ``str`` (the variable) or ``[operator, operand, ...]``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import InternalError

__all__ = ["FORMAT", "Expression", "Parameter", "Signature", "evaluate", "free_names", "show"]

FORMAT = 1

Expression = int | bool | float | str | list

_BINARY = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "truncdiv": lambda a, b: abs(a) // abs(b) * (1 if (a >= 0) == (b >= 0) else -1),
    "truncmod": lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    "min": min,
    "max": max,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "and": lambda a, b: bool(a) and bool(b),
    "or": lambda a, b: bool(a) or bool(b),
}


def evaluate(expression: Expression, values: Mapping[str, Any]) -> Any:
    """Value of an expression tree; a ``KeyError`` names a variable without a value."""
    if isinstance(expression, str):
        return values[expression]
    if isinstance(expression, list):
        operator, *operands = expression
        if operator == "not":
            return not evaluate(operands[0], values)
        if operator == "select":
            return evaluate(operands[1] if evaluate(operands[0], values) else operands[2], values)
        if operator not in _BINARY:
            raise InternalError(f"unknown operator {operator!r} in a kernel's signature")
        return _BINARY[operator](evaluate(operands[0], values), evaluate(operands[1], values))
    return expression


def free_names(expression: Expression) -> set[str]:
    """The variables of an expression tree."""
    if isinstance(expression, str):
        return {expression}
    if isinstance(expression, list):
        return set().union(*(free_names(operand) for operand in expression[1:]))
    return set()


def show(expression: Expression) -> str:
    """The expression as a person would write it."""
    if isinstance(expression, list):
        operator, *operands = expression
        text = [f"({show(o)})" if isinstance(o, list) and o[0] not in ("min", "max") else show(o) for o in operands]
        if operator == "not":
            return f"not {text[0]}"
        if operator == "select":
            return f"{text[1]} if {text[0]} else {text[2]}"
        if operator in ("min", "max", "truncdiv", "truncmod"):
            return f"{operator}({', '.join(show(o) for o in operands)})"
        return f"{text[0]} {operator} {text[1]}"
    return str(expression)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Parameters
    ----------
    name : str
        As the kernel's author wrote it.
    dtype : str
        Element type of a tensor, or type of a scalar.
    shape : list of Expression or None
        None for a scalar.
    strides : list of Expression or None
        In elements; None for a compact row-major tensor.
    written : bool
        The kernel may write to the tensor.
    align : int
        Bytes that the address must be a multiple of.
    """

    name: str
    dtype: str
    shape: list[Expression] | None = None
    strides: list[Expression] | None = None
    written: bool = False
    align: int = 1

    @property
    def is_tensor(self) -> bool:
        """Whether the parameter is a tensor (else a scalar)."""
        return self.shape is not None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.name}: {self.dtype}"
        inner = ", ".join(show(s) for s in self.shape) + ("," if len(self.shape) == 1 else "")
        return f"{self.name}: {self.dtype}[{inner.rstrip(',')}]"


@dataclass(frozen=True)
class Signature:
    """Name, parameters, device kind and conditions of a kernel.

    Parameters
    ----------
    name : str
        Function's name in its library.
    device : str
        ``"cpu"`` or ``"cuda"``.
    parameters : list of Parameter
        In call order.
    conditions : list of Expression
        What ``T.assume`` demands of scalars and symbolic sizes.
    """

    name: str
    device: str
    parameters: list[Parameter]
    conditions: list[Expression] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.parameters))})"

    def to_json(self) -> dict:
        """A JSON-able dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict | str) -> Signature:
        """The inverse of :meth:`to_json`; also takes the JSON text."""
        if isinstance(data, str):
            data = json.loads(data)
        parameters = [Parameter(**p) for p in data["parameters"]]
        return cls(data["name"], data["device"], parameters, data.get("conditions", []))
