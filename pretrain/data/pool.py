"""Runs parts over processes: spawned workers that stop when told to, and die when their parent does.

    run_parts -> one process: in this one; more: a ProcessPoolExecutor, a bounded number of parts submitted ahead
      worker: shared lock, parent watch, tokenizer  ->  write_part  ->  progress into its part's own cells

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
from multiprocessing import connection
from pathlib import Path
from typing import Any

from pretrain.data.lock import hold_as_worker
from pretrain.data.part import PartSettings, Report, write_part
from pretrain.data.sources import Part
from pretrain.data.tokenizer import Encoder, build_encoder, load_tokenizer

POLL_S = 0.2

Tick = Callable[[int, int], None]
"""Called with the input bytes and documents done so far by the parts of this call."""


def run_parts(settings: PartSettings, tokenizer_path: Path, parts: Sequence[Part], processes: int, tick: Tick) -> None:
    """Writes `parts`, in any order.

    Raises:
        DataError: Malformed input.
        DiskError: The disk refused.
        BrokenProcessPool: A worker was killed.
        KeyboardInterrupt: Passed on after all workers have stopped.
    """
    if min(processes, len(parts)) <= 1:
        _run_here(settings, build_encoder(load_tokenizer(tokenizer_path)), parts, tick)
        return
    _run_pool(settings, tokenizer_path, parts, min(processes, len(parts)), tick)


def _run_here(settings: PartSettings, encoder: Encoder, parts: Sequence[Part], tick: Tick) -> None:
    done_bytes = done_documents = 0

    def report(num_bytes: int, num_documents: int) -> None:
        nonlocal done_bytes, done_documents
        done_bytes, done_documents = done_bytes + num_bytes, done_documents + num_documents
        tick(done_bytes, done_documents)

    with _single_threaded_tokenizers():
        for part in parts:
            write_part(settings, encoder, part, report)


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


def _run_pool(settings: PartSettings, tokenizer_path: Path, parts: Sequence[Part], processes: int, tick: Tick) -> None:
    context = multiprocessing.get_context("spawn")
    cells = context.RawArray("Q", 2 * (parts[-1].number + 1))
    stop = context.RawValue("b", 0)
    todo = iter(parts)
    arguments = (settings, tokenizer_path, cells, stop)
    with ProcessPoolExecutor(processes, context, _start_worker, arguments) as pool:
        running: set[Future[None]] = set()
        try:
            while True:
                while len(running) < 2 * processes and (part := next(todo, None)) is not None:
                    with _sigint_blocked():
                        running.add(pool.submit(_write_in_worker, part))
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
    """A process started meanwhile never sees Ctrl-C; ours gets it at the end. The parent decides when all stop."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _StopError(Exception):
    """The parent wants no more."""


class _Worker:
    """What a worker process holds between parts."""

    def __init__(self, settings: PartSettings, encoder: Encoder, cells: Any, stop: Any) -> None:
        self._settings, self._encoder, self._cells, self._stop = settings, encoder, cells, stop

    def write(self, part: Part) -> None:
        """Writes one part. Raises: _StopError, within a batch of the stop flag being set."""
        write_part(self._settings, self._encoder, part, self._report_to(part.number))
        self._cells[2 * part.number] = part.num_bytes

    def _report_to(self, number: int) -> Report:
        def report(num_bytes: int, num_documents: int) -> None:
            self._cells[2 * number] += num_bytes
            self._cells[2 * number + 1] += num_documents
            if self._stop.value:
                raise _StopError

        return report


_worker: _Worker | None = (
    None  # set once a process, by the pool's initializer: shared memory cannot be sent with a task
)


def _start_worker(settings: PartSettings, tokenizer_path: Path, cells: Any, stop: Any) -> None:
    global _worker
    hold_as_worker(settings.folder)
    _die_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = _Worker(settings, build_encoder(load_tokenizer(tokenizer_path)), cells, stop)


def _write_in_worker(part: Part) -> None:
    assert _worker is not None
    _worker.write(part)


def _die_with_parent() -> None:
    """Ends this process as soon as its parent is gone, so that no orphan writes into a folder that others reuse."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if not parent.is_alive():
        os._exit(1)
