"""The commands, on a small registry of the test's own; the real ops are run by the ops' tests and the demo."""

import json
import subprocess
import sys

import pytest
import torch

import tvm_tile
from tests.runtime import kernels
from tvm_tile import cli
from tvm_tile.ops import registry as real
from tvm_tile.ops.registry import OpSpec


class Scale(OpSpec):
    """C = A + B * 3, by rows."""

    name = "scale"
    doc = "A + 3 B by rows"
    shape_params = {
        "rows": (int, 8, "rows of A"),
        "flip": (bool, False, "multiply by -3"),
        "copies": (int, 0, "0 leaves it open"),
    }
    dtypes = ["float32", "float64"]
    tunables = {"width": [128]}
    options = {"copies": [1, 2]}
    wrong = False

    def complete(self, shape=None):
        out = super().complete(shape)
        return {**out, "copies": out["copies"] or 1}

    def defaults(self, shape, dtype, target):
        return {"width": 128}

    def build(self, shape, dtype, target, *, width):
        assert target == "cpu" and shape["copies"] in (1, 2)
        return kernels.scaled_add(width, dtype)

    def arguments(self, shape, dtype, generator):
        assert shape["copies"] in (1, 2)
        kind = getattr(torch, dtype)
        a = torch.randn(shape["rows"], 128, generator=generator, dtype=kind)
        b = torch.randn(128, generator=generator, dtype=kind)
        return [a, b, -3 if shape["flip"] else 3, torch.full_like(a, float("nan"))], [3]

    def inputs(self, shape, dtype, device="cpu", generator=None):
        return self.arguments(self.complete(shape), dtype, generator)

    def expected(self, shape, dtype, tensors):
        a, b, s, _ = tensors
        return [a + b * s + (1 if self.wrong else 0)]

    def tolerance(self, shape, dtype):
        return 1e-5, 1e-5

    def flops(self, shape):
        return 2 * shape["rows"] * 128

    def bytes(self, shape, dtype):
        return shape["rows"] * 128 * 8


class Broken(Scale):
    """The same with a reference that differs."""

    name = "broken"
    wrong = True


def failing_peer(shape, dtype, tensors):
    raise RuntimeError("not on this machine")


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    scale, broken = Scale(), Broken()
    scale.peers = {"torch": lambda shape, dtype, t: lambda: t[0] + t[1] * t[2], "absent": failing_peer}
    specs = {"scale": scale, "broken": broken}
    monkeypatch.setattr(real, "names", lambda: list(specs))
    monkeypatch.setattr(real, "get", specs.__getitem__)
    return specs


@pytest.fixture
def tool(capsys):
    def run(*argv):
        code = cli.main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_run_passes(tool):
    code, out, err = tool("run", "scale", "--shape", "rows=5", "flip=1", "--target", "llvm")
    assert code == 0 and err == ""
    lines = out.strip().splitlines()
    assert lines[-1] == "PASS" and any(line.startswith("shape    rows=5 flip=1") for line in lines)
    assert any(line.startswith("target   llvm") for line in lines) and any("absolute" in line for line in lines)


def test_run_fails_with_its_exit_code(tool):
    code, out, _ = tool("run", "broken", "--target", "llvm")
    assert code == 1 and out.strip().splitlines()[-1] == "FAIL"
    assert "1024 of 1024 elements outside the tolerance" in out


def test_run_json(tool):
    code, out, _ = tool("run", "scale", "--shape", "rows=3", "--dtype", "float64", "--json", "--target", "llvm")
    document = json.loads(out)
    assert code == 0 and document["result"] == "PASS" and document["dtype"] == "float64"
    assert document["shape"] == {"rows": 3, "flip": False, "copies": 1}
    assert document["outputs"][0]["wrong_elements"] == 0 and document["seconds"] > 0 and document["tflops"] > 0


@pytest.mark.parametrize(
    "argv, message",
    [
        (["run", "scal"], "did you mean scale?"),
        (["run", "nothing"], "the ops are: scale, broken"),
        (["run", "scale", "--shape", "row=3"], "did you mean rows?"),
        (["run", "scale", "--shape", "rows"], "--shape takes KEY=VALUE, not 'rows'"),
        (["run", "scale", "--shape", "rows=x"], "--shape rows=x: it must be of type int"),
        (["run", "scale", "--shape", "flip=maybe"], "it is a switch"),
        (["run", "scale", "--shape", "rows=1", "rows=2"], "rows is given twice"),
        (["run", "scale", "--dtype", "float16"], "it has: float32, float64"),
        (["run", "scale", "--target", "sm_9"], "did you mean 'sm_90'?"),
        (["run", "scale", "--config", "depth=3"], "scale has no tunable 'depth'"),
        (["bench", "scale", "--peers", "toch"], "did you mean torch?"),
        (["bench", "scale", "--rounds", "0"], "--rounds must be at least 1"),
        (["tune"], "name one op, or --all"),
        (["tune", "scale", "--resume", "--restart"], "--resume and --restart exclude each other"),
        (["tune", "--all", "nosuch"], "there is no list of shapes 'nosuch'"),
        (["log", "show", "--out", "/nonexistent"], "there is no store /nonexistent"),
        (["list", "scal"], "did you mean scale?"),
    ],
)
def test_wrong_usage_is_explained(tool, argv, message):
    code, out, err = tool(*argv)
    assert code == 1 and out == "" and message in err and err.startswith("error: ")


def test_cuda_kernels_need_a_gpu_to_run(tool, monkeypatch):
    from tvm_tile.runtime import targets

    monkeypatch.setattr(targets, "gpu_arch", lambda: None)
    code, _, err = tool("run", "scale", "--target", "sm_90")
    assert code == 1 and "there is no CUDA GPU" in err and "inspect or export" in err


def test_open_options_are_decided_for_kernel_and_inputs_alike(tool):
    _, out, _ = tool("run", "scale", "--target", "llvm", "--json")
    assert json.loads(out)["shape"]["copies"] == 1
    code, out, _ = tool("run", "scale", "--target", "llvm", "--config", "copies=2", "width=128", "--json")
    document = json.loads(out)
    assert code == 0 and document["shape"]["copies"] == 2 and document["config"] == {"width": 128}


def test_list(tool):
    _, out, _ = tool("list")
    assert out.splitlines() == ["scale   A + 3 B by rows", "broken  A + 3 B by rows"]
    _, out, _ = tool("list", "scale")
    assert "rows    rows of A (int, default 8)" in out and "float32, float64" in out
    _, out, _ = tool("list", "--json")
    assert [op["name"] for op in json.loads(out)["ops"]] == ["scale", "broken"]


def test_bench(tool):
    code, out, _ = tool("bench", "scale", "--target", "llvm", "--rounds", "3", "--json")
    document = json.loads(out)
    assert code == 0 and document["correct"] and set(document["results"]) == {"tvm_tile", "torch"}
    assert document["results"]["tvm_tile"]["ratio"] == 1.0 and document["results"]["torch"]["ratio"] > 0
    assert all(r["seconds"] > 0 and r["tflops"] > 0 for r in document["results"].values())
    assert document["skipped"] == {"absent": "not on this machine"}
    code, out, _ = tool("bench", "scale", "--target", "llvm", "--rounds", "1", "--peers", "torch")
    assert code == 0 and "check    PASS" in out and "speed of tvm_tile" in out and "absent" not in out


def test_bench_of_a_wrong_kernel_fails(tool):
    code, out, _ = tool("bench", "broken", "--target", "llvm", "--rounds", "1")
    assert code == 1 and "check    FAIL" in out


def test_inspect(tool):
    code, out, _ = tool("inspect", "scale", "--target", "llvm")
    assert code == 0 and "signature  scaled_add(" in out and "worker threads" in out
    _, out, _ = tool("inspect", "scale", "--show", "script")
    assert "@T.prim_func" in out
    _, out, _ = tool("inspect", "scale", "--show", "source", "--target", "llvm")
    assert "define" in out and "scaled_add" in out
    code, _, err = tool("inspect", "scale", "--show", "ptx", "--target", "llvm")
    assert code == 1 and "PTX is a GPU's" in err


def test_export(tool, tmp_path):
    path = tmp_path / "scale.so"
    code, out, _ = tool("export", "scale", "--shape", "rows=3", "--target", "llvm", "-o", str(path))
    assert code == 0 and str(path) in out
    a, c = torch.randn(3, 128), torch.full((3, 128), float("nan"))
    tvm_tile.load(path)(a, a[0].contiguous(), 3, c)
    torch.testing.assert_close(c, a + a[0] * 3)


def test_cache(tool, tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_TILE_CACHE_DIR", str(tmp_path))
    tool("run", "scale", "--target", "llvm")
    _, out, _ = tool("cache", "--json")
    assert json.loads(out)["entries"] == 1 and json.loads(out)["folder"] == str(tmp_path)
    _, out, _ = tool("cache", "prune", "--limit-mb", "1000")
    assert out.startswith("removed 0 kernels")
    _, out, _ = tool("cache", "clear")
    assert out.startswith("removed 1 kernels") and ": 0 kernels" in out


def test_doctor(tool, monkeypatch):
    from tvm_tile.runtime import toolchain, tvm_setup

    code, out, _ = tool("doctor", "--json")
    document = json.loads(out)
    names = {f["name"]: f for f in document["findings"]}
    assert code == 0 and document["ok"] and {"apache-tvm", "nvcc", "CPU", "kernel cache"} <= set(names)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    monkeypatch.setattr(tvm_setup, "package_version", {"apache-tvm": "0.1"}.get)
    code, out, _ = tool("doctor")
    assert code == 1 and "MISSING" in out and "-> pip install 'apache-tvm==" in out and "nvidia-cuda-nvcc" in out


def test_python_dash_m():
    result = subprocess.run([sys.executable, "-m", "tvm_tile", "--version"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stdout.strip() == f"tvm_tile {tvm_tile.__version__}"
    result = subprocess.run([sys.executable, "-m", "tvm_tile"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and "usage: tvm-tile" in result.stderr


@pytest.mark.parametrize(
    "have, want, good",
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([float("nan"), 2.0], [1.0, 2.0], False),
        ([float("nan"), 2.0], [float("nan"), 2.0], True),
        ([1.0, float("inf")], [1.0, 2.0], False),
        ([1.0, float("-inf")], [1.0, float("-inf")], True),
        ([1.0, float("inf")], [1.0, float("-inf")], False),
        ([1.0, 1e30], [1.0, float("inf")], False),
        ([1.0], [float("nan")], False),
        ([1.001], [1.0], True),
        ([1.1], [1.0], False),
    ],
)
def test_compare(have, want, good):
    from tvm_tile.ops.compare import compare

    assert compare([torch.tensor(have)], [torch.tensor(want)], (1e-2, 0.0))[0] is good


def test_bench_ratio_is_the_peers_time_over_ours(registry, tool):
    import time

    def slow(shape, dtype, tensors):
        return lambda: time.sleep(0.02)

    registry["scale"].peers = {"slow": slow}
    _, out, _ = tool("bench", "scale", "--target", "llvm", "--rounds", "3", "--json")
    results = json.loads(out)["results"]
    assert results["slow"]["seconds"] == pytest.approx(0.02, rel=0.5)
    assert results["slow"]["ratio"] > 20
