"""The code blocks of a Markdown file, in order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_BLOCK = re.compile(r"(?:^<!-- not run: (?P<reason>.+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes
    ----------
    language : str
        What follows the fence.
    text : str
        Its lines.
    line : int
        Line of the file on which the text begins.
    reason : str or None
        Why it is not run.
    """

    language: str
    text: str
    line: int
    reason: str | None


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a document."""
    return [
        Block(m["language"], m["text"], text.count("\n", 0, m.start("text")) + 1, m["reason"])
        for m in _BLOCK.finditer(text)
    ]
