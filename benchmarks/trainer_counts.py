"""Counts of an arm of benchmarks/trainer.py: bytes that a step sends, and the time between engine calls."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.trainer_ours import RANKS, Trainer
from benchmarks.trainer_peers import BareLoop
from pretrain.engine.engine import Update
from pretrain.types import Batch, FragmentStore

COUNTED_STEPS = 4

RING_PASSES = {
    "allreduce_": 2,
    "allgather_": 1,
    "_allgather_base_": 1,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_": 1,
    "broadcast_": 1,
    "barrier": 0,
}
"""Passes of the whole tensor round a ring of ranks: 2 for an all-reduce, 1 for a gather, a scatter or a broadcast."""


@dataclass
class Traffic:
    """Collectives of a rank, and the bytes that it sends in them where they are rings."""

    calls: int = 0
    num_bytes: int = 0


class TrafficCounter(TorchDispatchMode):
    """Counts the collectives of this thread, those that DDP starts in C++ too; one torch does not know is an error."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            passes = RING_PASSES[func.overloadpacket.__name__]
            whole = max(_tensor_bytes(arg) for arg in args[:2])
            self._traffic.calls += 1
            self._traffic.num_bytes += passes * whole * (RANKS - 1) // RANKS
        return func(*args, **(kwargs or {}))


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_tensor_bytes(item) for item in value) if isinstance(value, list | tuple) else 0


def count_traffic(arm: Trainer | BareLoop) -> dict[str, int]:
    """Returns what a step of an arm sends."""
    total = Traffic()
    arm.take(COUNTED_STEPS, partial(TrafficCounter, total))
    assert total.calls % COUNTED_STEPS == total.num_bytes % COUNTED_STEPS == 0, "steps differ in what they send"
    return {"collectives": total.calls // COUNTED_STEPS, "bytes": total.num_bytes // COUNTED_STEPS}


@dataclass
class ClockedEngine:
    """Clocks what the loop does between its calls to an engine: one entry a step, CPU and wall seconds."""

    engine: Any
    between: list[list[float]] = field(default_factory=list)
    left_at: tuple[float, float] | None = None

    @property
    def device(self) -> torch.device:
        """The engine's."""
        return self.engine.device

    @property
    def state(self) -> FragmentStore:
        """The engine's."""
        return self.engine.state

    def forward_backward(self, batch: Batch, scale: float, is_last: bool) -> Tensor:
        """See `Engine.forward_backward`."""
        self.between.append([0.0, 0.0])
        with self._call():
            return self.engine.forward_backward(batch, scale, is_last)

    def update(self, learning_rate: float) -> Update:
        """See `Engine.update`."""
        with self._call():
            return self.engine.update(learning_rate)

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        entered = time.thread_time(), time.perf_counter()
        if self.left_at is not None:
            for clock in range(2):
                self.between[-1][clock] += entered[clock] - self.left_at[clock]
        yield
        self.left_at = time.thread_time(), time.perf_counter()


def clock_loop(ours: Trainer, steps: int) -> dict[str, float]:
    """Returns microseconds a step that our loop takes outside the engine; the first, without a start, is left out."""
    clocked = ClockedEngine(ours.run.engine)
    ours.run.engine = clocked
    ours.take(steps + 1)
    ours.run.engine = clocked.engine
    cpu, wall = 1e6 * np.array(clocked.between[1:]).T
    return {"cpu_us": round(float(cpu.mean()), 1), "wall_us_median": round(float(np.median(wall)), 1)}
