"""Every script under ``examples/`` runs and prints PASS."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def test_there_are_examples():
    names = {path.stem for path in EXAMPLES}
    assert {"quickstart", "gemm", "flash_attention", "flash_mla", "relax_module"} <= names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, capsys):
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    assert not stop.value.code, capsys.readouterr().out
    assert capsys.readouterr().out.splitlines()[-1] == "PASS"
