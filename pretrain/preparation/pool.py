"""Runs a task on parts over spawned workers, which stop by a flag and die with their parent.

    WorkerPool.run -> one process: in this one; more: a ProcessPoolExecutor, some parts submitted ahead
      worker: shared lock, parent watch, start -> each part -> progress into its cells

Progress and the stop flag are plain shared memory without locks, because a worker that the kernel
kills would never release one. Fork is not used: the threads of `tokenizers` do not survive it.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from pretrain.preparation.input_parts import WHOLE, InputPart, Report, Share, Work
from pretrain.preparation.output import TOKENIZER_NAME, hold_as_worker
from pretrain.preparation.part_record import PartRecord, load_records, remove_leftovers
from pretrain.preparation.progress import Progress, no_progress
from pretrain.utils.process import die_with, usable_cores

POLL_S = 0.2
# One process is one core: `tokenizers` reads this variable at each call.
ONE_CORE = {"TOKENIZERS_PARALLELISM": "false"}


# Loads the needs of the work on parts, once a process; sent to the workers.
Start = Callable[[], Work]


@dataclass(frozen=True)
class ShardJob:
    """The shard folder of a job, and the parts of its input."""

    folder: Path
    parts: list[InputPart]  # of all shares

    @property
    def tokenizer_path(self) -> Path:
        """File of the tokenizer."""
        return self.folder / TOKENIZER_NAME

    @property
    def num_bytes(self) -> int:
        """Input bytes as stored."""
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """Worker processes on the parts of a shard folder, or of a share of it."""

    folder: Path
    progress: Progress = no_progress
    processes: int | None = None  # None: one a core
    share: Share = WHOLE

    def run(
        self,
        start: Start,
        parts: Sequence[InputPart],
        todo: Sequence[InputPart],
        phase: str,
        earlier_documents: int = 0,
    ) -> None:
        """Does the work on the parts `todo` of `parts`, in any order; progress counts the others as done.

        Errors of the work end it. Raises: BrokenProcessPool: A worker was killed;
        KeyboardInterrupt.
        """
        total_bytes = sum(part.num_bytes for part in parts)
        earlier_bytes = total_bytes - sum(part.num_bytes for part in todo)

        def tick(num_bytes: int, num_documents: int) -> None:
            done_bytes = earlier_bytes + num_bytes
            self.progress(phase, done_bytes, total_bytes, earlier_documents + num_documents)

        num_workers = min(self.processes or usable_cores(), len(todo))
        if num_workers <= 1:
            _run_here(start, todo, tick)
        else:
            _run_pool((start, self.folder, self.share), todo, num_workers, tick)

    def write_parts(
        self, start: Start, parts: Sequence[InputPart], tokenizer_sha256: str, phase: str
    ) -> dict[int, PartRecord]:
        """Does the work on the parts that have no record yet; returns the records of all, by number."""
        records = load_records(self.folder, parts, tokenizer_sha256)
        remove_leftovers(self.folder, parts, records)
        todo = [part for part in parts if part.number not in records]
        earlier_documents = sum(record.num_documents for record in records.values())
        self.run(start, parts, todo, phase, earlier_documents)
        records = load_records(self.folder, parts, tokenizer_sha256)
        assert len(records) == len(parts), "every part that was written has a record"
        total_bytes = sum(part.num_bytes for part in parts)
        num_documents = sum(record.num_documents for record in records.values())
        self.progress(phase, total_bytes, total_bytes, num_documents)
        return records


def _run_here(start: Start, parts: Sequence[InputPart], tick: Report) -> None:
    done_bytes = 0
    done_documents = 0

    def report(num_bytes: int, num_documents: int) -> None:
        nonlocal done_bytes, done_documents
        done_bytes += num_bytes
        done_documents += num_documents
        tick(done_bytes, done_documents)

    before = {name: os.environ[name] for name in ONE_CORE if name in os.environ}
    os.environ.update(ONE_CORE)
    try:
        work = start()
        for part in parts:
            work(part, report)
    finally:
        for name in ONE_CORE:
            del os.environ[name]
        os.environ.update(before)


def _run_pool(task: tuple[Start, Path, Share], parts: Sequence[InputPart], processes: int, tick: Report) -> None:
    context = multiprocessing.get_context("spawn")
    cells = context.RawArray("Q", 2 * (parts[-1].number + 1))
    stop = context.RawValue("b", 0)
    todo = iter(parts)
    with ProcessPoolExecutor(processes, context, _start_worker, (*task, cells, stop)) as pool:
        running: set[Future[None]] = set()
        try:
            while True:
                while len(running) < 2 * processes and (part := next(todo, None)) is not None:
                    with _sigint_blocked():
                        running.add(pool.submit(_work_in_worker, part))
                if not running:
                    break
                done, running = wait(running, POLL_S, FIRST_COMPLETED)
                for future in done:
                    future.result()
                tick(sum(cells[0::2]), sum(cells[1::2]))
        except BaseException:
            stop.value = 1
            pool.shutdown(cancel_futures=True)
            raise


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Starts processes that never see Ctrl-C: this one decides when all stop."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _StopError(Exception):
    """The stop flag is set."""


# Set once a process, by the pool's initializer: shared memory cannot be sent with a task.
_work_on: Callable[[InputPart], None] | None = None


def _start_worker(start: Start, folder: Path, share: Share, cells: Any, stop: Any) -> None:
    global _work_on
    hold_as_worker(folder, share)
    _die_with_parent()
    os.environ.update(ONE_CORE)
    work = start()

    def work_on(part: InputPart) -> None:
        first = 2 * part.number

        def report(num_bytes: int, num_documents: int) -> None:
            cells[first] += num_bytes
            cells[first + 1] += num_documents
            if stop.value:
                raise _StopError

        work(part, report)
        cells[first] = part.num_bytes

    _work_on = work_on


def _work_in_worker(part: InputPart) -> None:
    """Does one part. Raises: _StopError, within a batch of the stop flag being set."""
    assert _work_on is not None
    _work_on(part)


def _die_with_parent() -> None:
    """Ends this process with its parent: an orphan could write into a folder that others reuse.

    On Linux by the kernel: while native code holds the interpreter, no thread of this process runs.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    die_with(parent.pid)

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if not parent.is_alive():
        os._exit(1)
