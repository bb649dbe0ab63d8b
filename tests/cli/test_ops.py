"""The command line on the real kernel library: what the README and the demo promise."""

import json

import pytest

from tvm_tile import cli

RUNS = [
    "flash_mla --shape batch=4 kv_len=1000",
    "flash_attention --shape batch=1 heads=8 kv_heads=1 seq=333 dim=96 causal=1 window=100",
    "gemm --shape m=1000 n=1001 k=333 --dtype bfloat16",
]


@pytest.mark.parametrize("run", RUNS)
def test_run(run, capsys):
    assert cli.main(["run", *run.split(), "--target", "llvm", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["result"] == "PASS"
    assert all(output["wrong_elements"] == 0 and output["elements"] > 0 for output in document["outputs"])


def test_the_reference_lowering(capsys):
    shape = "--shape m=33 n=20 k=50".split()
    assert cli.main(["run", "gemm", *shape, "--dtype", "float32", "--target", "llvm", "--lowering", "reference"]) == 0
    assert capsys.readouterr().out.strip().endswith("PASS")


def test_list_and_inspect(capsys):
    assert cli.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name} " in listed for name in ("gemm", "flash_attention", "flash_mla"))
    assert cli.main(["inspect", "flash_mla", "--show", "script", "--shape", "batch=1", "kv_len=256"]) == 0
    script = capsys.readouterr().out
    assert "tile.kernel" in script and "KV_shared" in script


def test_bench_beside_torch(capsys):
    shape = "--shape m=256 n=256 k=256".split()
    assert cli.main(["bench", "gemm", *shape, "--dtype", "float32", "--target", "llvm", "--rounds", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["correct"] and document["results"]["torch"]["ratio"] > 0
