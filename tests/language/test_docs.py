"""Every docstring example of the language is run, and every public function has one."""

import doctest
import importlib
import inspect
import pkgutil
import sys

import numpy as np
import pytest

import tvm_tile
import tvm_tile.language as T

MODULES = ["tvm_tile.language", "tvm_tile.ir"]
NO_EXAMPLE = {"GemmWarpPolicy"}  # its method has one


def examples():
    """(name, DocTest) of every docstring with examples."""
    finder = doctest.DocTestFinder(exclude_empty=True, recurse=True)
    for package in MODULES:
        module = importlib.import_module(package)
        names = [package, *(f"{package}.{m.name}" for m in pkgutil.iter_modules(module.__path__))]
        for name in names:
            importlib.import_module(name)
            module = sys.modules[name]  # `from . import copy` would give the function of that name
            for test in finder.find(module, name, module=module, globs={}):
                if test.examples:
                    yield test


TESTS = list(examples())


@pytest.mark.parametrize("test", TESTS, ids=lambda t: t.name)
def test_example(test):
    test.globs = {"T": T, "np": np, "tvm_tile": tvm_tile, "__name__": "documentation"}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)


@pytest.mark.parametrize("name", sorted(set(T.__all__) - NO_EXAMPLE))
def test_public_function_is_documented(name):
    doc = inspect.getdoc(getattr(T, name)) or ""
    assert "Examples\n--------" in doc, f"T.{name} has no example"
    assert doc.splitlines()[0].endswith((".", ":")), doc.splitlines()[0]
    parameters = [p for p in inspect.signature(getattr(T, name)).parameters if p not in ("self",)]
    assert not parameters or "Parameters\n----------" in doc or "Parameters as in" in doc, f"T.{name}: parameters"


def test_a_wrong_example_fails():
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "planted", None, 0)
    with pytest.raises(AssertionError):
        test_example(test)
