"""Progress of `prepare`: a callback, a progress bar on a terminal, and lines for a log file."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from pretrain.utils.status_line import stderr_console

# Called as `progress(phase, done_bytes, total_bytes, num_documents)`, at most a few times a
# second.
# `phase` is a label of the step; bytes are input bytes on disk, those of an earlier run included.
Progress = Callable[[str, int, int, int], None]

LOG_EVERY_S = 10.0

_log = logging.getLogger(__name__)


def no_progress(phase: str, done_bytes: int, total_bytes: int, num_documents: int) -> None:
    """Shows nothing."""


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """Gives a callback that draws a bar on a terminal, or logs a line every LOG_EVERY_S seconds."""
    console = stderr_console()
    if not console.is_terminal:
        yield _LogLines()
        return
    from rich import progress as rich_progress

    bar = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TextColumn("{task.fields[documents]:,} documents"),
        rich_progress.TimeRemainingColumn(),
        console=console,
    )
    tasks: dict[str, rich_progress.TaskID] = {}

    def show(phase: str, done_bytes: int, total_bytes: int, num_documents: int) -> None:
        counts: dict[str, Any] = {"total": total_bytes, "completed": done_bytes}
        if phase not in tasks:
            # The rate counts from the bytes that an earlier run has done.
            tasks[phase] = bar.add_task(phase, documents=num_documents, **counts)
        bar.update(tasks[phase], documents=num_documents, **counts)

    with bar:
        yield show


class _LogLines:
    """Progress for a log file, with the rate since the beginning of the phase."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + LOG_EVERY_S
        self._begun: dict[str, tuple[float, int]] = {}

    def __call__(self, phase: str, done_bytes: int, total_bytes: int, num_documents: int) -> None:
        now = time.monotonic()
        begun_s, begun_bytes = self._begun.setdefault(phase, (now, done_bytes))
        if now < self._next_s:
            return
        self._next_s = now + LOG_EVERY_S
        done = f"{done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB"
        speed = describe_speed(done_bytes - begun_bytes, now - begun_s, total_bytes - done_bytes)
        _log.info("%s: %s, %d documents%s", phase, done, num_documents, speed)


def describe_speed(num_bytes: int, seconds: float, left_bytes: int) -> str:
    """Returns `, 3.2 MB/s, 1:02:03 left`; empty before the first bytes."""
    if num_bytes <= 0 or seconds <= 0:
        return ""
    rate = num_bytes / seconds
    left_s = round(left_bytes / rate)
    left = f"{left_s // 3600}:{left_s // 60 % 60:02d}:{left_s % 60:02d}"
    return f", {rate / 1e6:.1f} MB/s, {left} left"
