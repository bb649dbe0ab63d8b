"""The renderer of errors, and the exception types."""

import pickle
import subprocess
import sys

import pytest

import tvm_tile
from tvm_tile.errors import InternalError, SourceLocation, TileError, TileShapeError

LINE = "        T.copy(A[0:64], A_shared)"


def test_message_place_caret_and_help():
    error = TileShapeError("shapes differ: 64 and 32", SourceLocation("<kernel>", 12, 9, 15, LINE), "slice A[0:32]")
    assert str(error) == (
        "shapes differ: 64 and 32\n"
        "  --> <kernel>:12:9\n"
        "   |\n"
        "12 |         T.copy(A[0:64], A_shared)\n"
        "   |         ^^^^^^\n"
        "help: slice A[0:32]"
    )


def test_tabs_do_not_move_the_caret():
    error = TileError("m", SourceLocation("<kernel>", 3, 2, 3, "\tx = y"))
    source, caret = str(error).splitlines()[-2:]
    assert source.index("x") == caret.index("^")


def test_source_line_is_read_from_the_file(tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text("first\nsecond line\n")
    assert "2 | second line" in str(TileError("m", SourceLocation(str(path), 2)))


def test_several_pieces_of_advice():
    assert str(TileError("m", advice=["one", "two"])).splitlines()[1:] == ["help: one", "help: two"]


def test_at_keeps_the_first_place():
    first = SourceLocation("a.py", 1)
    error = TileError("m").at(first).at(SourceLocation("b.py", 2))
    assert error.location is first and (error.file, error.line, error.column) == ("a.py", 1, 0)


@pytest.mark.parametrize("kind", [TileShapeError, tvm_tile.CallError, tvm_tile.ToolchainError])
def test_errors_travel_between_processes(kind):
    error = kind("m", SourceLocation("a.py", 3, 1, 2, "x"), "help me")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and str(copy) == str(error)


def test_a_fault_of_ours_is_no_tile_error():
    assert not issubclass(InternalError, TileError)
    assert "fault of tvm_tile" in str(InternalError("bad"))
    assert str(pickle.loads(pickle.dumps(InternalError("bad")))) == str(InternalError("bad"))


def test_import_is_light():
    code = "import sys, tvm_tile; print('tvm' in sys.modules, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="no attribute 'complie'"):
        _ = tvm_tile.complie
