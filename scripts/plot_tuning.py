#!/usr/bin/env python3
"""Best-so-far curves of tuning runs: ``scripts/plot_tuning.py STORE [--op OP] [--by trials|seconds] --out curves.svg``.

One curve a workload of every ``trials.jsonl`` in the store, relative to the workload's best. Writes SVG and needs
nothing beyond Python.
"""

from __future__ import annotations

import argparse
import html
import json
from pathlib import Path

WIDTH, HEIGHT, MARGIN, LEGEND = 760, 380, 50, 18
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")


def curves(store: Path, op: str | None, by: str) -> dict[str, list[tuple[float, float]]]:
    """Workload -> [(trials or seconds, best so far in seconds), ...]."""
    out: dict[str, list[tuple[float, float]]] = {}
    for path in sorted(store.glob(f"*/{op or '*'}/trials.jsonl")):
        count: dict[str, int] = {}
        for line in path.read_text().splitlines():
            try:
                trial = json.loads(line)
            except ValueError:
                continue  # a run that was killed in the middle of a write
            problem = trial["problem"]
            shape = " ".join(f"{k}={v}" for k, v in problem["shape"].items() if v not in (None, False))
            title = f"{problem['kernel']} {shape} {problem['dtype']} on {path.parent.parent.name}"
            count[title] = count.get(title, 0) + 1
            if trial["seconds"] is None:
                continue
            points = out.setdefault(title, [])
            best = min(trial["seconds"], points[-1][1]) if points else trial["seconds"]
            points.append((trial["elapsed"] if by == "seconds" else count[title], best))
    return out


def svg(found: dict[str, list[tuple[float, float]]], by: str) -> str:
    """The drawing: speed beside the workload's best, 0 to 1."""
    height = HEIGHT + LEGEND * len(found)
    right, bottom = WIDTH - MARGIN, HEIGHT - MARGIN
    most = max(points[-1][0] for points in found.values())

    def at(x: float, y: float) -> tuple[float, float]:
        return MARGIN + (right - MARGIN) * x / max(most, 1e-9), bottom - (bottom - MARGIN) * y

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for step in range(6):
        y = step / 5
        (x0, y0), (x1, _) = at(0, y), at(most, y)
        parts.append(f'<line x1="{x0}" y1="{y0:.1f}" x2="{x1}" y2="{y0:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x0 - 30}" y="{y0 + 4:.1f}">{y:.1f}</text>')
        x, y_axis = at(most * y, 0)
        parts.append(f'<text x="{x:.1f}" y="{y_axis + 18:.1f}" text-anchor="middle">{most * y:.0f}</text>')
    parts.append(f'<text x="{(MARGIN + right) / 2}" y="{bottom + 36}" text-anchor="middle">{by}</text>')
    parts.append(f'<text x="{MARGIN}" y="{MARGIN - 16}">best so far, as a share of the best found</text>')
    for number, (title, points) in enumerate(found.items()):
        colour, best = COLOURS[number % len(COLOURS)], points[-1][1]
        path, previous = [], None
        for x, seconds in [*points, (most, best)]:
            px, py = at(x, best / seconds)
            # a step: the best holds until the next better one
            path.append(f"M{px:.1f},{py:.1f}" if previous is None else f"L{px:.1f},{previous:.1f}L{px:.1f},{py:.1f}")
            previous = py
        parts.append(f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = HEIGHT + LEGEND * number
        parts.append(f'<rect x="{MARGIN}" y="{y}" width="12" height="12" fill="{colour}"/>')
        label = f"{title}: {best * 1e6:.1f} us"
        parts.append(f'<text x="{MARGIN + 18}" y="{y + 10}">{html.escape(label)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description="Draw best-so-far curves of tuning runs as SVG.")
    parser.add_argument("store", type=Path, nargs="?", default=Path("tuning_logs"))
    parser.add_argument("--op", help="only this op")
    parser.add_argument("--by", choices=("trials", "seconds"), default="trials", help="horizontal axis")
    parser.add_argument("--out", type=Path, default=Path("tuning.svg"))
    arguments = parser.parse_args()
    found = curves(arguments.store, arguments.op, arguments.by)
    if not found:
        parser.exit(1, f"no successful trials in {arguments.store}\n")
    arguments.out.write_text(svg(found, arguments.by))
    print(f"{len(found)} curves in {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
