"""Loss of ranks of one run, at random: recovered inside the job, or by the same command again.

    python -m benchmarks.recovery [--losses 30] [--ranks 2] [--stage 2] [--seed 1] [--arms spare restart]
    python -m benchmarks.recovery --copies 40

    whole     the run, which nobody interrupts
    spare     `run.recover=spare`: a random rank is killed at a random moment; of each eight losses one is a SIGSTOP,
              and one is followed by a kill within the recovery
    restart   the kills of the same plan without recovery: the job ends, and the same command follows at once

Seconds are those from the signal to the next row of the ledger, 5 s of a SIGSTOP until it counts as a loss included;
CPU seconds are of all processes over that time. Then: whether ledger and weights are those of the whole run;
descriptors, threads and resident memory of the launcher after the first recovery and the last; and the time that losses
took of the run. Losses come every 8 steps, and a checkpoint every 4. Linux only.

With `--copies` nothing is lost: CPU time of so many copies of the state in memory, of the thread that takes steps, and
with the thread that writes them.
"""

import argparse
import filecmp
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import ROOT, print_row
from benchmarks.start import cpu_s, descendants
from pretrain.checkpoint.format import list_checkpoints
from pretrain.checkpoint.memory_copies import MemoryCopies
from pretrain.checkpoint.state import TrainState
from pretrain.dist import World
from pretrain.run.folder import RunDir
from pretrain.run.recovery import Recovery
from pretrain.tracking.audit import compare
from pretrain.types import Fragment
from pretrain.utils.jsonl import last_row
from pretrain.utils.process import rank_of_process

CONFIG = """
run: {dir: RUNS, name: run}
data: {path: DATA}
model: {preset: llama-tiny, decoder: {dropout: 0.1}}
batch: {global_tokens: 1536, seq_len: 64, micro: 2}
optim: {lr: 1e-3}
train: {steps: STEPS}
engine: {kind: deepspeed, zero_stage: STAGE, precision: fp32, device: cpu}
checkpoint: {every_steps: 4}
"""
APART = 8
POLL_S = 0.003
CODES = {0, 137, 76}


class Loss(NamedTuple):
    """A loss of a rank."""

    step: int
    rank: int
    number: int  # of the signal
    after_s: float  # once the step is done
    again: int | None = None  # a rank to be killed within the recovery


class Recovered(NamedTuple):
    """Costs of a loss until the next step."""

    wall_s: float
    cpu_s: float
    launcher: dict[str, int]


def plan_losses(count: int, ranks: int, seed: int, *, only_kills: bool) -> list[Loss]:
    """Returns the losses of a run, by seed."""
    rng = random.Random(seed)
    losses = []
    for number in range(count):
        loss = Loss(APART * (number + 1), rng.randrange(ranks), signal.SIGKILL, rng.random() * 0.1)
        again = rng.randrange(ranks)
        if number % 8 == 3 and not only_kills:
            loss = loss._replace(number=signal.SIGSTOP)
        if number % 8 == 6 and not only_kills:
            loss = loss._replace(again=again)
        losses.append(loss)
    return losses


class Job:
    """A run under `pretrain launch local`, and its launcher."""

    def __init__(self, folder: Path, name: str, asked: argparse.Namespace, *items: str) -> None:
        self.run = RunDir(folder / name / "run")
        self._log = folder / f"{name}.log"
        config = folder / f"{name}.yaml"
        steps = APART * (asked.losses + 1)
        places = {"RUNS": folder / name, "DATA": folder / "data", "STEPS": steps, "STAGE": asked.stage}
        text = CONFIG
        for key, value in places.items():
            text = text.replace(key, str(value))
        config.write_text(text)
        words = ["launch", "local", str(config), *items, "--ranks", str(asked.ranks)]
        self._command = [sys.executable, "-m", "pretrain", *words]
        self.start()

    def start(self) -> None:
        """Starts it, or starts it again."""
        with self._log.open("a") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.launcher = subprocess.Popen(
                self._command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def step(self) -> tuple[int, int]:
        """Returns attempt and step of the last row of the ledger."""
        with suppress(OSError):
            row = last_row(self.run.audit) or {}
            return row.get("attempt", 0), row.get("step", 0)
        return 0, 0

    def wait_for(self, attempt: int, step: int) -> None:
        """Waits for a row of this attempt and step, or of later ones."""
        while (reached := self.step())[0] < attempt or reached[1] < step:
            if self.launcher.poll() is not None:
                raise SystemExit(f"{self.run.path} ended:\n{self._log.read_text()[-3000:]}")
            time.sleep(POLL_S)

    def ranks(self) -> dict[int, int]:
        """Returns the process of each rank."""
        pid = self.launcher.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {rank: int(child) for child in children if (rank := rank_of_process(int(child))) is not None}

    def send(self, rank: int, number: int, unlike: int = 0) -> int:
        """Sends a signal to a rank as soon as there is one, another process than `unlike`; returns its process."""
        while (pid := self.ranks().get(rank)) in (None, unlike):
            time.sleep(POLL_S)
        os.kill(pid, number)
        return pid

    def counts(self) -> dict[str, int]:
        """Returns what the launcher holds."""
        place = Path(f"/proc/{self.launcher.pid}")
        resident = next(line for line in (place / "status").read_text().splitlines() if line.startswith("VmRSS"))
        # The least of some looks: it reads /proc itself now and then.
        held = {name: min(len(list((place / name).iterdir())) for _ in range(20)) for name in ("fd", "task")}
        return held | {"resident_mib": int(resident.split()[1]) // 1024}


def spent() -> float:
    """Returns the CPU seconds of all processes of this one so far, those that have ended included."""
    return cpu_s([os.getpid(), *descendants(os.getpid())]) - time.process_time()


def lose(job: Job, loss: Loss, *, restarts: bool) -> Recovered:
    """Has a rank lost, and waits for the next step."""
    attempt, _ = job.step()
    job.wait_for(attempt, loss.step)
    time.sleep(loss.after_s)
    attempt, _ = job.step()
    begun, before = time.monotonic(), spent()
    pid = job.send(loss.rank, loss.number)
    if loss.again is not None:
        first = pid if loss.again == loss.rank else job.ranks().get(loss.again, 0)
        job.send(loss.again, signal.SIGKILL, unlike=first)
    if restarts:
        if job.launcher.wait() not in CODES:
            raise SystemExit(f"{job.run.path}: exit code {job.launcher.returncode}")
        job.start()
    job.wait_for(attempt + 1, 0)
    return Recovered(time.monotonic() - begun, spent() - before, job.counts())


def follow(job: Job, losses: list[Loss], *, restarts: bool) -> tuple[list[Recovered], float]:
    """Takes a run to its end through its losses; returns the costs of each, and the seconds from its first step on."""
    job.wait_for(1, 1)
    begun = time.monotonic()
    recovered = []
    for number, loss in enumerate(losses, start=1):
        recovered.append(lose(job, loss, restarts=restarts))
        print(f"loss {number} of {len(losses)}: {recovered[-1]}", file=sys.stderr, flush=True)
    if job.launcher.wait():
        raise SystemExit(f"{job.run.path}: exit code {job.launcher.returncode}")
    return recovered, time.monotonic() - begun


def same(ours: RunDir, whole: RunDir) -> bool:
    """Returns whether ledger and last checkpoint of two runs are equal in every bit."""
    paths = [list_checkpoints(run.checkpoints)[-1] for run in (ours, whole)]
    names = [path.name for path in paths[1].glob("*.safetensors")]
    equal, _, _ = filecmp.cmpfiles(*paths, names, shallow=False)
    return compare(whole.audit, ours.audit) is None and sorted(equal) == sorted(names)


def describe(arm: str, recovered: list[Recovered], run_s: float, whole_s: float) -> dict[str, Any]:
    """Returns the figures of an arm."""
    walls, cpus = ([one[place] for one in recovered] for place in (0, 1))
    lost_s = run_s - whole_s
    figures: dict[str, Any] = {"losses": len(recovered), "run_s": round(run_s, 1), "lost_s": round(lost_s, 1)}
    for name, values in (("next_step_s", walls), ("next_step_cpu_s", cpus)):
        figures[name] = {"median": round(statistics.median(values), 2), "max": round(max(values), 2)}
    if arm == "spare":
        figures["launcher"] = {"first": recovered[0].launcher, "last": recovered[-1].launcher}
    return figures


def drill(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Runs the arms in a folder with data; returns their figures."""
    whole = Job(folder, "whole", asked)
    _, whole_s = follow(whole, [], restarts=False)
    figures: dict[str, Any] = {"whole": {"run_s": round(whole_s, 1)}}
    for arm in asked.arms:
        losses = plan_losses(asked.losses, asked.ranks, asked.seed, only_kills=arm == "restart")
        job = Job(folder, arm, asked, *(["run.recover=spare"] if arm == "spare" else []))
        recovered, run_s = follow(job, losses, restarts=arm == "restart")
        figures[arm] = describe(arm, recovered, run_s, whole_s) | {"is_same": same(job.run, whole.run)}
        attempts = json.loads(job.run.record.read_text())["attempts"]
        figures[arm] |= {"attempts": len(attempts), "recoveries": sum("recovery" in one for one in attempts)}
    return figures


class Store:
    """Fragments of a rank: 40 matrices with two moments, 19.7 MB."""

    def __init__(self) -> None:
        self._tensors = {f"{number}": torch.ones(256 * 160) for number in range(40)}

    def owned_fragments(self) -> Iterator[Fragment]:
        """Yields what this rank copies."""
        for name, tensor in self._tensors.items():
            yield Fragment(name, 0, (256, 160), dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), tensor))

    def scalars(self) -> dict[str, float]:
        """None."""
        return {}


def measure_copies(count: int) -> dict[str, Any]:
    """Measures copies in memory; returns milliseconds of CPU time for each megabyte, and the seconds of the step's."""
    torch.set_num_threads(1)
    store, waits, spents = Store(), [], []
    num_bytes = 3 * 4 * sum(math.prod(fragment.shape) for fragment in store.owned_fragments())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        copies = MemoryCopies(Recovery(0, memory=folder), World(0, 1, 0), 1)
        for step in range(1, count + 1):
            before, begun = time.process_time(), time.thread_time()
            copies.take(store, TrainState(step=step))
            waits.append(time.thread_time() - begun)
            copies.finish()
            spents.append(time.process_time() - before)
    figures = {"of_the_step_ms_a_mb": waits, "all_threads_ms_a_mb": spents}
    return {name: round(1e3 * statistics.median(values) / (num_bytes / 1e6), 3) for name, values in figures.items()}


def main() -> None:
    """Measures, and prints the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arms", nargs="*", choices=["spare", "restart"], default=["spare", "restart"])
    parser.add_argument("--copies", type=int, default=0)
    asked = parser.parse_args()
    if asked.copies:
        print_row("copies of the state in memory", measure_copies(asked.copies), ("torch",))
        return
    with tempfile.TemporaryDirectory(prefix="pretrain-recovery-") as name:
        texts = sorted(str(path) for path in (ROOT / "docs").glob("*.md"))
        words = ["prepare", *texts, "--output", f"{name}/data", "--vocab-size", "512", "--split", "tail:0.02"]
        subprocess.run([sys.executable, "-m", "pretrain", *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        figures = drill(Path(name), asked)
    print_row(f"recovery of {asked.ranks} ranks, ZeRO {asked.stage}", figures, ("torch", "deepspeed"))


if __name__ == "__main__":
    main()
