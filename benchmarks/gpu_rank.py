"""A rank of a job of the arm `ranks`: it imports, waits, and runs the tasks of FOLDER/tasks.json one after another.

    python -m benchmarks.gpu_rank FOLDER cuda|cpu     RANK, WORLD_SIZE and the rest are in the environment

    FOLDER/ready-RANK        all is imported
    FOLDER/tasks.json        a list of `Task`
    FOLDER/done.jsonl        a row of each task that has ended, by rank 0
    FOLDER/saves-RANK.jsonl  seconds in which each save held this rank, of tasks that time them

A task is a call of the command line, `pretrain train CONFIG KEY=VALUE ...`, or the group `abort`. After one that ends
with another code than 0 or 75 the process leaves with it.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as td
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.common import append_row
from benchmarks.trainer_peers import forget_accelerate
from pretrain import cli, dist
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.config.engine import EngineConfig
from pretrain.engine import deepspeed_engine
from pretrain.engine.build import import_packages
from pretrain.errors import EXIT_OK, EXIT_RESUME_ME

POLL_S = 0.02
CHANCE = 0.3
"""Share of the places where a disturbed run sleeps."""
DEVICE_SLEEP = 20_000_000
"""Most cycles of a sleep on a stream: 10 ms at 2 GHz."""
HOST_SLEEP_S = 0.003
UPDATE_SLEEP = 5 * DEVICE_SLEEP
"""Cycles between the work of the optimizer and what is queued behind it, in every step: long enough for the host to be
in the next forward pass."""
COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "all_to_all_single",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
)
"""Methods of torch's ProcessGroup, to which every caller comes, whichever function it holds."""


@dataclass(frozen=True)
class Task:
    """A task of a rank.

    Attributes:
        name: Name of its row.
        arguments: Arguments of `pretrain`; none: the group `abort`.
        disturbs: It sleeps at random on every stream and around every collective.
        unordered: A wait of ours is left out: a disturbed run must show it.
        times_saves: The seconds in which each save holds this rank are written.
    """

    name: str
    arguments: list[str] = field(default_factory=list)
    disturbs: bool = False
    unordered: bool = False
    times_saves: bool = False


class Sleeper:
    """Sleeps at random, on the current stream of a GPU and on the host; only the latter on a CPU."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.sleeps = 0
        """Number of sleeps so far."""

    def nap(self) -> None:
        """Sleeps, now and then."""
        if torch.cuda.is_initialized() and self._chance.random() < CHANCE:
            torch.cuda._sleep(self._chance.randrange(DEVICE_SLEEP))
            self.sleeps += 1
        if self._chance.random() < CHANCE:
            time.sleep(self._chance.random() * HOST_SLEEP_S)
            self.sleeps += 1

    def after_update(self, *_: Any) -> None:
        """Sleeps behind the work of an optimizer, before its results are copied to the weights."""
        if torch.cuda.is_initialized():
            torch.cuda._sleep(UPDATE_SLEEP)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a call that sleeps before and after."""

        def disturbed(*arguments: Any, **named: Any) -> Any:
            self.nap()
            result = call(*arguments, **named)
            self.nap()
            return result

        return disturbed


@contextlib.contextmanager
def disturbed(seed: int) -> Iterator[Sleeper]:
    """Context in which streams, collectives and updates are disturbed by random sleeps."""
    sleeper = Sleeper(seed)
    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            if (method := getattr(td.ProcessGroup, name, None)) is not None:
                stack.enter_context(mock.patch.object(td.ProcessGroup, name, sleeper.around(method)))
        enter = sleeper.around(torch.cuda.StreamContext.__enter__)
        stack.enter_context(mock.patch.object(torch.cuda.StreamContext, "__enter__", enter))
        handle = register_optimizer_step_post_hook(sleeper.after_update)
        stack.callback(handle.remove)
        yield sleeper


@contextlib.contextmanager
def unordered() -> Iterator[None]:
    """Context without a wait: on a GPU of gathers for the update, on a CPU of the host for the sums of a step."""
    if torch.cuda.is_available():
        with mock.patch.object(deepspeed_engine, "order_gathers", lambda optimizer: None):
            yield
        return

    def start(values: torch.Tensor) -> Callable[[], torch.Tensor]:
        td.all_reduce(values, async_op=True)
        return values.clone  # whatever they are by then

    with mock.patch.object(dist, "start_all_reduce_sum", start):
        yield


@contextlib.contextmanager
def timed_saves(path: Path) -> Iterator[None]:
    """Context in which the seconds of each `CheckpointManager.begin`, which holds training, are written."""
    begin = CheckpointManager.begin

    def timed(*arguments: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        save = begin(*arguments, **named)
        append_row(path, {"step": save.step, "stall_s": round(time.perf_counter() - begun, 5)})
        return save

    with mock.patch.object(CheckpointManager, "begin", timed):
        yield


def run_task(task: Task, folder: Path, rank: int) -> tuple[int, dict[str, Any]]:
    """Runs a task that trains; returns its exit code, and figures of its row."""
    # Of the last task: what accelerate knows of it, the engine, compiled code.
    forget_accelerate()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    sleeper = None
    with contextlib.ExitStack() as stack:
        if task.disturbs:
            sleeper = stack.enter_context(disturbed(seed=rank))
        if task.unordered:
            stack.enter_context(unordered())
        if task.times_saves:
            stack.enter_context(timed_saves(folder / f"saves-{rank}.jsonl"))
        code = cli.run(task.arguments)
    return code, {} if sleeper is None else {"sleeps": sleeper.sleeps}


ABORT_AFTER_S = 2.0
GENERATIONS = 3
SUMS = 20


def abort_groups(device: str, rank: int) -> Iterator[dict[str, Any]]:
    """Makes a group, leaves rank 0 alone in a collective, aborts the group, and makes the next one; yields figures."""
    # Else torch's own thread ends the process once a group is aborted.
    os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
    store = td.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)
    for generation in range(GENERATIONS):
        begun = time.perf_counter()
        own = td.PrefixStore(f"generation-{generation}", store)
        td.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=2, store=own)
        values = torch.ones(2**20, device=device)
        td.all_reduce(values)
        is_right = float(values[0]) == 2.0
        meeting_s = time.perf_counter() - begun
        begun = time.perf_counter()
        for _ in range(SUMS):
            td.all_reduce(values)
        float(values[0])
        sum_ms = (time.perf_counter() - begun) / SUMS * 1e3
        freed_s, error = _wait_alone(values) if rank == 0 else (0.0, "")
        if rank:
            # On a CPU an abort frees no rank: gloo ends a wait when the peer's process, or its group, has gone.
            time.sleep(2 * ABORT_AFTER_S)
        td.distributed_c10d._abort_process_group()
        yield {
            "generation": generation,
            "meeting_s": round(meeting_s, 3),
            "right": is_right,
            "sum_ms": round(sum_ms, 2),
            "freed_s": round(freed_s, 3),
            "error": error,
        }


def _wait_alone(values: torch.Tensor) -> tuple[float, str]:
    """Begins a collective that no other rank joins; returns seconds from the abort to its end, and its error."""

    def abort() -> None:
        for group in list(td.distributed_c10d._world.pg_map):
            group.abort()

    threading.Timer(ABORT_AFTER_S, abort).start()
    begun, error = time.perf_counter(), ""
    try:
        td.all_reduce(values)
        if values.is_cuda:
            torch.cuda.synchronize()
    except RuntimeError as failure:
        error = str(failure).splitlines()[0][:200]
    return time.perf_counter() - begun - ABORT_AFTER_S, error


def main() -> None:
    """Runs the tasks, once they are there; returns the exit code of the last one."""
    folder, device = Path(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["RANK"])
    for module in ("accelerate", "pretrain.training.run"):
        importlib.import_module(module)
    import_packages(EngineConfig(device=device))
    (folder / f"ready-{rank}").touch()
    path = folder / "tasks.json"
    while not path.exists():
        time.sleep(POLL_S)
    code = EXIT_OK
    for task in [Task(**row) for row in json.loads(path.read_text())]:
        begun = time.perf_counter()
        if task.arguments:
            code, figures = run_task(task, folder, rank)
        else:
            figures = {"generations": list(abort_groups(device, rank))}
        if rank == 0:
            row = {"code": code, "seconds": round(time.perf_counter() - begun, 2), **figures}
            append_row(folder / "done.jsonl", row)
        if code not in (EXIT_OK, EXIT_RESUME_ME):
            break
    dist.leave(code)


if __name__ == "__main__":
    main()
