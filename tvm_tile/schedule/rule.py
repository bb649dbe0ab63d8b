"""What a rule is, what it answers, and the schedule it works on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx

from ..errors import TileShapeError
from ..ir.kernels import plain
from ..layout import LayoutError
from .analysis import KernelView, Scope, Site, kernel_views
from .decisions import encode

__all__ = ["GIVEN", "Answer", "Decision", "NotApplicable", "Rule", "TileSchedule", "shape_error"]

_MAIN = "main"

#: The reason of a decision that a user or tuning made.
GIVEN = "given before the rules ran"


@dataclass(frozen=True)
class Decision:
    """Something that a rule decided, or kept as it found it.

    Attributes
    ----------
    kernel, subject : str
        Where: the kernel, and its block, buffer or loop.
    text : str
        What was decided, for people.
    why : str
        The reason, one line.
    warning : bool
        Whether the author of the kernel should know.
    """

    kernel: str
    subject: str
    text: str
    why: str
    warning: bool = False


@dataclass(frozen=True)
class NotApplicable:
    """Why a rule decided nothing for a subject."""

    reason: str
    kernel: str = ""
    subject: str = ""


Answer = Decision | NotApplicable


@dataclass(frozen=True)
class Rule:
    """A schedule rule: ``apply(sch, hw)`` annotates through ``sch`` and answers what it decided and why.

    Attributes
    ----------
    name : str
        What it decides.
    apply : callable
        ``(TileSchedule, GPU) -> Decision | NotApplicable | list of them``. It raises a TileError for what the kernel
        asks for and the machine cannot do.
    """

    name: str
    apply: Callable[[TileSchedule, object], Answer | Sequence[Answer]]


class TileSchedule:
    """A tile function under schedule: a :class:`tvm.s_tir.Schedule` and the analysed kernels.

    Every annotation goes through the schedule and is in its trace. An annotation that is there already is kept: rules
    ask :meth:`given` first and check what they find.

    Parameters
    ----------
    func : PrimFunc
        Tile IR.
    """

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.schedule = s_tir.Schedule(tvm.IRModule({_MAIN: func}))
        self.attributes: dict[str, str] = {}
        self.func_attributes = {str(k): v for k, v in func.attrs.items()} if func.attrs is not None else {}
        self.kernels: list[KernelView] = []
        self.refresh()

    def refresh(self) -> None:
        """Analyse again, after a rule transformed the function through ``schedule``."""
        self.kernels = kernel_views(self.function)

    @property
    def function(self) -> tirx.PrimFunc:
        """The function as it is now."""
        return self.schedule.mod[_MAIN]

    def sites(self, kind: type | tuple = object):
        """(kernel, site) of all operations of a kind, in the order of the text."""
        for kernel in self.kernels:
            for site in kernel.sites:
                if isinstance(site.op, kind):
                    yield kernel, site

    # ---- annotations

    def given(self, site: Site, key: str):
        """An operation's annotation as plain data (JSON text parsed), None where there is none."""
        return _parsed(site.op.annotations.get(key))

    def annotate(self, site: Site, key: str, value) -> None:
        """Annotate an operation's block; everything but ints and text becomes JSON text.

        TVM's annotations take lists and dicts too, but its traces do not replay them.
        """
        if key in site.op.annotations:
            return
        value = value if isinstance(value, int | str) else encode(value)
        self.schedule.annotate(self.schedule.get_sblock(site.name, _MAIN), key, value)
        site.op.annotations[key] = value

    def given_kernel(self, kernel: KernelView, key: str):
        """A kernel block's annotation, or None."""
        notes = kernel.info.block.annotations
        return _parsed(plain(notes[key])) if key in notes else None

    def annotate_kernel(self, kernel: KernelView, key: str, value) -> None:
        """Set a kernel block's annotation, as JSON text where it is no int or text."""
        value = value if isinstance(value, int | str) else encode(value)
        block = self.schedule.get_sblock(kernel.name, _MAIN)
        if key in self.schedule.get(block).annotations:
            self.schedule.unannotate(block, key)
        self.schedule.annotate(block, key, value)
        kernel.info.block = self.schedule.get(block)

    def annotate_loop(self, kernel: KernelView, loop: Scope, key: str, value) -> None:
        """Annotate a loop, found through an operation inside it."""
        inside = next(s for s in kernel.sites if any(p is loop for p in s.path))
        for candidate in self.schedule.get_loops(self.schedule.get_sblock(inside.name, _MAIN)):
            if self.schedule.get(candidate).loop_var.same_as(loop.node.loop_var):
                self.schedule.annotate(candidate, key, encode(value))
                return

    def set_attribute(self, key: str, value) -> None:
        """An attribute of the function, JSON text."""
        self.attributes[key] = encode(value)

    def finished(self) -> tirx.PrimFunc:
        """The annotated function."""
        func = self.function
        for key, value in self.attributes.items():
            func = func.with_attr(key, value)
        return func


def _parsed(value):
    value = plain(value) if value is not None else None
    if isinstance(value, str) and value[:1] in "[{":
        return json.loads(value)
    return value


def shape_error(err: LayoutError, prefix: str, location, kind=TileShapeError):
    """A layout error as the user's mistake at a place in the kernel."""
    return kind(f"{prefix}: {err.message}", location, err.advice)
