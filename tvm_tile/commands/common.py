"""What the commands share: options, look-up of ops, shapes and dtypes with suggestions, output."""

from __future__ import annotations

import argparse
import difflib
import importlib.resources
import importlib.util
import json
import sys
from dataclasses import dataclass
from typing import Any

from ..errors import TileError

__all__ = [
    "Prepared",
    "add_op_options",
    "choose",
    "describe_shape",
    "emit",
    "find_op",
    "importable",
    "named_list",
    "need_torch",
    "parse_assignments",
    "prepare",
    "resolve_dtype",
    "resolve_shape",
    "resolve_tunables",
    "suggestion",
]


def add_op_options(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """OP (``optional``: it may be left out), ``--shape``, ``--dtype``, ``--target``, ``--config`` and ``--json``."""
    parser.add_argument("op", metavar="OP", nargs="?" if optional else None, help="an op of `tvm-tile list`")
    parser.add_argument(
        "--shape", nargs="*", default=[], action="extend", metavar="K=V", help="sizes and options of the op"
    )
    parser.add_argument("--dtype", help="element type (default: the op's first)")
    parser.add_argument("--target", default="auto", help="auto, llvm, cuda, sm_80 or sm_90 (default: auto)")
    parser.add_argument(
        "--config", nargs="*", default=[], action="extend", metavar="K=V", help="tunable parameters of the kernel"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def suggestion(given: str, known: list[str], what: str) -> list[str]:
    """Advice for a name that does not exist: the nearest one, and all there are."""
    near = difflib.get_close_matches(given, known, 1)
    advice = [f"did you mean {near[0]}?"] if near else []
    return [*advice, f"{what}: {', '.join(known)}"]


def find_op(name: str):
    """The registered op of that name, or an error that lists what exists."""
    from ..ops import registry

    known = list(registry.names())
    if name not in known:
        raise TileError(f"there is no op named {name!r}", advice=suggestion(name, known, "the ops are"))
    return registry.get(name)


def parse_assignments(pairs: list[str], option: str) -> dict[str, str]:
    """``["m=4", "n=8"]`` -> ``{"m": "4", "n": "8"}``."""
    result: dict[str, str] = {}
    for pair in pairs:
        for part in pair.split(","):
            key, equals, value = part.partition("=")
            if not equals or not key.strip() or not value.strip():
                raise TileError(f"{option} takes KEY=VALUE, not {part!r}", advice=f"for example {option} m=1024 n=512")
            if key.strip() in result:
                raise TileError(f"{option}: {key.strip()} is given twice")
            result[key.strip()] = value.strip()
    return result


def _convert(value: str, kind: type, key: str, option: str) -> Any:
    lowered = value.lower()
    if kind is bool:
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off"):
            return False
        raise TileError(f"{option} {key}={value}: it is a switch", advice="use 1 or 0")
    if lowered in ("none", "null"):
        return None
    try:
        return kind(value)
    except ValueError:
        raise TileError(f"{option} {key}={value}: it must be of type {kind.__name__}") from None


def resolve_shape(spec, pairs: list[str]) -> dict[str, Any]:
    """The op's default shape with the given values put in, each of its declared type."""
    shape = {key: default for key, (_, default, _) in spec.shape_params.items()}
    for key, value in parse_assignments(pairs, "--shape").items():
        if key not in spec.shape_params:
            known = list(spec.shape_params)
            raise TileError(f"{spec.name} has no shape parameter {key!r}", advice=suggestion(key, known, "it has"))
        shape[key] = _convert(value, spec.shape_params[key][0], key, "--shape")
    return shape


def resolve_dtype(spec, dtype: str | None) -> str:
    """The dtype asked for, checked against the op's, or its default."""
    if dtype is None:
        return spec.dtypes[0]
    short = {"bf16": "bfloat16", "f16": "float16", "fp16": "float16", "half": "float16", "f32": "float32"}
    full = short.get(dtype, dtype)
    if full not in spec.dtypes:
        raise TileError(f"{spec.name} has no dtype {dtype!r}", advice=suggestion(full, list(spec.dtypes), "it has"))
    return full


def resolve_tunables(pairs: list[str]) -> dict[str, Any]:
    """Values of ``--config``: integers and switches as such, the rest as text."""
    result: dict[str, Any] = {}
    for key, value in parse_assignments(pairs, "--config").items():
        lowered = value.lower()
        if lowered in ("true", "false"):
            result[key] = lowered == "true"
        else:
            try:
                result[key] = int(value)
            except ValueError:
                result[key] = value
    return result


@dataclass
class Prepared:
    """An op as the command line asks for it: complete shape, dtype, target and the kernel's function."""

    spec: Any
    shape: dict[str, Any]
    dtype: str
    target: Any
    function: Any


def prepare(arguments: argparse.Namespace, target=None) -> Prepared:
    """Look up the op, convert and complete its shape, and make its function with the best known configuration.

    Parameters
    ----------
    arguments : argparse.Namespace
        With the options of :func:`add_op_options`.
    target : tvm.target.Target, optional
        Already resolved; else ``--target`` is.
    """
    from ..runtime.targets import target as resolve
    from ..tune.apply import choose as best_known
    from ..tune.apply import with_choice

    spec = find_op(arguments.op)
    shape = resolve_shape(spec, arguments.shape)
    dtype = resolve_dtype(spec, arguments.dtype)
    tunables = resolve_tunables(arguments.config)
    target = resolve(arguments.target) if target is None else target
    # Options that the shape leaves open change the tensors of a call: decide them once, for kernel and inputs alike.
    problem, choice = best_known(spec, shape, dtype, target)
    shape, function = with_choice(problem, choice, tunables)
    return Prepared(spec, shape, dtype, target, function)


def describe_shape(shape: dict[str, Any]) -> str:
    """``m=4 n=8``, without the options that are off."""
    return " ".join(f"{k}={int(v) if isinstance(v, bool) else v}" for k, v in shape.items() if v is not None)


def choose(target: str):
    """(TVM target, torch device) of ``--target``; a CUDA target needs a GPU here to run."""
    from ..errors import TileTargetError
    from ..runtime.targets import gpu_arch
    from ..runtime.targets import target as resolve

    resolved = resolve(target)
    if resolved.kind.name != "cuda":
        return resolved, "cpu"
    if gpu_arch() is None:
        raise TileTargetError(
            f"{target} kernels cannot run here: there is no CUDA GPU",
            advice="use --target llvm, or compile without running: tvm-tile inspect or export",
        )
    return resolved, "cuda"


def need_torch():
    """Import torch, whose tensors the ops' inputs and references are."""
    try:
        import torch
    except ImportError:
        raise TileError("this command needs torch", advice="pip install torch") from None
    return torch


def named_list(package: str, file: str, name: str) -> list[dict]:
    """A list of shapes for ``--all``, by its name in a JSON file of a package."""
    lists = json.loads(importlib.resources.files(package).joinpath(file).read_text())
    if name not in lists:
        raise TileError(f"there is no list of shapes {name!r}", advice=suggestion(name, list(lists), "there are"))
    return lists[name]


def importable(name: str) -> bool:
    """Whether a package is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def emit(arguments: argparse.Namespace, document: dict[str, Any], lines: list[str]) -> None:
    """Print the JSON document with ``--json``, else the lines."""
    if arguments.json:
        json.dump(document, sys.stdout, indent=2, default=str)
        print()
    else:
        print("\n".join(lines))
