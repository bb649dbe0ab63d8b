"""Runs the GPU tests in several processes that share the GPU, restarts those that a kernel takes down, sums up.

The tests of ``tests/cuda`` take turns at the GPU (``tests/cuda/harness.py``: a file lock around each run), so that
compiling, parsing and references proceed in parallel while one kernel runs at a time. All other GPU tests, some of
which measure time, run afterwards in one process.

A process ends itself when a kernel runs longer than ``--hang`` seconds, and after a CUDA error, which no later launch
of that process would survive. The test that ran then is counted as failed, and a new process takes the tests after it.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "scripts.gpu_log"]


@dataclass
class Results:
    """Outcome and seconds of each test, and what failing ones said."""

    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    reports: dict[str, str] = field(default_factory=dict)

    def read(self, log: Path) -> tuple[list[str], str | None]:
        """Take over a process's log: the tests that it finished, and the one that it did not."""
        finished, running = [], None
        for line in log.read_text().splitlines() if log.exists() else []:
            entry = json.loads(line)
            if entry["event"] == "start":
                running = entry["test"]
                continue
            running = None
            finished.append(entry["test"])
            self.outcomes[entry["test"]] = entry["outcome"]
            self.seconds[entry["test"]] = entry["seconds"]
            if entry["text"]:
                self.reports[entry["test"]] = entry["text"]
        return finished, running


def collect(arguments: list[str], env: dict[str, str]) -> list[str]:
    """Node ids of the GPU tests."""
    command = [*PYTEST, "--collect-only", "-m", "gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    tests = [line for line in done.stdout.splitlines() if "::" in line and not line.startswith(("ERROR", "FAILED"))]
    if done.returncode not in (0, 5):
        sys.exit(f"the tests cannot be collected:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return tests


def run_part(number: int, tests: list[str], folder: Path, env: dict[str, str], deadline: float, results: Results):
    """Run tests in one process after another until each has an outcome or the time is over."""
    attempt = 0
    while tests and time.monotonic() < deadline:
        log = folder / f"log-{number}-{attempt}.jsonl"
        output = (folder / f"output-{number}-{attempt}.txt").open("w+")
        process = subprocess.Popen(
            [*PYTEST, *tests],
            cwd=ROOT,
            env={**env, "TVM_TILE_GPU_LOG": str(log)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finished, running = results.read(log)
        output.seek(0)
        said = output.read()
        hang = said.find("Timeout (")  # the watchdog's traceback, innermost frame first
        said = "\n".join(said[hang:].splitlines()[:20] if hang >= 0 else said.splitlines()[-20:])
        output.close()
        if running is not None:
            late = time.monotonic() >= deadline
            results.outcomes[running] = "unfinished" if late else "crashed"
            results.reports[running] = "the time was over" if late else said
            finished.append(running)
        elif not finished:
            for test in tests:
                results.outcomes[test] = "crashed"
            results.reports[tests[0]] = said
            return
        done = set(finished)
        tests = [t for t in tests if t not in done]
        attempt += 1
    for test in tests:
        results.outcomes[test] = "unfinished"


def summary(tests: list[str], results: Results, seconds: float) -> int:
    """Print what happened; the exit code."""
    bad = [t for t in tests if results.outcomes.get(t) not in ("passed", "skipped")]
    for test in bad:
        print(f"\n{results.outcomes.get(test, 'lost').upper()} {test}")
        print("    " + "\n    ".join(results.reports.get(test, "no report").splitlines()[-25:]))
    groups: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for test in tests:
        path, _, name = test.partition("::")
        target = next((a for a in ("gpu-sm_80", "gpu-sm_90") if a in name), "")
        groups[f"{path} {target}".rstrip()][results.outcomes.get(test, "lost")] += 1
    print("\nGPU tests")
    for group, counts in sorted(groups.items()):
        print(f"  {group:<48} " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    slowest = sorted(results.seconds, key=results.seconds.get, reverse=True)[:5]
    print("  slowest: " + "; ".join(f"{t.partition('::')[2]} {results.seconds[t]:.1f} s" for t in slowest))
    counts = collections.Counter(results.outcomes.get(t, "lost") for t in tests)
    text = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
    ran = counts["passed"]
    print(f"{'FAIL' if bad or not ran else 'PASS'}: {text} in {seconds:.0f} s")
    return 1 if bad or not ran else 0


def main() -> int:
    """Collect, run in parallel, run what is left in one process, sum up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--hang", type=float, default=30.0, help="seconds that one run of a kernel may take")
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds for everything")
    known, rest = parser.parse_known_args()
    start = time.monotonic()
    deadline = start + known.limit
    with tempfile.TemporaryDirectory(prefix="tvm_tile_gpu_") as name:
        folder = Path(name)
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TVM_TILE_CACHE_DIR": os.environ.get("TVM_TILE_CACHE_DIR", str(folder / "cache")),
            "TVM_TILE_GPU_LOCK": str(folder / "lock"),
            "TVM_TILE_GPU_WATCHDOG": str(known.hang),
            "OMP_NUM_THREADS": "1",
            "TVM_NUM_THREADS": "1",
        }
        tests = collect(rest, env)
        together = [t for t in tests if t.startswith("tests/cuda/")]
        alone = [t for t in tests if not t.startswith("tests/cuda/")]
        workers = max(1, min(known.workers, len(together)))
        print(f"{len(tests)} GPU tests, {len(together)} of them in {workers} processes", flush=True)
        results = Results()
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            # neighbours differ in a parameter and take alike long: deal them out
            parts = [together[n::workers] for n in range(workers)]
            jobs = [pool.submit(run_part, n, p, folder, env, deadline, results) for n, p in enumerate(parts)]
            for job in jobs:
                job.result()
        run_part(workers, alone, folder, env, deadline, results)
        return summary(tests, results, time.monotonic() - start)


if __name__ == "__main__":
    sys.exit(main())
