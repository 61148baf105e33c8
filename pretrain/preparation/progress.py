"""Progress of `prepare`: a callback, a progress bar on a terminal, and lines for a log file."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from pretrain.utils.status_line import has_terminal, status_line
from pretrain.utils.units import clock_time, plural

# Called as `progress(phase, done_bytes, total_bytes, num_documents)`, at most a few times a
# second.
# `phase` is a label of the step; bytes are input bytes on disk, those of an earlier run included; a total of 0 is
# unknown.
Progress = Callable[[str, int, int, int], None]

LOG_EVERY_S = 10.0

_log = logging.getLogger(__name__)


def no_progress(phase: str, done_bytes: int, total_bytes: int, num_documents: int) -> None:
    """Shows nothing."""


@contextlib.contextmanager
def progress_bar(sample: str) -> Iterator[Progress]:
    """Gives a callback that draws a bar on a terminal, or logs a line every LOG_EVERY_S seconds.

    `sample` is the noun of what is counted, a document or an image.
    """
    try:
        yield _Bars(sample) if has_terminal() else _LogLines(sample)
    finally:
        status_line().close()


class _Bars:
    """Progress as a bar a phase; of a finished one, the last state stays on the screen."""

    def __init__(self, sample: str) -> None:
        self._sample = sample
        self._phase = ""
        self._begun = (0.0, 0)

    def __call__(self, phase: str, done_bytes: int, total_bytes: int, num_documents: int) -> None:
        now = time.monotonic()
        if phase != self._phase:
            status_line().close()
            # The rate counts from the bytes that an earlier run has done.
            self._phase, self._begun = phase, (now, done_bytes)
        if not total_bytes:
            status_line().enter(phase)
            return
        speed = describe_speed(done_bytes - self._begun[1], now - self._begun[0], total_bytes - done_bytes)
        texts = (f"{plural(num_documents, 'document')}{speed}", plural(num_documents, self._sample), "")
        megabytes = f"{phase} {done_bytes / 1e6:.1f}/{total_bytes / 1e6:.1f} MB"
        status_line().advance(done_bytes, total_bytes, partial(_fitting, texts), megabytes)


def _fitting(texts: Sequence[str], width: int) -> str:
    return next((text for text in texts if len(text) <= width), "")


class _LogLines:
    """Progress for a log file, with the rate since the beginning of the phase."""

    def __init__(self, sample: str) -> None:
        self._sample = sample
        self._next_s = time.monotonic() + LOG_EVERY_S
        self._begun: dict[str, tuple[float, int]] = {}

    def __call__(self, phase: str, done_bytes: int, total_bytes: int, num_documents: int) -> None:
        now = time.monotonic()
        if phase not in self._begun:
            _log.info("%s", phase)
        begun_s, begun_bytes = self._begun.setdefault(phase, (now, done_bytes))
        if now < self._next_s:
            return
        self._next_s = now + LOG_EVERY_S
        done = f"{done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB"
        speed = describe_speed(done_bytes - begun_bytes, now - begun_s, total_bytes - done_bytes)
        _log.info("%s: %s, %s%s", phase, done, plural(num_documents, self._sample), speed)


def describe_speed(num_bytes: int, seconds: float, left_bytes: int) -> str:
    """Returns `, 3.2 MB/s, 1:02:03 left`; empty before the first bytes."""
    if num_bytes <= 0 or seconds <= 0:
        return ""
    rate = num_bytes / seconds
    return f", {rate / 1e6:.1f} MB/s, {clock_time(left_bytes / rate)} left"
