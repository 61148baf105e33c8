"""Slow ranks by name: false names on a busy machine, steps until a slow rank is named, and the cost of a step.

    python -m benchmarks.slow_ranks --data data/stdlib [--steps 2000] [--ranks 2] [--stage 2]

    recorded   forward times of all ranks of a real run over gloo, as the ranks exchange them; nothing is slowed down
    false      names among these steps, and among 10,000 made of them: pieces of 100 recorded steps, in random order
    slowed     the same, of which one rank's times are multiplied by 1.2 from a random step on: steps until it is named
    cost       of a step: seconds of measuring and judging, by the clock of the CPU, over seconds of a step by the wall

Times are recorded on whatever else the machine does, of which the row has the load. Linux only.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, print_row
from pretrain.dist import World
from pretrain.run.folder import RunDir
from pretrain.run.slow_ranks import SlowRanks
from pretrain.tracking.meter import Timeline
from pretrain.tracking.own_time import OwnTime
from pretrain.training.health.rank_health import RankHealth

CONFIG = """
run: {dir: RUNS, name: run}
data: {path: DATA}
model: {preset: llama-tiny, decoder: {layers: 2}}
batch: {global_tokens: GLOBAL, seq_len: 64, micro: 4}
optim: {lr: 1e-3}
train: {steps: STEPS}
engine: {kind: deepspeed, zero_stage: STAGE, precision: fp32, device: cpu}
checkpoint: {every_steps: 0}
tracking: {wandb: off}
"""
RECORDER = """
import json, os, time

from pretrain.training.health.rank_health import RankHealth

def judge(self, step, totals, tell, before=RankHealth.judge):
    before(self, step, totals, tell)
    if self._world.is_main:
        with open(os.environ["RECORD"], "a") as file:
            file.write(json.dumps([time.monotonic(), list(totals[: self._world.size])]) + chr(10))

RankHealth.judge = judge
"""
PIECE = 100
SIMULATED = 10_000
SLOWER = 1.2


def record(folder: Path, asked: argparse.Namespace) -> tuple[list[list[float]], float]:
    """Returns the times [steps, ranks] of a real run, and the median seconds of its steps."""
    text = CONFIG
    places = {"RUNS": folder / "runs", "DATA": asked.data.absolute(), "STEPS": asked.steps, "STAGE": asked.stage}
    for key, value in {**places, "GLOBAL": 64 * 4 * 2 * asked.ranks}.items():
        text = text.replace(key, str(value))
    config = folder / "run.yaml"
    config.write_text(text)
    (folder / "recorder.py").write_text(RECORDER)
    rows = folder / "rows.jsonl"
    path = os.pathsep.join((str(folder), str(ROOT), str(ROOT / "launch")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RECORD": str(rows), "PYTHONPATH": path}
    words = ["launch", "local", str(config), "extend=[recorder]", "--ranks", str(asked.ranks)]
    subprocess.run([sys.executable, "-m", "pretrain", *words], env=environment, check=True, stdout=subprocess.DEVNULL)
    recorded = [json.loads(line) for line in rows.read_text().splitlines()]
    moments = [moment for moment, _ in recorded]
    steps = [after - before for before, after in pairwise(moments)]
    return [times for _, times in recorded if min(times) > 0], statistics.median(steps)


def count_names(times: list[list[float]]) -> int:
    """Returns how often a rank is named."""
    ranks = SlowRanks()
    names = 0
    for step in times:
        before = set(ranks.slow)
        ranks.add(step)
        names += len(set(ranks.slow) - before)
    return names


def steps_until_named(times: list[list[float]], rng: random.Random) -> int | None:
    """Returns after how many slow steps a rank is named that is slow from a random step on; None: not within 60."""
    ranks = SlowRanks()
    begin, slow = rng.randrange(40, 60), rng.randrange(len(times[0]))
    for step, row in enumerate(times[: begin + 60]):
        ranks.add([value * (SLOWER if rank == slow and step >= begin else 1) for rank, value in enumerate(row)])
        if step >= begin and slow in ranks.slow:
            return step - begin + 1
    return None


def cost_s(folder: Path, ranks: int) -> float:
    """Returns the CPU seconds that a step of two micro-batches takes for measuring and judging."""
    health = RankHealth(World(0, ranks, 0), RunDir(folder), torch.device("cpu"), (0, 10**6))
    timed, plain = Timeline(), Timeline()
    plain.own = OwnTime(float, float, float)
    rounds = 5000

    def step(timeline: Timeline, number: int, *, is_judged: bool) -> None:
        for _ in range(2):
            with timeline.within("forward"):
                timeline.after_forward()
        timeline.end_step()
        if is_judged:
            health.measures(timeline.forward_s)
            health.judge(number, [1.0] * ranks + [0.0] * ranks, lambda title, text: None)

    spent = []
    for timeline, is_judged in ((timed, True), (plain, False)):
        began = time.process_time()
        for number in range(rounds):
            step(timeline, number, is_judged=is_judged)
        spent.append((time.process_time() - began) / rounds)
    return spent[0] - spent[1]


def measure_names(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of the row."""
    times, step_s = record(folder, asked)
    rng = random.Random(asked.seed)
    pieces = [times[first : first + PIECE] for first in range(0, len(times) - PIECE + 1, PIECE)]
    simulated = [step for _ in range(SIMULATED // PIECE) for step in rng.choice(pieces)]
    windows = [times[first : first + 2 * PIECE] for first in range(0, len(times) - 2 * PIECE, PIECE // 2)]
    until = [steps_until_named(rng.choice(windows), rng) for _ in range(200)]
    named = sorted(steps for steps in until if steps is not None)
    cost = cost_s(folder, asked.ranks)
    return {
        "ranks": asked.ranks,
        "stage": asked.stage,
        "load": os.getloadavg()[0],
        "recorded_steps": len(times),
        "median_forward_s": statistics.median(step[0] for step in times),
        "false_names_recorded": count_names(times),
        f"false_names_of_{SIMULATED}": count_names(simulated),
        "slowed": len(until),
        "named_within_30": sum(steps <= 30 for steps in named),
        "steps_until_named": [named[0], statistics.median(named), named[-1]] if named else [],
        "cost_us": cost * 1e6,
        "step_ms": step_s * 1e3,
        "cost_of_step": cost / step_s,
    }


def main() -> None:
    """Prints a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        figures = measure_names(Path(name), asked)
    print_row("Are slow ranks named, and no others?", figures, ("torch", "deepspeed"))


if __name__ == "__main__":
    main()
