"""What can go wrong, as exception types: a user's mistakes (:class:`TileError`) and faults of ours.

Every layer raises these, and :meth:`TileError.__str__` is the only renderer, so that a parse error, a shape error found
by the compiler and a wrong tensor at the call all read alike::

    T.copy: the tile is (64, 32), but the slice A[0:64, 0:16] is (64, 16)
      --> gemm.py:12:9
       |
    12 |         T.copy(A[0:64, 0:16], A_shared)
       |         ^
    help: slice A[0:64, 0:32], or allocate A_shared as (64, 16)
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "CallError",
    "InternalError",
    "SourceLocation",
    "TileError",
    "TileResourceError",
    "TileShapeError",
    "TileSyntaxError",
    "TileTargetError",
    "TileTypeError",
    "ToolchainError",
]


@dataclass(frozen=True)
class SourceLocation:
    """A place in a user's source file.

    Parameters
    ----------
    file : str
        Path of the file, or a name such as ``"<string>"``.
    line, column : int
        Both count from 1; column 0 means "the whole line".
    end_column : int or None
        Column after the last marked character, on the same line.
    text : str or None
        The source line; read from the file when it is not given.
    """

    file: str
    line: int
    column: int = 0
    end_column: int | None = None
    text: str | None = None

    def source_line(self) -> str | None:
        """The source line without its line end, or None where it cannot be read."""
        text = self.text if self.text is not None else linecache.getline(self.file, self.line)
        text = text.rstrip("\r\n")
        return text or None

    @classmethod
    def from_span(cls, span) -> SourceLocation | None:
        """The location of a TVM ``Span``; None for a span that is absent or names no file."""
        if span is None:
            return None
        source = getattr(span, "source_name", None)
        name = getattr(source, "name", None)
        line = int(getattr(span, "line", 0) or 0)
        if not name or line <= 0:
            return None
        column = int(getattr(span, "column", 0) or 0)
        end_column = None
        if int(getattr(span, "end_line", 0) or 0) == line:
            end_column = int(getattr(span, "end_column", 0) or 0) or None
        return cls(str(name), line, column, end_column)

    @classmethod
    def from_ast(cls, node, file: str, first_line: int = 1, indent: int = 0) -> SourceLocation:
        """The location of a Python ``ast`` node; its source began at ``first_line``, dedented by ``indent`` columns."""
        end_column = None
        if getattr(node, "end_lineno", None) == node.lineno and node.end_col_offset is not None:
            end_column = node.end_col_offset + indent + 1
        return cls(file, first_line + node.lineno - 1, node.col_offset + indent + 1, end_column)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f":{self.column}" if self.column else "")


def _display_path(path: str) -> str:
    """The path as a person would type it: relative where it lies under the working directory."""
    if path.startswith("<"):
        return path
    try:
        relative = os.path.relpath(path)
    except ValueError:  # another drive on Windows
        return path
    return path if relative.startswith("..") else relative


def render(message: str, location: SourceLocation | None = None, advice: str | Sequence[str] | None = None) -> str:
    """The text of an error: message, place with source line and caret, advice.

    Parameters
    ----------
    message : str
        What does not fit, with the values.
    location : SourceLocation or None
        Where it was written.
    advice : str, sequence of str or None
        What to change; one ``help:`` line each.
    """
    lines = [message]
    if location is not None:
        place = f"{_display_path(location.file)}:{location.line}" + (f":{location.column}" if location.column else "")
        number = str(location.line)
        pad = " " * len(number)
        lines.append(f"{pad}--> {place}")
        text = location.source_line()
        if text is not None:
            lines.append(f"{pad} |")
            lines.append(f"{number} | {text.expandtabs(4)}")
            first = _visual_column(text, location.column) if location.column else len(text) - len(text.lstrip()) + 1
            width = 1
            if location.end_column is not None and location.end_column > location.column:
                last = _visual_column(text, min(location.end_column, len(text) + 1))
                width = max(1, last - first)
            lines.append(f"{pad} | {' ' * (first - 1)}{'^' * width}")
    if advice:
        for line in [advice] if isinstance(advice, str) else advice:
            lines.append(f"help: {line}")
    return "\n".join(lines)


def _visual_column(text: str, column: int) -> int:
    """Column (from 1) after tabs are expanded as :func:`render` expands them."""
    return len(text[: max(column - 1, 0)].expandtabs(4)) + 1


class TileError(Exception):
    """A mistake in a kernel or in the way it is used.

    Parameters
    ----------
    message : str
        What does not fit, with the values; one sentence, no trailing period.
    location : SourceLocation or None
        Where the user wrote it. A layer that knows the place may add it later with :meth:`at`.
    advice : str, sequence of str or None
        What to change.
    """

    def __init__(
        self,
        message: str,
        location: SourceLocation | None = None,
        advice: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.location = location
        self.advice = advice

    @property
    def file(self) -> str | None:
        """File of the mistake, or None."""
        return self.location.file if self.location else None

    @property
    def line(self) -> int | None:
        """Line of the mistake (from 1), or None."""
        return self.location.line if self.location else None

    @property
    def column(self) -> int | None:
        """Column of the mistake (from 1; 0 for the whole line), or None."""
        return self.location.column if self.location else None

    def at(self, location: SourceLocation | None) -> TileError:
        """Fill in the location where none is known yet, and return the error (``raise error.at(where)``)."""
        if self.location is None:
            self.location = location
        return self

    def __str__(self) -> str:
        return render(self.message, self.location, self.advice)

    def __reduce__(self):
        # Tuning and the cache's builders send errors between processes.
        return type(self), (self.message, self.location, self.advice)


class TileSyntaxError(TileError):
    """A construct that the language does not have, or a primitive in the wrong place."""


class TileTypeError(TileError):
    """A dtype, dtype triple or kind of operand that does not fit."""


class TileShapeError(TileError):
    """Shapes, extents or indices that do not fit each other."""


class TileResourceError(TileError):
    """More shared memory, registers or threads than the target has."""


class TileTargetError(TileError):
    """A target that is unknown, or that cannot do what the kernel asks for."""


class CallError(TileError):
    """Arguments that do not fit the kernel's signature, found at the call before anything ran."""


class ToolchainError(TileError):
    """A compiler or tool that is missing on this machine or that failed."""


class InternalError(RuntimeError):
    """A fault of tvm_tile itself; never raised for a user's mistake.

    Parameters
    ----------
    message : str
        What went wrong.
    location : SourceLocation or None
        The statement of the kernel that was being compiled.
    """

    def __init__(self, message: str, location: SourceLocation | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.location = location

    def __str__(self) -> str:
        return render(
            self.message,
            self.location,
            "this is a fault of tvm_tile, not of the kernel: please report it with the kernel's source",
        )

    def __reduce__(self):
        return type(self), (self.message, self.location)
