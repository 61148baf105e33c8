"""Runs a task on parts over processes: spawned workers that stop by a flag, and die with their parent.

    run_task -> one process: in this one; more: a ProcessPoolExecutor, a bounded number of parts submitted ahead
      worker: shared lock, parent watch, PartTask.start  ->  each part  ->  progress into its part's own cells

Progress and the stop flag are plain shared memory without locks: a worker that the kernel kills can hold none.
Fork is not used: the threads of `tokenizers` do not survive it.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol

from pretrain.errors import DataError
from pretrain.prepare.input_parts import WHOLE, InputPart, Share
from pretrain.prepare.output import hold_as_worker
from pretrain.prepare.part import Report

POLL_S = 0.2

Tick = Callable[[int, int], None]
"""Called with the input bytes and documents done so far by the parts of this call."""

Work = Callable[[InputPart, Report], None]
"""Does one part."""


def num_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def name_failures(folder: Path) -> Iterator[None]:
    """Turns the death of a worker and failed reads into a DataError with its fix. Finished parts are kept."""
    try:
        yield
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, most likely killed for want of memory",
            where=str(folder),
            fix="run the same command again with fewer --processes; finished parts are kept",
        ) from error
    except OSError as error:
        if error.filename is None:
            raise
        raise DataError(
            f"cannot be read: {error.strerror}",
            where=str(error.filename),
            fix="fix the access problem and run the same command again; finished parts are kept",
        ) from error


class PartTask(Protocol):
    """The work on each part; sent to the workers."""

    @property
    def folder(self) -> Path:
        """The shard folder."""

    def start(self) -> Work:
        """Loads the needs of the work, once a process."""


def run_task(task: PartTask, parts: Sequence[InputPart], processes: int, tick: Tick, share: Share = WHOLE) -> None:
    """Runs `task` on the parts of a share, in any order.

    Raises:
        DataError: Malformed input.
        DiskError: The disk refused.
        BrokenProcessPool: A worker was killed.
        KeyboardInterrupt: Passed on after all workers have stopped.
    """
    if min(processes, len(parts)) <= 1:
        _run_here(task, parts, tick)
        return
    _run_pool(task, parts, min(processes, len(parts)), tick, share)


def _run_here(task: PartTask, parts: Sequence[InputPart], tick: Tick) -> None:
    done_bytes = done_documents = 0

    def report(num_bytes: int, num_documents: int) -> None:
        nonlocal done_bytes, done_documents
        done_bytes, done_documents = done_bytes + num_bytes, done_documents + num_documents
        tick(done_bytes, done_documents)

    with _single_threaded_tokenizers():
        work = task.start()
        for part in parts:
            work(part, report)


@contextlib.contextmanager
def _single_threaded_tokenizers() -> Iterator[None]:
    """One process is one core: `tokenizers` reads this variable at each call."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _run_pool(task: PartTask, parts: Sequence[InputPart], processes: int, tick: Tick, share: Share) -> None:
    context = multiprocessing.get_context("spawn")
    cells = context.RawArray("Q", 2 * (parts[-1].number + 1))
    stop = context.RawValue("b", 0)
    todo = iter(parts)
    arguments = (task, share, cells, stop)
    with ProcessPoolExecutor(processes, context, _start_worker, arguments) as pool:
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
    """Starts processes that never see Ctrl-C; this one gets it at the end, and decides when all stop."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _StopError(Exception):
    """The stop flag is set."""


class _Worker:
    """State of a worker process."""

    def __init__(self, work: Work, cells: Any, stop: Any) -> None:
        self._work, self._cells, self._stop = work, cells, stop

    def do(self, part: InputPart) -> None:
        """Does one part. Raises: _StopError, within a batch of the stop flag being set."""
        self._work(part, self._report_to(part.number))
        self._cells[2 * part.number] = part.num_bytes

    def _report_to(self, number: int) -> Report:
        def report(num_bytes: int, num_documents: int) -> None:
            self._cells[2 * number] += num_bytes
            self._cells[2 * number + 1] += num_documents
            if self._stop.value:
                raise _StopError

        return report


# Set once a process, by the pool's initializer: shared memory cannot be sent with a task.
_worker: _Worker | None = None


def _start_worker(task: PartTask, share: Share, cells: Any, stop: Any) -> None:
    global _worker
    hold_as_worker(task.folder, share)
    _die_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = _Worker(task.start(), cells, stop)


def _work_in_worker(part: InputPart) -> None:
    assert _worker is not None
    _worker.do(part)


def _die_with_parent() -> None:
    """Ends this process with its parent, so that no orphan writes into a folder that others reuse."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if not parent.is_alive():
        os._exit(1)
