"""Shared by all benchmarks: paired measurement, an interval for its ratio, and the row of the results.

    measure(arms, rounds)  ->  each round runs every arm once, in random order  ->  {arm: [Timing]}
    ratio(peer, ours)      ->  median of the paired ratios of CPU (or wall) time, with a bootstrap 95% interval
    print_row(...)         ->  one JSON line with figures and environment, for results.md

An arm that is run twice under two names (A/A) shows what a ratio of 1 looks like here: wider than 3%, and the run is
inconclusive.
"""

import json
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

AA_WIDTH = 0.03
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run of one arm; CPU is user + system, of threads and finished children too."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of paired ratios and its bootstrap 95% interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def time_once(work: Callable[[], Any]) -> Timing:
    """Runs `work` once."""
    cpu, wall = _cpu_s(), time.perf_counter()
    work()
    return Timing(_cpu_s() - cpu, time.perf_counter() - wall)


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure(
    arms: dict[str, Callable[[], Any]], rounds: int, seed: int = 0, before: Callable[[], Any] = lambda: None
) -> dict[str, list[Timing]]:
    """Runs every arm once a round, in an order drawn anew each round; entry i of all lists is round i.

    `before` is called before each run and not timed: a barrier, where several ranks measure together.
    """
    rng = random.Random(seed)
    timings: dict[str, list[Timing]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name in rng.sample(list(arms), len(arms)):
            before()
            timings[name].append(time_once(arms[name]))
    return timings


def ratio(
    numerator: list[Timing],
    denominator: list[Timing],
    resamples: int = 4000,
    clock: Literal["cpu_s", "wall_s"] = "cpu_s",
) -> Ratio:
    """Returns the ratio of times; peer over ours is the speed of ours relative to the peer's, at equal work."""
    pairs = zip(numerator, denominator, strict=True)
    paired = np.array([getattr(above, clock) / getattr(below, clock) for above, below in pairs])
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(paired, (resamples, len(paired))), axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return Ratio(float(np.median(paired)), float(low), float(high))


def is_conclusive(aa: Ratio) -> bool:
    """Returns whether an A/A interval is within 3% of 1."""
    return aa.low >= 1 - AA_WIDTH and aa.high <= 1 + AA_WIDTH


def read_commit() -> str:
    """Returns the commit of the tree; empty without git, or outside of a clone."""
    if shutil.which("git") is None:
        return ""
    shown = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return shown.stdout.strip()


def environment(packages: tuple[str, ...]) -> dict[str, Any]:
    """Returns where and with what a figure was measured."""
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")] if cpuinfo.exists() else []
    )
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join([f"python -m benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "commit": read_commit(),
        "cpu": names[0].split(": ", 1)[1] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def print_row(question: str, figures: dict[str, Any], packages: tuple[str, ...]) -> None:
    """Prints the JSON row of a benchmark."""
    print(json.dumps({"question": question, **figures, "environment": environment(packages)}))


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Appends a row to a file of JSON lines; it is on disk when this returns."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
