"""Health of the ranks of a run: the slow ones, and those whose memory grows, by name.

    measures  ->  exchange of the step  ->  judge, the same on all ranks
    a change  ->  warning, alert, note of run.json

Each rank sends its forward time of the step before and its growth of host memory, in a place of its
own of the exchange that a step makes anyway. Ranks of a group that shares rows, matrices or experts
wait for each other within the forward pass, and are slow together.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as td

from pretrain import dist
from pretrain.dist import World, ranks_of_node
from pretrain.doctor.gpu_state import describe_gpu
from pretrain.doctor.machine import read_memory
from pretrain.errors import ConfigError, DiskError
from pretrain.run.folder import RunDir, change_record
from pretrain.run.memory_growth import MemoryGrowth, own_bytes
from pretrain.run.rank_notes import add_note, end_note
from pretrain.run.slow_ranks import STEPS, SlowRanks
from pretrain.tracking.own_time import OwnTime

log = logging.getLogger(__name__)

_GIB = 2**30
_ENDS = {"slow": "is as fast as the others again", "growth": "its host memory grows no more"}

Tell = Callable[[str, str], None]
_Signs = dict[tuple[int, str], float]


@contextmanager
def timed_waits(own: OwnTime, *, is_wanted: bool) -> Iterator[None]:
    """Leaves waits for collectives out of a rank's time, where forward passes have some."""
    if not is_wanted:
        yield
        return
    wait = td.Work.wait

    def timed(work: td.Work, *arguments: Any, **named: Any) -> bool:
        with own.waiting():
            return wait(work, *arguments, **named)

    td.Work.wait = timed
    try:
        yield
    finally:
        td.Work.wait = wait


class RankHealth:
    """Signs of illness of the ranks, the same on all of them.

    Args:
        folder: Run, whose record gets notes on rank 0.
        device: That of this rank.
        steps: The last one that is done, and the last one of the run.
        is_timed: Whether the forward time of this rank has no waits for others.
    """

    def __init__(
        self,
        world: World,
        folder: RunDir,
        device: torch.device,
        steps: tuple[int, int],
        *,
        is_timed: bool = True,
    ) -> None:
        self._world = world
        self._folder = folder
        self._device = device
        self._step, self._last_step = steps
        self._is_timed = is_timed
        self._slow = SlowRanks()
        self._memory = MemoryGrowth()
        self._growth = 0.0
        self._signs: _Signs = {}

    def measures(self, forward_s: float) -> list[float]:
        """Returns the measures of this rank at its places in [2, ranks], flattened, else zeros.

        `forward_s`: of the last step; 0: of none. Empty for a rank alone.
        """
        if self._memory.is_due(self._step):
            self._memory.add(self._step, own_bytes())
            self._growth = self._leak()
        size = self._world.size
        if size == 1:
            return []
        places = [0.0] * (2 * size)
        places[self._world.rank] = forward_s if self._is_timed else 0.0
        places[size + self._world.rank] = self._growth
        return places

    def _leak(self) -> float:
        """Returns bytes a step by which the memory of this rank grows to its end; 0: it is well."""
        growth = self._memory.bytes_a_step
        if not growth or (self._world.rank, "growth") in self._signs:
            return growth
        steps_to_go = self._last_step - self._step
        return growth if self._memory.is_leak(self._steps_left(growth), steps_to_go) else 0.0

    def _steps_left(self, growth: float) -> float:
        return read_memory()[1] / (growth * ranks_of_node(self._world))

    def judge(self, step: int, totals: Sequence[float], tell: Tell) -> None:
        """Names ranks that begin or end to be slow, or to grow. Collective where there are any.

        `totals`: sums of `measures` over the ranks; `tell` sends an alert with a title.
        """
        self._step = step
        size = self._world.size
        self._slow.add(totals[:size])
        growths = enumerate(totals[size:] if totals else [self._growth])
        signs = {(rank, "slow"): times for rank, times in self._slow.slow.items()}
        signs |= {(rank, "growth"): growth for rank, growth in growths if growth}
        before = self._signs
        self._signs = signs
        if before.keys() != signs.keys():
            self._tell(step, before, tell)

    def _tell(self, step: int, before: _Signs, tell: Tell) -> None:
        changed = sorted(before.keys() ^ self._signs.keys())
        is_mine = any(rank == self._world.rank for rank, _ in changed)
        facts = dist.gather_objects(self._describe_self() if is_mine else {})
        if not self._world.is_main:
            return
        noted = {sign: self._describe(sign, facts[sign[0]]) for sign in changed}
        for (rank, kind), line in noted.items():
            log.warning("step %d: %s", step, line)
            if (rank, kind) in self._signs:
                tell({"slow": "A slow rank", "growth": "Host memory grows"}[kind], line)
        try:
            change_record(self._folder, partial(self._note, step, noted))
        except (ConfigError, DiskError) as error:
            log.warning("%s", error)

    def _note(self, step: int, lines: dict[tuple[int, str], str], record: dict[str, Any]) -> None:
        attempt = record["attempts"][-1]
        for (rank, kind), line in lines.items():
            if (rank, kind) in self._signs:
                add_note(attempt, rank, kind, step, line)
            else:
                end_note(attempt, rank, kind, step)

    def _describe_self(self) -> dict[str, Any]:
        place = f"rank {self._world.rank} on {socket.gethostname()}"
        state = ""
        if self._device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._device)
            place = f"{place}, GPU {self._world.local_rank} ({properties.name})"
            state = describe_gpu(f"GPU-{properties.uuid}")
        else:
            place = f"{place}, process {os.getpid()}"
        steps_left = self._steps_left(self._growth) if self._growth else 0.0
        return {"place": place, "state": state, "steps_left": steps_left}

    def _describe(self, sign: tuple[int, str], facts: dict[str, Any]) -> str:
        _, kind = sign
        value = self._signs.get(sign)
        if value is None:
            return f"{facts['place']}: {_ENDS[kind]}"
        if kind == "growth":
            room = f"there is room for {facts['steps_left']:,.0f} steps more"
            return f"{facts['place']}: its host memory grows by {value:,.0f} bytes a step; {room}"
        state = f"; {facts['state']}" if facts["state"] else ""
        slow = f"computes {value:.2f} times as long as the median of the others, over {STEPS} steps"
        return f"{facts['place']}: {slow}{state}"

    def metrics(self) -> dict[str, float]:
        """Returns `slow_rank/R`, over the median of others, and `memory_growth/R`, bytes a step."""
        names = {"slow": "slow_rank", "growth": "memory_growth"}
        return {f"{names[kind]}/{rank}": value for (rank, kind), value in self._signs.items()}
