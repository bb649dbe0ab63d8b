"""Golden error messages: type, text, file, line, caret and advice of one mistake of each kind.

``golden/*.txt`` holds the kernel and, below the line ``=== error ===``, the error as the user sees it. Set
``TVM_TILE_UPDATE_GOLDEN=1`` to write the files anew; review the diff.
"""

from __future__ import annotations

import importlib
import linecache
import os
import pathlib
import subprocess
import sys
import traceback

import pytest

import tvm_tile

FOLDER = pathlib.Path(__file__).parent / "golden"
CASES = sorted(path.stem for path in FOLDER.glob("*.txt"))
SEPARATOR = "=== error ===\n"


def raised_by(name: str, source: str) -> BaseException:
    """The exception that executing a kernel's source raises."""
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    with pytest.raises(Exception) as info:
        exec(compile(source, file, "exec"), {"__name__": f"golden_{name}"})
    return info.value


@pytest.mark.parametrize("name", CASES)
def test_message(name):
    path = FOLDER / f"{name}.txt"
    source, _, expected = path.read_text().partition(SEPARATOR)
    error = raised_by(name, source)
    actual = f"{type(error).__name__}: {error}\n"
    if os.environ.get("TVM_TILE_UPDATE_GOLDEN"):
        path.write_text(source + SEPARATOR + actual)
        return
    assert actual == expected
    assert isinstance(error, tvm_tile.TileError), "a mistake of the user, not a fault of ours"
    assert "\nhelp: " in actual, "every error says what to change"
    assert error.line is not None and error.file == f"<{name}>"
    # the user's traceback is short: the call, the decorator, and nothing of the parser
    frames = traceback.extract_tb(error.__traceback__)
    assert len([f for f in frames if "tvm" in f.filename]) <= 2, frames
    assert error.__suppress_context__ or error.__context__ is None


def test_there_are_enough_of_them():
    assert len(CASES) >= 40


def test_uncaught_error_shows_place_and_advice(tmp_path):
    # TVM installs an excepthook of its own that hides parse errors
    script = tmp_path / "script.py"
    script.write_text(
        "import tvm_tile.language as T\n\n\n"
        "@T.prim_func\n"
        'def kernel(A: T.Tensor((8,), "float32")):\n'
        "    with T.Kernel(1, threads=32) as bx:\n"
        "        T.cpy(A, A)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "script.py:7:9" in done.stderr and "^^^^^" in done.stderr and "help: did you mean T.copy?" in done.stderr
    assert len(done.stderr.splitlines()) < 25, done.stderr


def test_exception_in_the_users_own_helper_is_kept_as_the_cause(tmp_path):
    source = (
        "import tvm_tile.language as T\n"
        "def helper(n):\n"
        "    return 10 // n\n"
        "@T.prim_func\n"
        'def kernel(A: T.Tensor((8,), "float32")):\n'
        "    with T.Kernel(1, threads=32) as bx:\n"
        "        A[0] = helper(0)\n"
    )
    file = tmp_path / "helped.py"
    file.write_text(source)
    with pytest.raises(tvm_tile.TileSyntaxError, match="ZeroDivisionError") as info:
        exec(compile(source, str(file), "exec"), {"__name__": "helped"})
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    assert [f.name for f in traceback.extract_tb(info.value.__cause__.__traceback__)] == ["helper"]


def test_error_inside_a_macro_names_the_call(tmp_path):
    source = (
        "import tvm_tile.language as T\n"
        "@T.macro\n"
        "def load(source, tile):\n"
        "    T.copy(source[0:4], tile)\n"
        "@T.prim_func\n"
        'def kernel(A: T.Tensor((8,), "float32")):\n'
        "    with T.Kernel(1, threads=32) as bx:\n"
        '        tile = T.alloc_shared((8,), "float32")\n'
        "        load(A, tile)\n"
    )
    file = tmp_path / "called.py"
    file.write_text(source)
    with pytest.raises(tvm_tile.TileShapeError) as info:
        exec(compile(source, str(file), "exec"), {"__name__": "called"})
    assert info.value.line == 4 and "in the macro load, called at called.py:9" in info.value.message


def test_a_fault_of_ours_is_no_tile_error(monkeypatch):
    module = importlib.import_module("tvm_tile.language.copy")
    monkeypatch.setattr(module, "B", object())  # an attribute that a line of ours does not find
    source = FOLDER.joinpath("copy_shapes.txt").read_text().partition(SEPARATOR)[0].replace("0:16", "0:32")
    error = raised_by("planted", source)
    assert isinstance(error, tvm_tile.InternalError) and "please report" in str(error) and "planted" in str(error)


@pytest.mark.parametrize("names", ["n m-1", "", 3])
def test_names_of_dimensions(names):
    with pytest.raises(tvm_tile.TileSyntaxError, match="T.dynamic takes names"):
        tvm_tile.T.dynamic(names)


def test_primitives_outside_of_a_kernel_say_so():
    with pytest.raises(tvm_tile.TileSyntaxError, match="@T.prim_func"):
        tvm_tile.T.copy(1, 2)
    with pytest.raises(tvm_tile.TileSyntaxError, match="decorates a function"):
        tvm_tile.T.prim_func(5)
