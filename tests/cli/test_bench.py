"""``tvm-tile bench``: lists of shapes, stored figures, results of peers, pictures."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tvm_tile import cli
from tvm_tile.commands import bench, peers
from tvm_tile.ops import registry

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(capsys):
    def run(*argv):
        code = cli.main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


SMALL = [
    {"op": "gemm", "dtype": "float32", "shape": {"m": 33, "n": 40, "k": 20}},
    {"op": "softmax", "dtype": "float32", "shape": {"rows": 3}, "published": {"other": {"seconds": 1e-3}}},
]


@pytest.mark.parametrize("name", ["default", "short", "cpu"])
def test_the_lists_name_shapes_that_exist(name):
    cases = bench.shape_list(name)
    assert len({json.dumps([c["op"], c["dtype"], c["shape"]]) for c in cases}) == len(cases)
    for case in cases:
        spec = registry.get(case["op"])
        kinds = {key: kind for key, (kind, *_) in spec.shape_params.items()}
        shape = spec.complete({key: kinds[key](value) for key, value in case["shape"].items()})
        assert case["dtype"] in spec.dtypes and spec.flops(shape) > 0


def test_a_list_that_does_not_exist_is_named(tool):
    code, out, err = tool("bench", "--all", "defalt")
    assert code == 1 and "did you mean default?" in err
    assert tool("bench")[0] == 1 and tool("bench", "gemm", "--all")[0] == 1


def test_all_measures_each_shape_and_keeps_the_figures(tool, tmp_path, monkeypatch):
    rows = registry.get("softmax").shape_params
    small = [SMALL[0], {**SMALL[1], "shape": {next(iter(rows)): 3}}]
    monkeypatch.setattr(bench, "shape_list", lambda name: small)
    arguments = ("bench", "--all", "--target", "llvm", "--rounds", "2", "--out", str(tmp_path))
    code, out, err = tool(*arguments)
    assert code == 0, err
    assert out.count("check    PASS") == 2 and "other (published)" in out
    (gemm,) = tmp_path.glob("*/bench/gemm.json")
    (document,) = json.loads(gemm.read_text())
    assert document["correct"] and document["shape"]["m"] == 33 and document["results"]["torch"]["agrees"]
    (softmax,) = tmp_path.glob("*/bench/softmax.json")
    (document,) = json.loads(softmax.read_text())
    result = document["results"]
    expected = result["other (published)"]["seconds"] / result["tvm_tile"]["seconds"]
    assert result["other (published)"] == {
        **result["other (published)"],
        "seconds": 1e-3,
        "ratio": pytest.approx(expected),
    }
    # again: the same problem replaces its figures, another is added
    small[1] = {**SMALL[0], "shape": {"m": 34, "n": 40, "k": 20}}
    assert tool(*arguments)[0] == 0
    assert sorted(d["shape"]["m"] for d in json.loads(gemm.read_text())) == [33, 34]
    assert not list(tmp_path.glob("*/bench/*.tmp"))


def test_one_shape_that_fails_does_not_end_the_list(tool, monkeypatch):
    broken = {"op": "gemm", "dtype": "float32", "shape": {"m": 0, "n": 40, "k": 20}}
    monkeypatch.setattr(bench, "shape_list", lambda name: [broken, SMALL[0]])
    code, out, err = tool("bench", "--all", "--target", "llvm", "--rounds", "1", "--peers", "torch")
    assert code == 1 and "m=0 n=40 k=20: " in err and out.count("check    PASS") == 1


def test_published_times_are_scaled_by_the_product_of_the_run():
    def document(op, shape, seconds, tflops, published):
        own = {"seconds": seconds, "tflops": tflops}
        return {
            "op": op, "dtype": "bfloat16", "shape": shape, "published": published,
            "results": {"tvm_tile": own, "torch": dict(own)},
        }  # fmt: skip

    square = document("gemm", {"m": 8192, "n": 8192, "k": 8192}, 1.0, 500.0, {})
    other = document("flash_mla", {"batch": 1}, 4e-3, None, {"FlashMLA": {"seconds": 1e-3, "gemm_tflops": 1000}})
    bench._scale_published([other, square])
    # this chip runs at half the speed: 1 ms there is 2 ms here
    result = other["results"]["FlashMLA (published)"]
    assert result["seconds"] == pytest.approx(2e-3) and result["ratio"] == pytest.approx(0.5)


def test_a_peer_whose_result_is_wrong_is_marked(tool, monkeypatch):
    spec = registry.get("gemm")
    wrong = {"wrong": lambda shape, dtype, t: lambda: t[0] @ t[1].T + 1}
    monkeypatch.setattr(type(spec), "peers", property(lambda self: wrong))
    _, out, _ = tool("bench", "gemm", "--shape", "m=8", "n=8", "k=8", "--target", "llvm", "--rounds", "1")
    assert "its result is outside the tolerance" in out


def test_results_of_peers_are_laid_out_like_the_output():
    like = torch.randn(2, 5, 3, 4)
    there = torch.randn(2, 3, 5, 4)
    assert torch.equal(peers.aligned(there, like), there.transpose(1, 2))
    assert torch.equal(peers.aligned((like, 1), like), like)
    assert peers.aligned(torch.empty(2, 15, 4), like).shape == like.shape
    assert peers.aligned(torch.empty(3), like) is None and peers.aligned(None, like) is None


def test_a_gpu_has_more_peers():
    spec = registry.get("flash_attention")
    assert set(peers.peers_of(spec, "cpu")) == set(spec.peers)
    assert {"cudnn", "flex", "triton"} <= set(peers.peers_of(spec, "cuda"))
    assert {"triton", "torch_fast_accum"} <= set(peers.peers_of(registry.get("gemm"), "cuda"))


def test_triton_kernels_in_its_interpreter():
    pytest.importorskip("triton")
    code = """
import torch
from tvm_tile.commands import peers_triton
g = torch.Generator().manual_seed(0)
a, b = (torch.randn(n, 136, generator=g).half() for n in (200, 300))
c = torch.full((200, 300), float("nan")).half()
peers_triton.matmul(a, b, c)
torch.testing.assert_close(c.float(), a.float() @ b.float().T, rtol=2e-3, atol=2e-2)
q, k, v = (torch.randn(1, n, 2, 64, generator=g).half() for n in (100, 200, 200))
for causal in (False, True):
    out = torch.full_like(q, float("nan"))
    peers_triton.attention(q, k, v, out, causal)
    mask = torch.ones(100, 200, dtype=torch.bool).tril(100) if causal else None
    want = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2).float() for t in (q, k, v)), mask)
    torch.testing.assert_close(out.float(), want.transpose(1, 2), rtol=2e-3, atol=2e-3)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment
    )
    assert result.returncode == 0, result.stderr[-2000:]


def _plotter():
    spec = importlib.util.spec_from_file_location("plot_bench", ROOT / "scripts" / "plot_bench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bars_are_shares_of_the_fastest():
    plot = _plotter()
    document = {"results": {"tvm_tile": {"seconds": 2.0}, "torch": {"seconds": 1.0}}}
    assert plot.shares(document) == {"tvm_tile": 0.5, "torch": 1.0}


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    folder = ROOT / "tuning_logs" / "nvidia-h200" / "bench"
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "plot_bench.py"), str(folder), "--out", str(tmp_path)],
        check=True, timeout=120,
    )  # fmt: skip
    assert {p.stem for p in tmp_path.glob("*.png")} == {f"bench_{p.stem}" for p in folder.glob("*.json")}


def test_stored_figures_can_be_drawn():
    plot = _plotter()
    for file in sorted((ROOT / "tuning_logs").glob("*/bench/*.json")):
        for document in json.loads(file.read_text()):
            assert document["correct"] and plot.label(document) and max(plot.shares(document).values()) == 1


def test_other_tunables_beside(tool):
    """The same kernel with another depth is a peer; one that is refused is skipped with the reason."""
    shape = ("--shape", "m=64", "n=64", "k=64", "--dtype", "float32", "--config", "block_M=32")
    code, out, err = tool(
        "bench", "gemm", *shape, "--target", "llvm", "--rounds", "2", "--peers", "--json", "--beside", "num_stages=0",
        "--beside", "block_N=32", "num_stages=1", "--beside", "threads=77",
    )  # fmt: skip
    assert code == 0, err
    document = json.loads(out)
    assert set(document["results"]) == {"tvm_tile", "num_stages=0", "block_N=32,num_stages=1"} | (
        {"threads=77"} - set(document["skipped"])
    )
    for name, result in document["results"].items():
        assert result["agrees"] and result["ratio"] > 0, name
    assert document["config"]["block_M"] == 32
