"""Applies a rule set to a tile function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tvm import tirx

from ..errors import InternalError, TileError, TileTargetError, TileTypeError
from ..ir.kernels import is_tile_function
from ..layout import MMA, WGMMA
from .alignment import alignment
from .analysis import kernel_views
from .box_rows import box_rows
from .copy_instruction import copy_instruction
from .decisions import read_log, read_machine, read_roles
from .deferred_sums import deferred_sums
from .fragment_layout import fragment_layout
from .gemm_instruction import gemm_instruction
from .groups import check_groups
from .l2_policy import l2_policy
from .layout_check import check_layouts
from .loop_layout import loop_layout
from .persistent import persistent
from .pipeline import pipeline
from .rasterisation import rasterisation
from .resources import resources
from .roles import roles
from .rule import Decision, NotApplicable, Rule, TileSchedule
from .separate import separate_tiles
from .shared_layout import shared_layout
from .split import split_roles
from .tma_store import tma_store
from .unit_factors import unit_factors
from .warp_policy import warp_policy

__all__ = ["decide", "default_rules"]


def default_rules(hw=None, instruction_families: Sequence[str] | None = None) -> list[Rule]:
    """The rules for a GPU, in the order in which they build on each other; extend or replace them as any list.

    Parameters
    ----------
    hw : GPU, optional
        The machine.
    instruction_families : sequence of str, optional
        Tensor-core families to consider, best first; all that the machine has by default.
    """
    if instruction_families is None:
        instruction_families = (WGMMA, MMA) if hw is not None and hw.supports("wgmma") else (MMA,)
    return [
        gemm_instruction(tuple(instruction_families)),
        warp_policy,
        fragment_layout,
        shared_layout,
        copy_instruction,
        loop_layout,
        deferred_sums,
        unit_factors,
        pipeline,
        *([roles(), box_rows, l2_policy, persistent, tma_store] if WGMMA in instruction_families else []),
        rasterisation,
        alignment,
        resources,
    ]


def decide(func: tirx.PrimFunc, hw, rules: Sequence[Rule] | None = None, whole: str | None = None) -> tirx.PrimFunc:
    """The function with every decision that lowering needs, as annotations.

    An annotation that is there already (by a user or by tuning) is kept and checked.

    Parameters
    ----------
    func : PrimFunc
        Tile IR.
    hw : GPU
        The machine, from :mod:`tvm_tile.hardware`.
    rules : list of Rule, optional
        Instead of :func:`default_rules`. With the rule ``roles`` among them, chains of products are tried with a front
        and a back first (:mod:`tvm_tile.schedule.split`).
    whole : str, optional
        Why that is not to be tried.

    Raises
    ------
    TileError
        For what the kernel asks for and the machine cannot do.
    """
    if not is_tile_function(func):
        raise TileTypeError(f"decide takes a tile function (with T.Kernel), not {type(func).__name__}")
    machine = read_machine(func)
    if machine is not None and machine != hw.name:
        raise TileTargetError(
            f"the function was decided for {machine} and cannot be decided again for {hw.name}",
            advice="keep the function as it was before decide()",
        )
    check_layouts(func)
    rules = default_rules(hw) if rules is None else rules
    if all(rule.name != "roles" for rule in rules):
        return _decided(func, hw, rules, [])
    log = [entry for entry in read_log(func) if entry[2] == "separate"]
    tried, tiles = separate_tiles(func)
    if tried is not None:
        listed = {name: ", ".join(names) for name, names in tiles.items()}
        chosen = [[name, names, "separate", _SEPARATE, _WHY_SEPARATE] for name, names in listed.items()]
        made = _attempt(lambda: _with_roles(tried, hw, rules, whole, [*log, *chosen]), tiles)
        if not isinstance(made, str):
            return made
        reason = made.splitlines()[0]
        log += [[name, names, "separate", "", f"tried, but {reason}"] for name, names in listed.items()]
    return _with_roles(func, hw, rules, whole, log)


_SEPARATE = "a tile of its own for each loop that fills it"
_WHY_SEPARATE = "the producer loads for the next loop while the last tiles of this one are read"


def _with_roles(func: tirx.PrimFunc, hw, rules: Sequence[Rule], whole: str | None, log: list[list]) -> tirx.PrimFunc:
    """The function decided, with a front and a back where that is possible."""
    if whole is not None:
        log = [*log, *([k.name, "front and back", "split", "", whole] for k in kernel_views(func))]
        return _decided(func, hw, rules, log)
    tried, reasons = split_roles(func, hw)
    log = [*log, *([name, "front and back", "split", "", reason] for name, reason in reasons.items())]
    log += [entry for entry in read_log(func) if entry[2] == "split" and entry[0] not in reasons]
    if tried is not None:
        names = [k.name for k in kernel_views(tried) if k.split]
        chosen = [[name, "front and back", "split", _SPLIT, _WHY] for name in names]
        made = _attempt(lambda: _decided(tried, hw, rules, [*log, *chosen]), names)
        if not isinstance(made, str):
            return made
        log += [[name, "front and back", "split", "", f"tried, but {made}"] for name in names]
    return _decided(func, hw, rules, log)


_SPLIT = "one warpgroup makes the final product's operand, the others accumulate"
_WHY = "the products have the rows of one instruction: warpgroups that share them would wait for each other"


def _attempt(decided: Callable[[], tirx.PrimFunc], names: Collection[str]) -> tirx.PrimFunc | str:
    """A function whose kernels of these names have roles, or why they have none."""
    try:
        made = decided()
    except TileError as error:
        return str(error.message)
    lacking = [k.name for k in kernel_views(made) if k.name in names and not read_roles(k.info.block)]
    return _why_no_roles(made, lacking[0]) if lacking else made


def _why_no_roles(func: tirx.PrimFunc, kernel: str) -> str:
    return next((e[4] for e in read_log(func) if e[0] == kernel and e[2] == "roles"), "the loads need all warps")


def _decided(func: tirx.PrimFunc, hw, rules: Sequence[Rule], log: list[list]) -> tirx.PrimFunc:
    sch = TileSchedule(func)
    check_groups(sch.kernels)
    log = list(log)
    for rule in rules:
        answers = rule.apply(sch, hw)
        log += [_entry(rule, a) for a in (answers if isinstance(answers, Sequence) else [answers])]
    old = {tuple(e[:4]): e for e in read_log(func)}
    log = [old.get(tuple(e[:4]), e) for e in log]
    sch.set_attribute("tile.decisions", log)
    sch.set_attribute("tile.machine", hw.name)
    return sch.finished()


def _entry(rule: Rule, answer) -> list:
    if isinstance(answer, Decision):
        return [answer.kernel, answer.subject, rule.name, answer.text, answer.why] + (
            ["warning"] if answer.warning else []
        )
    if isinstance(answer, NotApplicable):
        return [answer.kernel, answer.subject, rule.name, "", answer.reason]
    raise InternalError(f"rule {rule.name} answered {answer!r}, neither a Decision nor NotApplicable")
