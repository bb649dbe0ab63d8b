"""The layout algebra's own error, free of any dependency on the rest of the package."""

from __future__ import annotations


class LayoutError(ValueError):
    """A layout or partition that cannot exist for the given shapes.

    Parameters
    ----------
    message : str
        What does not fit, with the values.
    advice : str, optional
        What to change; kept apart so that a front end can print it as a help line.
    """

    def __init__(self, message: str, advice: str | None = None) -> None:
        super().__init__(message if advice is None else f"{message} ({advice})")
        self.message = message
        self.advice = advice
