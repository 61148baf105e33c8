"""Ranks in this process, on a clock that goes on only while all of them wait: a job stands still
for hours in no time.

    job = SimulatedJob(monkeypatch, world_size=3, folder=tmp_path)
    job.run(program, timeout_s)    program(rank) is what the main thread of each rank does, beside a watchdog
    job.ranks[1].code              its exit code; None: it is frozen

Watchdog, messenger, board and heartbeats are the product's, threads included; `time`, `threading`
and `os._exit` of their modules are the simulation's, and the store is one in memory, which stands
still or breaks with the rank that keeps it. One thread runs at a time, until it waits; then the one
whose wait ends first, and the clock is set to that."""

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as td

from pretrain.run import heartbeat, watchdog
from pretrain.run.heartbeat import Board, Progress
from pretrain.run.watchdog import Watchdog

ANSWER_S = 0.001
"""What one question to the store takes."""
LONGEST_S = 1e4
"""A job that has not ended after so many seconds of its clock never will."""


class Gone(BaseException):
    """Unwinds a thread whose process is no more."""


class Task:
    """A thread of a rank; it has the turn, or waits for it."""

    def __init__(self, job: "SimulatedJob", rank: "Rank", target: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.job, self.rank, self._target, self._args = job, rank, target, args
        self.turn = threading.Lock()
        self.turn.acquire()
        self.wakes_at, self.is_so = job.now, bool
        self.has_ended = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        job.tasks.append(self)

    def _run(self) -> None:
        self.job.here.task = self
        self.turn.acquire()
        try:
            if not self.rank.is_gone:
                self._target(*self._args)
        except Gone:
            pass
        except BaseException as error:
            self.job.error = error
        finally:
            self.has_ended = True
            self.job.give_back()


class Event:
    """As `threading.Event`."""

    def __init__(self, job: "SimulatedJob") -> None:
        self._job, self._is_set = job, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, seconds: float = math.inf) -> bool:
        return self._job.wait(seconds, self.is_set)


class Thread:
    """As `threading.Thread`: it belongs to the rank whose thread makes it."""

    def __init__(self, job: "SimulatedJob", target: Callable[..., Any], args: tuple[Any, ...] = (), **_: Any) -> None:
        self._job, self._target, self._args = job, target, args

    def start(self) -> None:
        self._task = Task(self._job, self._job.here.task.rank, self._target, self._args)

    def join(self, seconds: float = math.inf) -> None:
        self._job.wait(seconds, lambda: self._task.has_ended)


class Rank:
    """A process of the job, seen by its main thread."""

    def __init__(self, job: "SimulatedJob", number: int) -> None:
        self.job, self.number = job, number
        self.log = job.folder / str(number)
        self.is_frozen, self.is_gone = False, False
        self.code: int | None = None
        self.ended_at = math.inf
        self.num_begun = 0
        """Collectives."""
        self.late_s = 0.0
        """After the end of another rank, until its lost connection shows."""
        self.farewells: list[tuple[int, str]] = []
        self.main: Task | None = None

    def live(self, program: Callable[["Rank"], object], timeout_s: float) -> None:
        """The main thread: a watchdog and the program, whose lost connections are explained as a
        trainer does."""
        self.progress = Progress()
        self.dog = Watchdog(self.progress, self.number, self.job.world_size, timeout_s)
        self.log.touch()
        self.dog.log_file = self.log
        self.dog.farewell = lambda code, reason: self.farewells.append((code, reason))
        self.dog.start()
        try:
            program(self)
        except RuntimeError:
            verdict = self.dog.explain()
            self.log.write_text(verdict.text)
            self.exit(verdict.exit_code)
        self.exit(0)

    def sleep(self, seconds: float) -> None:
        """Works for so long."""
        self.job.wait(seconds)

    def hang(self) -> None:
        """Never returns."""
        self.job.wait()

    def freeze(self) -> None:
        """SIGSTOP."""
        self.is_frozen = True
        self.sleep(0.0)

    def go_on(self) -> None:
        """SIGCONT."""
        self.is_frozen = False

    def exit(self, code: int) -> None:
        """Ends the process at once."""
        self.is_gone, self.code, self.ended_at = True, code, self.job.now
        raise Gone

    def all_reduce(self) -> None:
        """Meets the other ranks. Raises: RuntimeError where one of them is gone."""
        self.num_begun += 1
        late = [other for other in self.job.ranks if other is not self]
        self.job.wait(is_so=lambda: any(o.is_gone for o in late) or all(o.num_begun >= self.num_begun for o in late))
        if any(other.num_begun < self.num_begun for other in late):
            self.sleep(self.late_s)
            raise RuntimeError("Connection closed by peer")


class Store:
    """A rank's connection to the job's store."""

    def __init__(self, job: "SimulatedJob") -> None:
        self._job = job

    def __getattr__(self, name: str) -> Callable[..., Any]:
        job, keeper, call = self._job, self._job.ranks[0], getattr(self._job.store, name)

        def ask(*arguments: Any) -> Any:
            job.wait(job.answer_s.get(job.here.task.rank.number, ANSWER_S))
            job.wait(is_so=lambda: keeper.is_gone or not keeper.is_frozen)
            if keeper.is_gone:
                raise td.DistNetworkError("Connection reset by peer")
            return call(*arguments)

        return ask


class SimulatedJob:
    """All ranks, their clock and their store, which rank 0 keeps.

    Attributes:
        now: The clock.
        answer_s: What a question to the store takes, for ranks to which it takes longer.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world_size: int, folder: Path) -> None:
        self.world_size, self.folder = world_size, folder
        self.now, self.answer_s = 1000.0, dict[int, float]()
        self.store = td.HashStore()
        self.tasks: list[Task] = []
        self.error: BaseException | None = None
        self.here = threading.local()
        self._returned = threading.Semaphore(0)
        self.ranks = [Rank(self, number) for number in range(world_size)]
        self._replace(monkeypatch)

    def _replace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        job = self

        class MemoryBoard(Board):
            def __init__(self, host: str, port: int) -> None:
                self._store = Store(job)

        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.wait)
        threads = SimpleNamespace(
            Event=lambda: Event(self),
            Lock=threading.Lock,
            Thread=lambda **options: Thread(self, **options),
            main_thread=lambda: self.here.task.rank.main.thread,
        )
        for module in (heartbeat, watchdog):
            monkeypatch.setattr(module, "time", clock)
            monkeypatch.setattr(module, "threading", threads)
        monkeypatch.setattr(heartbeat, "Board", MemoryBoard)
        monkeypatch.setattr(heartbeat, "_listens", lambda address: self.ranks[0].main is not None)
        monkeypatch.setattr(watchdog, "num_collectives", lambda: self.here.task.rank.num_begun)
        exits = {"_exit": lambda code: self.here.task.rank.exit(code)}
        monkeypatch.setattr(watchdog, "os", SimpleNamespace(**vars(os) | exits))
        monkeypatch.setenv("MASTER_ADDR", "n0")
        monkeypatch.setenv("MASTER_PORT", "29500")

    def run(self, program: Callable[[Rank], object], timeout_s: float, absent: tuple[int, ...] = ()) -> None:
        """Runs the ranks until each has ended or is frozen, or is `absent` from the start."""
        for rank in self.ranks:
            if rank.number not in absent:
                rank.main = Task(self, rank, rank.live, (program, timeout_s))
        try:
            while task := self._next():
                self.now = max(self.now, self.now if task.is_so() else task.wakes_at)
                assert self.now < LONGEST_S, "the job never ends"
                self._give_turn(task)
                if self.error is not None:
                    raise self.error
        finally:
            for task in self.tasks:
                task.rank.is_gone = True
                while not task.has_ended:
                    self._give_turn(task)

    def stop_all(self, seconds: float) -> None:
        """Stops all ranks for so long; called by one of them."""

        def go_on() -> None:
            for rank in self.ranks:
                rank.go_on()

        for rank in self.ranks:
            rank.is_frozen = True
        self.later(seconds, go_on)
        self.here.task.rank.sleep(0.0)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Does something from outside of the ranks, in so long."""
        Task(self, Rank(self, -1), lambda: (self.wait(seconds), action()), ())

    def wait(self, seconds: float = math.inf, is_so: Callable[[], bool] = bool) -> bool:
        """Gives the turn to others for so long, or until `is_so`; returns whether it is."""
        task = self.here.task
        task.wakes_at, task.is_so = self.now + seconds, is_so
        self.give_back()
        task.turn.acquire()
        if task.rank.is_gone:
            raise Gone
        return is_so()

    def give_back(self) -> None:
        """Ends the turn of this thread."""
        self._returned.release()

    def _give_turn(self, task: Task) -> None:
        task.turn.release()
        self._returned.acquire()

    def _next(self) -> Task | None:
        """Returns the thread whose wait ends first; None where no wait ever will."""
        waiting = [task for task in self.tasks if not (task.has_ended or task.rank.is_gone or task.rank.is_frozen)]
        ends = [(self.now if task.is_so() else task.wakes_at, number) for number, task in enumerate(waiting)]
        end, number = min(ends, default=(math.inf, 0))
        return waiting[number] if end < math.inf else None
