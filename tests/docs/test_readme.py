"""Every code block of the README is run: Python in one namespace from top to bottom, commands one by one."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest

from .readme import ROOT, blocks

README = (ROOT / "README.md").read_text()
BLOCKS = blocks(README)
PYTHON = [b for b in BLOCKS if b.language == "python"]
COMMANDS = [line for b in BLOCKS if b.language == "console" and not b.reason for line in b.text.splitlines()]


def test_every_block_is_accounted_for():
    assert README.count("\n```") == 2 * len(BLOCKS), "an unbalanced fence, or a block the test does not see"
    assert {b.language for b in BLOCKS} == {"python", "console"}
    assert not [b for b in PYTHON if b.reason], "Python blocks are always run"
    assert len(PYTHON) >= 6 and len(COMMANDS) >= 7


def test_python_blocks(tmp_path, monkeypatch):
    # One module, as a reader would type it, with the README's line numbers.
    lines = [""] * len(README.splitlines())
    for block in PYTHON:
        text = block.text.splitlines()
        lines[block.line - 1 : block.line - 1 + len(text)] = text
    path = tmp_path / "readme_blocks.py"
    path.write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="readme_blocks")


def test_the_first_kernel_is_short():
    kernel = next(b.text for b in PYTHON if "def matmul_relu" in b.text)
    body = kernel[kernel.index("def matmul_relu") : kernel.index("return kernel") + 14]
    assert len(body.splitlines()) <= 25


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, tmp_path):
    program, *arguments = shlex.split(command)
    if program == "tvm-tile":
        argv = [sys.executable, "-m", "tvm_tile", *arguments]
    else:
        assert re.fullmatch(r"scripts/\w+\.sh", program), f"say how to test {program}"
        argv = ["bash", str(ROOT / program), *arguments]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TVM_TILE_PYTHON": sys.executable}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    if " run " in command or "demo" in command:
        assert "PASS" in done.stdout


def test_files_that_the_readme_names_exist():
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    for script in re.findall(r"\b(?:scripts|examples|\.ci)/[\w.]+", README):
        assert (ROOT / script).exists(), script


def test_the_table_names_every_primitive():
    import tvm_tile.language as T

    table = README[README.index("## The primitives") : README.index("## Compile")]
    missing = [n for n in T.__all__ if not re.search(rf"\b{n}\b", table) and n not in ("dynamic",)]
    assert not missing


def test_a_wrong_block_fails(tmp_path, monkeypatch):
    planted = blocks("# x\n\n```python\nassert 1 + 1 == 3\n```\n\n<!-- not run: why -->\n```console\nrm\n```\n")
    assert [(b.language, b.line, b.reason) for b in planted] == [("python", 4, None), ("console", 9, "why")]
    with pytest.raises(AssertionError):
        exec(planted[0].text, {})
