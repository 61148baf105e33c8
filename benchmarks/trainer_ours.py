"""The arm `ours` of benchmarks/trainer.py: a run as `pretrain train` has it, in a thread that can be held.

plan_run(...)  ->  Trainer(config, world)  ->  take(steps), again and again  ->  losses(), close()
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pretrain.checkpoint.state import TrainState
from pretrain.config.load import load_config
from pretrain.config.run import RunConfig
from pretrain.data.loader import StepBatch
from pretrain.dist import World
from pretrain.run.heartbeat import Progress
from pretrain.run.stop import StopFlag
from pretrain.tracking.audit import read_audit
from pretrain.training.build import Run, build_run
from pretrain.training.claim import Claim, claim_run
from pretrain.training.loop import train

RANKS = 2
BLOCK_STEPS = 10  # One row of metrics a block.
COMPARED_STEPS = 10


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and the rows of 128 tokens that a rank takes a step."""

    preset: str
    rows: int
    rounds: int


SIZES = {"1M": Size("llama-tiny", rows=2, rounds=20), "5M": Size("llama-5m", rows=1, rounds=12)}


def plan_run(folder: str, name: str, size: Size, stage: int) -> RunConfig:
    """Returns the config of a run: the quickstart's, but for data, sizes and stage; nothing saved or validated."""
    settings: dict[str, Any] = {
        "data.path": f"{folder}/data",
        "run.dir": f"{folder}/runs",
        "run.name": name,
        "model.preset": size.preset,
        "batch.seq_len": 128,
        "batch.micro": size.rows,
        "batch.global_tokens": 128 * size.rows * RANKS,
        "optim.schedule.kind": "constant",
        "optim.schedule.warmup_steps": 0,
        "train.steps": 1_000_000,
        "eval.every_steps": 0,
        "engine.device": "cpu",
        "engine.zero_stage": stage,
        "engine.timeout_s": 60,
        "checkpoint.every_steps": 0,
        "tracking.log_every_steps": BLOCK_STEPS,
        "tracking.wandb": '"off"',
    }
    return load_config("configs/run/quickstart.yaml", [f"{key}={value}" for key, value in settings.items()])


class _EndOfBenchmark(Exception):  # noqa: N818 (nothing went wrong)
    """Raised in the loop to leave it without a checkpoint."""


class SteppedLoader:
    """The run's loader, at which the loop waits whenever it has taken the steps that it was granted."""

    def __init__(self, loader: Iterator[StepBatch]) -> None:
        self.loader, self._left = loader, 0
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._around: Callable[[], Any] = contextlib.nullcontext
        self._stack = contextlib.ExitStack()
        self._closed = False
        self.first: list[StepBatch] = []

    def __next__(self) -> StepBatch:
        """Called by the loop, once a step."""
        if not self._left:
            self._stack.close()
            self._done.release()
            self._go.acquire()
            if self._closed:
                raise _EndOfBenchmark
            self._stack.enter_context(self._around())
        self._left -= 1
        batch = next(self.loader)
        if len(self.first) < COMPARED_STEPS:
            self.first.append(batch)
        return batch

    def grant(self, steps: int, around: Callable[[], Any]) -> None:
        """Lets the loop take `steps` steps, from one fetch to another, in a context of its thread."""
        self._left, self._around = steps, around
        self._go.release()

    def wait(self) -> None:
        """Waits until the loop waits, or has ended."""
        self._done.acquire()

    def leave(self) -> None:
        """Tells whoever waits that the loop has ended."""
        self._done.release()

    def close(self) -> None:
        """Ends the loop at its next fetch."""
        self._closed = True
        self._go.release()


class Trainer:
    """A run of ours, built and trained by the functions of `pretrain train`, in a thread that can be held."""

    def __init__(self, config: RunConfig, world: World) -> None:
        stop = StopFlag()
        self._claim: Claim = claim_run(config, world, stop)
        self.run, state = build_run(self._claim, world, stop, Progress())
        self._loader = self.run.loader
        self.steps = SteppedLoader(self._loader)
        self.run.loader = self.steps  # type: ignore[assignment]
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._train, args=(self.run, state), daemon=True)
        self._thread.start()
        self._wait()

    def _train(self, run: Run, state: TrainState) -> None:
        try:
            train(run, state)
        except _EndOfBenchmark:
            pass
        except BaseException as error:  # Raised again in the main thread.
            self._error = error
        self.steps.leave()

    def take(self, steps: int, around: Callable[[], Any] = contextlib.nullcontext) -> None:
        """Takes some steps."""
        self.steps.grant(steps, around)
        self._wait()

    def _wait(self) -> None:
        self.steps.wait()
        if self._error is not None:
            raise self._error

    def losses(self) -> list[float]:
        """Returns the losses of the first steps, from the ledger (rank 0's; other ranks have none)."""
        rows = read_audit(self._claim.folder.audit)
        return [float.fromhex(row.loss) for row in rows[:COMPARED_STEPS]]

    def close(self) -> None:
        """Ends the thread and closes what `pretrain train` closes."""
        self.steps.close()
        self._thread.join()
        self._loader.close()
        self.run.tracker.close()
        if self.run.audit is not None:
            self.run.audit.close()
        if self._claim.lease is not None:
            self._claim.lease.release()
