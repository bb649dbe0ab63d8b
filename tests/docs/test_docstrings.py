"""Every example in a docstring is run (those of the language and its IR by ``tests/language/test_docs.py``)."""

from __future__ import annotations

import doctest
import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import tvm_tile
import tvm_tile.language as T

ELSEWHERE = ("tvm_tile.language", "tvm_tile.ir.")
ROOT = Path(tvm_tile.__file__).parent


def modules():
    """Names of the package's modules whose text has an example."""
    for path in sorted(ROOT.rglob("*.py")):
        if ">>> " not in path.read_text():
            continue
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not name.startswith(ELSEWHERE):
            yield name


def examples():
    """Every docstring with examples."""
    finder = doctest.DocTestFinder(exclude_empty=True, recurse=True)
    for name in modules():
        importlib.import_module(name)
        module = sys.modules[name]
        for test in finder.find(module, name, module=module, globs={}):
            if test.examples:
                yield test


TESTS = list(examples())


@pytest.mark.parametrize("test", TESTS, ids=lambda t: t.name)
def test_example(test):
    test.globs = {"T": T, "np": np, "tvm_tile": tvm_tile, "__name__": "documentation", **vars(sys.modules[_home(test)])}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)


def _home(test) -> str:
    name = test.name
    while name not in sys.modules:
        name = name.rpartition(".")[0]
    return name


def test_there_are_examples_of_the_public_calls():
    names = {t.name for t in TESTS}
    assert {"tvm_tile.runtime.compiler.compile", "tvm_tile.runtime.loader.load", "tvm_tile.runtime.targets.target",
            "tvm_tile.schedule.explain.explain", "tvm_tile.simulate.tile.simulate"} <= names  # fmt: skip


@pytest.mark.parametrize("name", [n for n in tvm_tile.__all__ if n[0].islower() or n in ("Kernel",)])
def test_public_names_are_documented(name):
    doc = getattr(tvm_tile, name).__doc__ or ""
    assert re.match(r"\S.+[.:]$", doc.strip().splitlines()[0]), f"tvm_tile.{name}: {doc[:80]!r}"
