"""Cost of tracking: CPU time of all tracking calls of a step, against a step of 50 ms.

    python -m benchmarks.tracking_overhead [--quick]

As the loop makes them, with wandb offline: the timeline and the meter each step, a row each 10 steps (metrics.jsonl, a
line of the log, wandb), memory with it, norms by layer each 200 steps, of a decoder of 1.4M parameters, which takes
some 50 ms a step on a core; more parameters take longer steps, and norms by layer 2 ns of a core each. Two figures: the
CPU time of the thread that trains, which is what a step waits for; and that of the whole process and of wandb's
service, which have other cores to run on where there are any. Two arms without any call run in turn with it: their
difference is the noise.
"""

import argparse
import contextlib
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common import print_row
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import parse_model
from pretrain.config.presets import expand_preset
from pretrain.config.tracking import TrackingConfig
from pretrain.dist import World
from pretrain.engine.engine import Update
from pretrain.engine.replicated import ReplicatedState
from pretrain.model import build_model, init_weights
from pretrain.tracking import RunOutput
from pretrain.tracking.meter import Meter, SourceLosses, Timeline, memory_metrics
from pretrain.tracking.tracker import Identity
from pretrain.training.layer_norms import LayerNorms

STEP_US, LIMIT = 50_000, 0.005
MODEL = {
    "preset": "llama-tiny",
    "vocab_size": 2048,
    "decoder": {"layers": 4, "width": 128, "heads": 4, "ff_width": 384},
}
CPU = torch.device("cpu")


def cpu_us(pids: list[int]) -> float:
    """Returns the CPU time so far of this process and some others."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return 1e6 * (time.process_time() + ticks / os.sysconf("SC_CLK_TCK"))


def service_pids() -> list[int]:
    """Returns the processes that this one's threads have started."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


class Watched:
    """Everything that watches a run, as `pretrain.training.build` puts it together."""

    def __init__(self, run_dir: Path) -> None:
        self.config = TrackingConfig(wandb="offline")
        identity = Identity("bench", "bench", {})
        self.tracker = RunOutput(run_dir, self.config, identity, rank=0, total_steps=10**6)
        self.timeline, self.meter = Timeline(), Meter(10**6, flops_before=float, peak=1.0)
        self.sources = SourceLosses(["web", "books", "code"])
        model_config = parse_model(expand_preset(MODEL))
        model = build_model(model_config, PLAIN_ENGINE, CPU)
        init_weights(model, model_config, 0)
        named = list(model.named_parameters())
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        state = ReplicatedState(named, self.optimizer, World(0, 1, 0))
        self.norms = LayerNorms([name for name, _ in named], self.optimizer, state, is_cut=False)
        self.optimizer.step()
        self.step = 0

    def take_step(self) -> None:
        """All calls of a step of one micro-batch."""
        self.step += 1
        timeline = self.timeline
        timeline.enter("forward")
        timeline.after_forward()
        with self.meter.data_wait(), timeline.within("data"):
            pass
        timeline.enter("optimizer")
        with timeline.within("communication"):
            pass
        self.sources.add((1.0, 2.0, 3.0, 1.0, 1.0, 1.0))
        self.meter.end_step(4096)
        if self.config.measures_norms(self.step):
            self.norms.arm()
            self.norms._before_step(self.optimizer)  # the hooks alone: the step itself is not a cost of watching
            self.norms._after_step(self.optimizer)
        if self.step % self.config.log_every_steps == 0:
            metrics = {"loss": 2.5, "accuracy": 0.5, "lr": 3e-4, "grad_norm": 1.0, "tokens": 1e9, "skipped_steps": 0.0}
            metrics |= self.meter.read(self.step) | timeline.take() | memory_metrics(CPU) | self.sources.take()
            self.tracker.log(self.step, metrics | self.norms.take(Update(1.0, False), CPU))
        with timeline.within("checkpoint"):
            pass
        timeline.end_step()


def measure(
    arms: dict[str, Callable[[], object]], steps: int, rounds: int, pids: list[int]
) -> dict[str, list[tuple[float, float]]]:
    """Returns the CPU time of a step in us, of this thread and of all, for each arm in each round.

    The thread of wandb may finish its rows before the clock is read.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in sorted(arms, reverse=bool(number % 2)):
            start, start_own = cpu_us(pids), time.thread_time()
            for _ in range(steps):
                arms[name]()
            own_us = 1e6 * (time.thread_time() - start_own)
            time.sleep(1.0)
            found[name].append((own_us / steps, (cpu_us(pids) - start) / steps))
    return found


def report(times: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """Prints what a step costs, and whether that is within the limit; returns the figures."""
    figures: dict[str, float] = {}
    for place, name in enumerate(("training thread", "all threads and wandb's service")):
        cost, noise = (
            statistics.median(
                own[place] - bare[place] for own, bare in zip(times[arm], times["a nothing"], strict=True)
            )
            for arm in ("watched", "b nothing")
        )
        verdict = "held" if cost / STEP_US <= LIMIT else "missed"
        print(f"{name}: {cost:.0f} us of CPU a step, {cost / STEP_US:.2%} of 50 ms, {verdict}; A/A {noise:.1f} us")
        figures |= {f"us, {name}": round(cost, 1), f"A/A us, {name}": round(noise, 1)}
    return figures


def main() -> None:
    """Prints a table and a JSON row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    steps, rounds = (1000, 3) if parser.parse_args().quick else (2000, 9)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        logging.basicConfig(filename=Path(folder) / "log.txt", level=logging.INFO)
        watched = Watched(Path(folder))
        while not (Path(folder) / "wandb" / "SYNC.txt").exists():
            time.sleep(0.1)
        arms: dict[str, Callable[[], object]] = {"a nothing": int, "b nothing": int, "watched": watched.take_step}
        times = measure(arms, steps, rounds, service_pids())
        watched.tracker.close()
    print_row("tracking overhead", report(times), ("torch", "wandb"))


if __name__ == "__main__":
    main()
