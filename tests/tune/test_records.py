"""Which record a shape gets: exact, nearest, default."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tvm_tile
from tvm_tile.errors import TileError
from tvm_tile.ops import registry
from tvm_tile.tune import records, replay
from tvm_tile.tune.apply import choose, with_choice
from tvm_tile.tune.database import read_lines
from tvm_tile.tune.records import Record, lookup

SPEC = registry.get("gemm")
CONFIG = {"block_M": 64, "block_N": 64, "block_K": 32}


def record(machine="box", spec=SPEC, target="cpu", arch="llvm", dtype="float32", seconds=1e-3, config=None, **shape):
    full = spec.identity(shape)
    return Record(
        spec.name, spec.version, full, dtype, target, arch, machine, dict(config or CONFIG), seconds, 2e-3, 5
    )  # fmt: skip


def find(store, machine="box", legal=lambda config: True, spec=SPEC, target="cpu", arch="llvm", **shape):
    return lookup(spec, shape, "float32", target, arch, machine, legal, [store])


def test_exact_before_nearest_before_default(tmp_path):
    records.put(tmp_path, record(m=256, n=256, k=256, config={"block_M": 1}))
    records.put(tmp_path, record(m=512, n=256, k=256, config={"block_M": 2}))
    exact = find(tmp_path, m=256, n=256, k=256)
    assert exact.source == "exact" and exact.config == {"block_M": 1} and "for this shape" in exact.text
    near = find(tmp_path, m=500, n=256, k=256)
    assert near.source == "nearest" and near.config == {"block_M": 2} and "m=512 n=256 k=256" in near.text
    # one size is off by more than a factor of 4, however near the others are
    far = find(tmp_path, m=512 * 4 + 1, n=256, k=256)
    assert far.source == "default" and far.config == {} and "untuned" in far.text
    assert find(tmp_path, m=512 * 4, n=256, k=256).source == "nearest"


def test_open_options_are_not_taken_from_a_near_shape(tmp_path):
    spec = registry.get("flash_mla")
    config = {"block_H": 64, "num_splits": 8}
    records.put(tmp_path, record(spec=spec, batch=8, heads=64, kv_len=4096, num_splits=0, config=config))
    sizes = {"heads": 64, "kv_len": 4096, "num_splits": 0}
    assert find(tmp_path, spec=spec, batch=8, **sizes).config == config
    near = find(tmp_path, spec=spec, batch=32, **sizes)
    assert near.source == "nearest" and near.config == {"block_H": 64}


def test_a_record_that_gained_little_serves_its_own_shape_only(tmp_path):
    records.put(tmp_path, record(m=256, n=256, k=256, seconds=1.95e-3))
    assert find(tmp_path, m=256, n=256, k=256).source == "exact"
    assert find(tmp_path, m=300, n=256, k=256).source == "default"
    records.put(tmp_path, replace(record(m=256, n=256, k=256), default_seconds=None))
    assert find(tmp_path, m=300, n=256, k=256).source == "nearest"


def test_a_tie_goes_to_the_larger_sizes(tmp_path):
    records.put(tmp_path, record(m=128, n=256, k=256, config={"block_M": 1}))
    records.put(tmp_path, record(m=512, n=256, k=256, config={"block_M": 2}))
    assert find(tmp_path, m=256, n=256, k=256).config == {"block_M": 2}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"dtype": "bfloat16"},
        {"target": "sm_80"},
        {"arch": "sm_90a"},
        {"machine": "elsewhere"},
        {"shape": SPEC.identity({"m": 256, "n": 256, "k": 256, "trans_b": False})},
        {"shape": {"nosuch": 1}},
    ],
)
def test_records_of_another_kind_do_not_serve(tmp_path, change):
    other = replace(record(m=256, n=256, k=256), **change)
    records.put(tmp_path, other)
    assert find(tmp_path, m=256, n=256, k=256).source == "default"


def test_a_near_record_must_be_legal_for_the_shape(tmp_path):
    records.put(tmp_path, record(m=256, n=256, k=256, config={"block_M": 1}))
    records.put(tmp_path, record(m=300, n=256, k=256, config={"block_M": 2}))
    found = find(tmp_path, legal=lambda c: c["block_M"] != 2, m=310, n=256, k=256)
    assert found.config == {"block_M": 1}


def test_class_of_attention_is_the_group_not_the_heads(tmp_path):
    spec = registry.get("flash_attention")
    records.put(tmp_path, record(spec=spec, heads=16, kv_heads=4, seq=1024))
    assert find(tmp_path, spec=spec, heads=8, kv_heads=2, seq=1024).source == "nearest"
    assert find(tmp_path, spec=spec, heads=8, kv_heads=8, seq=1024).source == "default"
    assert find(tmp_path, spec=spec, heads=16, kv_heads=4, seq=1024, causal=True).source == "default"


def test_without_the_machine_any_of_the_architecture_serves(tmp_path):
    near = record("b-machine", target="sm_90", arch="sm_90a", m=256, n=256, k=256, config={"block_M": 2})
    records.put(tmp_path, near)
    records.put(tmp_path, replace(near, machine="a-machine", config={"block_M": 1}))
    found = find(tmp_path, None, target="sm_90", arch="sm_90a", m=256, n=256, k=256)
    assert found.source == "exact" and found.config == {"block_M": 1} and "a-machine" in found.text


def test_a_store_holds_one_record_a_workload_and_merge_keeps_the_faster(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    records.put(a, record(m=256, n=256, k=256, seconds=2e-3, config={"block_M": 1}))
    records.put(a, record(m=256, n=256, k=256, seconds=3e-3, config={"block_M": 2}))
    assert [r.config for r in records.all_records(a)] == [{"block_M": 2}]
    records.put(b, record(m=256, n=256, k=256, seconds=1e-3, config={"block_M": 3}))
    records.put(b, record(m=512, n=256, k=256, seconds=9e-3))
    assert records.merge(a, [b]) == 2 and records.merge(a, [b]) == 0
    assert sorted(r.seconds for r in records.all_records(a)) == [1e-3, 9e-3]
    assert records.merge(b, [a]) == 0


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "box" / "gemm" / "best.json"
    path.parent.mkdir(parents=True)
    for text in ("{", '{"format": 7, "records": []}', '{"format": 1, "records": [{"kernel": "gemm"}]}'):
        path.write_text(text)
        with pytest.raises(TileError, match="best.json"):
            records.all_records(tmp_path)


def test_names_of_machines_are_folder_names():
    assert records.slug("NVIDIA H200") == "nvidia-h200"
    assert records.slug("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz") == "intel-xeon-platinum-8481c-cpu"
    assert records.slug("///") == "unknown"


@pytest.fixture
def logs(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_TILE_TUNING_LOGS", str(tmp_path))
    return tmp_path


def test_compile_uses_the_record_and_says_so(logs, caplog):
    shape = {"m": 65, "n": 33, "k": 40}
    records.put(logs, record(records.cpu_name(), **shape, config={"block_M": 32, "block_N": 16, "block_K": 32}))
    with caplog.at_level("INFO", logger="tvm_tile"):
        kernel = tvm_tile.compile("gemm", "llvm", shape=shape, dtype="float32")
    assert kernel.config["block_M"] == 32 and kernel.config["block_N"] == 16
    assert kernel.config_source.startswith("exact: tuned on ")
    assert "gemm m=65 n=33 k=40 float32: tuned on" in caplog.text
    a, b = np.random.default_rng(0).standard_normal((2, 65, 40), "float32")
    c = np.full((65, 33), np.nan, "float32")
    kernel(a, b[:33].copy(), c)
    np.testing.assert_allclose(c, a @ b[:33].T, rtol=1e-4, atol=1e-4)

    near = tvm_tile.compile("gemm", "llvm", shape={**shape, "m": 70}, dtype="float32")
    assert near.config["block_M"] == 32 and near.config_source.startswith("nearest: ")
    other = tvm_tile.compile("gemm", "llvm", shape={**shape, "trans_a": True}, dtype="float32")
    assert other.config_source.startswith("default: ")
    exported = logs / "near.so"
    near.export(exported)
    assert tvm_tile.load(exported).config_source == near.config_source


def test_shape_and_dtype_are_for_names_only():
    func = SPEC.make({"m": 8, "n": 8, "k": 8}, "float32", "llvm")
    with pytest.raises(TileError, match="for an op given by its name"):
        tvm_tile.compile(func, "llvm", shape={"m": 8})
    with pytest.raises(TileError, match=r"unknown op 'gem'[\s\S]*did you mean 'gemm'"):
        tvm_tile.compile("gem", {"m": 8})


def test_open_options_take_the_recorded_value(logs):
    shape = {"m": 16, "n": 16, "k": 128, "split_k": 0}
    config = {"block_M": 16, "block_N": 16, "block_K": 32, "split_k": 4}
    records.put(logs, record(records.cpu_name(), **shape, config=config))
    kernel = tvm_tile.compile("gemm", "llvm", shape=shape, dtype="float32")
    assert [p.name for p in kernel.signature.parameters] == ["A", "B", "Partial", "C"]
    fixed = tvm_tile.compile("gemm", "llvm", shape={**shape, "split_k": 1}, dtype="float32")
    assert fixed.config_source.startswith("default")


def test_records_read_without_tvm(tmp_path):
    import subprocess
    import sys

    records.put(tmp_path, record(m=256, n=256, k=256))
    program = (
        "import sys; from tvm_tile.tune import records; print(len(records.all_records(sys.argv[1])));"
        "assert 'tvm' not in sys.modules and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip() == "1", done.stderr


def test_shipped_records_are_whole():
    for store in records.stores():
        for path in store.glob("*/*/best.json"):
            for entry in records.read(path):
                spec = registry.get(entry.kernel)
                assert entry.shape == json.loads(json.dumps(spec.identity(entry.shape)))
                assert set(entry.config) <= set(spec.tunables) | set(spec.options)
                assert (entry.machine, entry.kernel) == (path.parent.parent.name, path.parent.name)


SHIPPED = Path(__file__).resolve().parents[2] / "tuning_logs"


@pytest.mark.parametrize("shipped", records.all_records(SHIPPED), ids=lambda r: f"{r.machine}-{r.kernel}-{r.trials}")
def test_shipped_records_serve_their_shapes(shipped):
    """They are of the ops as they are now, legal, and found where that GPU is not."""
    spec, target = registry.get(shipped.kernel), tvm_tile.target(shipped.target)
    assert str(target.attrs["arch"]) == shipped.arch
    problem, choice = choose(spec, shipped.shape, shipped.dtype, target, [SHIPPED])
    assert choice.source == "exact" and choice.record == shipped and choice.config == shipped.config
    assert shipped.seconds <= 1.01 * shipped.default_seconds
    _, func = with_choice(problem, choice, {})
    assert str(func.attrs["tile.config_source"]) == f"exact: tuned on {shipped.machine} for this shape"
    # the shape of the record's trials names the same configuration in the database beside it
    folder = SHIPPED / shipped.machine / shipped.kernel
    assert any(t["problem"] == problem.identity for t in read_lines(folder / "trials.jsonl"))
    replayed = [c for f, c, _ in replay(folder, shipped.kernel)]
    assert len(replayed) == sum(r.kernel == shipped.kernel for r in records.all_records(SHIPPED))


def test_compile_uses_a_shipped_record(monkeypatch, tmp_path):
    from tvm_tile.runtime.toolchain import find_nvcc

    if find_nvcc() is None:
        pytest.skip("needs nvcc")
    monkeypatch.chdir(tmp_path)
    shape = {"batch": 4, "heads": 32, "seq": 4096, "dim": 128, "causal": True}
    kernel = tvm_tile.compile("flash_attention", shape, target="sm_90", dtype="bfloat16")
    assert kernel.config_source == "exact: tuned on nvidia-h200 for this shape"
    assert kernel.config["num_stages"] == 3
