#!/usr/bin/env python3
"""Bars of ``tvm-tile bench``: ``scripts/plot_bench.py tuning_logs/nvidia-h200/bench --out docs/img``.

One picture an op, ``bench_<op>.png``: the speed of tvm_tile and of its peers for each shape, as a share of the
fastest. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

OWN = "tvm_tile"
COLOURS = {
    OWN: "#c1272d", "torch": "#4477aa", "cudnn": "#228833", "torch_flash": "#ccbb44", "flex": "#66ccee",
    "triton": "#aa3377", "torch_fast_accum": "#99bbdd",
}  # fmt: skip
OTHER = "#bbbbbb"
#: Shape parameters that a label leaves out where they are at these values.
USUAL = {
    "trans_a": False, "trans_b": True, "bias": False, "scaled": False, "split_k": 1, "packed": False, "ragged": False,
    "varlen": False, "causal": False, "dim": None, "pe_dim": None, "num_splits": None,
}  # fmt: skip


def label(document: dict) -> str:
    """A shape in a few words."""
    shape, dtype = document["shape"], document["dtype"]
    if document["op"] == "gemm":
        return f"{shape['m']} x {shape['n']}\nx {shape['k']}\n{dtype}"
    if document["op"] == "flash_attention":
        kind = "causal" if shape["causal"] else "full"
        if shape["window"] is not None:
            kind = f"window {shape['window']}"
        if shape["block_mask"]:
            kind = f"block-sparse {shape['density']}"
        return f"{kind}, {shape['seq']}\nwidth {shape['dim']}"
    if document["op"] == "flash_mla":
        return f"{shape['batch']} x {shape['heads']} heads\n{shape['kv_len']} keys"
    return ", ".join(f"{k}={v}" for k, v in shape.items() if v is not None and USUAL.get(k, "") != v) + f"\n{dtype}"


def _size(document: dict) -> tuple:
    """Order of the groups: by dtype, then by the shape's numbers as they are read."""
    return document["dtype"], [v or 0 for v in document["shape"].values()]


def shares(document: dict) -> dict[str, float]:
    """Speed of each implementation beside the fastest; peers without a figure are absent."""
    results = document["results"]
    times = {name: r["seconds"] for name, r in results.items()}
    best = min(times.values())
    return {name: best / seconds for name, seconds in times.items()}


def draw(documents: list[dict], path: Path) -> None:
    """One picture: a group of bars a shape."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys([OWN, *COLOURS, *(n for d in documents for n in d["results"])]))
    names = [n for n in names if any(n in d["results"] for d in documents)]
    width = 0.84 / len(names)
    figure, axes = plt.subplots(figsize=(max(6, 1.25 * len(documents) + 1.5), 3.4), dpi=80)
    for index, name in enumerate(names):
        at = [i for i, d in enumerate(documents) if name in d["results"]]
        heights = [shares(documents[i])[name] for i in at]
        places = [i + (index - (len(names) - 1) / 2) * width for i in at]
        axes.bar(places, heights, width * 0.95, label=name, color=COLOURS.get(name, OTHER))
        if name == OWN:
            for x, y, i in zip(places, heights, at, strict=True):
                result = documents[i]["results"][OWN]
                text = f"{result['tflops']:.0f}" if result["tflops"] else f"{result['seconds'] * 1e6:.0f} us"
                axes.text(x, y + 0.01, text, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(documents)), [label(d) for d in documents], fontsize=7)
    axes.set_ylim(0, 1.15)
    axes.set_ylabel("speed, fastest = 1", fontsize=8)
    first = documents[0]
    axes.set_title(f"{first['op']} on {first['device']}, {first.get('date', '')} (labels: TFLOP/s)", fontsize=9)
    axes.legend(fontsize=7, ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, -0.42), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def main() -> int:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description="Draw bars of `tvm-tile bench`.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("tuning_logs/nvidia-h200/bench"))
    parser.add_argument("--out", type=Path, default=Path("docs/img"), help="folder of the pictures")
    arguments = parser.parse_args()
    files = sorted(arguments.folder.glob("*.json"))
    if not files:
        parser.exit(1, f"no figures in {arguments.folder}: run tvm-tile bench first\n")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        parser.exit(1, "plot_bench.py needs matplotlib: pip install matplotlib\n")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for file in files:
        documents = sorted(json.loads(file.read_text()), key=_size)
        path = arguments.out / f"bench_{file.stem}.png"
        draw(documents, path)
        print(f"{len(documents)} shapes in {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
