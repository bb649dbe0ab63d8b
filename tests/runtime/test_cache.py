"""The disk cache: complete and pure keys, damage, kills, races, pruning."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import tvm

import tvm_tile
from tvm_tile.runtime import cache

from . import kernels

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_TILE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(kernel, value):
    a = np.random.default_rng(3).standard_normal(16, dtype="float32")
    b = np.full(16, np.nan, "float32")
    kernel(a, b)
    np.testing.assert_allclose(b, a + np.float32(value), rtol=1e-6)


def test_second_compile_comes_from_the_cache(folder):
    first = tvm_tile.compile(kernels.constant(1.5), "llvm")
    second = tvm_tile.compile(kernels.constant(1.5), "llvm")
    assert not first.from_cache and second.from_cache
    assert first.signature == second.signature and first.source == second.source and first.ir == second.ir
    run(second, 1.5)
    assert cache.info().entries == 1 and cache.info().folder == str(folder)


def test_cache_off_stores_nothing(folder):
    kernel = tvm_tile.compile(kernels.constant(1.5), "llvm", cache=False)
    run(kernel, 1.5)
    assert cache.info().entries == 0


@pytest.mark.parametrize(
    "other",
    [
        lambda: tvm_tile.compile(kernels.constant(0.1 + 2**-55), "llvm"),
        lambda: tvm_tile.compile(kernels.constant(0.1), "llvm", name="renamed"),
        lambda: tvm_tile.compile(kernels.constant(0.1).with_attr("tile.config", {"block": 1}), "llvm"),
        lambda: tvm_tile.compile(kernels.constant(0.1), tvm.target.Target("llvm")),
        lambda: _with_context({"tirx.disable_assert": True}),
    ],
    ids=["last bit of a constant", "name", "attribute", "target", "pass context"],
)
def test_key_is_complete(folder, other):
    # TL 2791: the key forgets options.
    tvm_tile.compile(kernels.constant(0.1), "llvm")
    assert not other().from_cache
    assert cache.info().entries == 2


def _with_context(config):
    with tvm.transform.PassContext(config=config):
        return tvm_tile.compile(kernels.constant(0.1), "llvm")


def test_lowering_is_part_of_the_key(folder):
    func = kernels.tile_gemm(32, 32, 32)
    tvm_tile.compile(func, "llvm")
    assert not tvm_tile.compile(func, "llvm", lowering="reference").from_cache


def test_extra_parts_are_part_of_the_key(folder, monkeypatch):
    monkeypatch.setattr(cache, "_key_parts", {})
    tvm_tile.compile(kernels.constant(2.0), "llvm")
    cache.add_key_part("rules", lambda: "mine")
    assert not tvm_tile.compile(kernels.constant(2.0), "llvm").from_cache


def test_threads_are_part_of_the_key(folder, monkeypatch):
    tvm_tile.compile(kernels.constant(2.0), "llvm")
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    assert not tvm_tile.compile(kernels.constant(2.0), "llvm").from_cache


KEY_SCRIPT = """
    import sys; sys.path.insert(0, {root!r})
    from tests.runtime import kernels
    import tvm_tile
    from tvm_tile.runtime import cache, compiler
    {before}
    tvm = compiler.prepare_tvm()
    func = kernels.scaled_add().with_attr("global_symbol", "f")
    print(cache.key_of(compiler._key_parts(tvm, func, tvm_tile.target("llvm"), "optimised")))
"""


def _key(before, **environment):
    code = textwrap.dedent(KEY_SCRIPT).format(root=ROOT, before=before)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_key_is_pure():
    # TL 2662: the key depends on what was built before (or on Python's hash seed).
    fixed = "cache.source_fingerprint = lambda: 'fixed'"
    before = f'{fixed}; tvm_tile.compile(kernels.constant(3.0), "llvm", cache=False)'
    assert _key(fixed, PYTHONHASHSEED="1") == _key(before, PYTHONHASHSEED="2")


def test_sources_are_part_of_the_key(tmp_path, monkeypatch):
    import shutil

    package = tmp_path / "tvm_tile"
    shutil.copytree(os.path.join(ROOT, "tvm_tile"), package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "__file__", str(package / "runtime" / "cache.py"))
    fingerprint = cache.source_fingerprint.__wrapped__
    first = fingerprint()
    assert fingerprint() == first
    file = package / "lower" / "__init__.py"
    file.write_text(file.read_text() + "# edited\n")
    second = fingerprint()
    file.rename(file.with_name("renamed.py"))
    assert len({first, second, fingerprint()}) == 3


@pytest.mark.parametrize("file", ["kernel.so", "entry.json", "source.ll"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "empty"])
def test_damaged_entries_are_rebuilt(folder, file, damage):
    tvm_tile.compile(kernels.constant(4.0), "llvm")
    (path,) = folder.glob(f"kernels/*/*/{file}")
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        # A new file rather than the old one changed: this process has the library mapped.
        path.unlink()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 0x55]) + content[middle + 1 :]
        path.write_bytes({"truncate": content[:middle], "flip": flipped, "empty": b""}[damage])
    kernel = tvm_tile.compile(kernels.constant(4.0), "llvm")
    assert not kernel.from_cache
    run(kernel, 4.0)
    assert tvm_tile.compile(kernels.constant(4.0), "llvm").from_cache


BUILD_SCRIPT = """
    import sys; sys.path.insert(0, {root!r})
    from tests.runtime import kernels
    import numpy as np, tvm_tile
    from tvm_tile.runtime import cache, compiler
    {before}
    kernel = tvm_tile.compile(kernels.constant(5.0), "llvm")
    a = np.arange(16, dtype="float32"); b = np.full(16, np.nan, "float32")
    kernel(a, b)
    assert (b == a + 5).all()
    print("right")
"""


def _start(before=""):
    code = textwrap.dedent(BUILD_SCRIPT).format(root=ROOT, before=before)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("where", ["_link", "disk.store_entry", "disk.seal_folder"])
def test_killed_midway(folder, where, monkeypatch):
    # The process dies with -9 inside the build, after files were written; the next one must not see them.
    target = {"_link": "compiler._link", "disk.store_entry": "cache.os.rename", "disk.seal_folder": "cache.seal_folder"}
    name = target[where]
    holder, _, attribute = name.rpartition(".")
    before = (
        f"original = {name}\n"
        "def dies(*args, **kw):\n"
        f"    {'original(*args, **kw)' if where == '_link' else 'pass'}\n"
        "    import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
        f"setattr({holder}, {attribute!r}, dies)"
    )
    process = _start(before)
    out, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, err
    assert "right" not in out
    assert list((folder / "tmp").iterdir())
    assert cache.info().entries == 0
    kernel = tvm_tile.compile(kernels.constant(5.0), "llvm")
    assert not kernel.from_cache
    run(kernel, 5.0)
    for left in (folder / "tmp").iterdir():
        os.utime(left, (time.time() - 2 * cache.ABANDONED_AFTER,) * 2)
    cache.prune()
    assert not list((folder / "tmp").iterdir())


def test_two_processes_at_once(folder, monkeypatch):
    # Our sources may be edited while the tests run: that makes new keys, and is not what is tested here.
    monkeypatch.setattr(cache, "source_fingerprint", lambda: "fixed")
    processes = [_start("cache.source_fingerprint = lambda: 'fixed'") for _ in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and out.strip() == "right", err
    assert cache.info().entries == 1
    assert tvm_tile.compile(kernels.constant(5.0), "llvm").from_cache


def test_the_faster_process_wins(folder):
    # Another process stores the entry between our build and our rename.
    first, second = cache.scratch_folder(), cache.scratch_folder()
    for place, text in ((first, "one"), (second, "two")):
        (place / "kernel.so").write_text(text)
    one = cache.store_entry("ab" * 32, first, {"n": 1})
    two = cache.store_entry("ab" * 32, second, {"n": 2})
    assert one.folder == two.folder and two.data == {"n": 1} and (two.folder / "kernel.so").read_text() == "one"
    assert not second.exists()


def test_prune_removes_the_least_recently_used(folder):
    for value in (1.0, 2.0, 3.0):
        tvm_tile.compile(kernels.constant(value), "llvm")
    entries = {v: tvm_tile.compile(kernels.constant(v), "llvm")._artifacts.folder for v in (1.0, 2.0, 3.0)}
    for age, value in enumerate((2.0, 3.0, 1.0)):
        os.utime(entries[value], (1000 + age,) * 2)
    size = cache.info().bytes
    assert cache.prune(limit=size - 1) == 1
    assert not entries[2.0].exists() and entries[1.0].exists() and entries[3.0].exists()
    assert cache.clear() == 2 and cache.info().entries == 0


def test_size_limit_is_kept(folder, monkeypatch):
    tvm_tile.compile(kernels.constant(1.0), "llvm")
    monkeypatch.setenv("TVM_TILE_CACHE_SIZE_MB", str(cache.info().bytes * 1.5 / 1e6))
    run(tvm_tile.compile(kernels.constant(2.0), "llvm"), 2.0)
    assert cache.info().entries == 1
    monkeypatch.setenv("TVM_TILE_CACHE_SIZE_MB", "lots")
    with pytest.raises(tvm_tile.TileError, match="TVM_TILE_CACHE_SIZE_MB must be a number"):
        cache.prune()


def test_a_kernel_outlives_its_entry(folder):
    kernel = tvm_tile.compile(kernels.constant(6.0), "llvm")
    cache.clear()
    run(kernel, 6.0)


def test_unwritable_folder(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TVM_TILE_CACHE_DIR", str(blocked))
    with pytest.raises(tvm_tile.TileError, match="TVM_TILE_CACHE_DIR"):
        tvm_tile.compile(kernels.constant(7.0), "llvm")
