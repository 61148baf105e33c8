"""Output of a run: the newest file of its Slurm jobs or ranks, printed to its end or followed."""

import codecs
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pretrain.errors import ConfigError
from pretrain.run.folder import RunDir
from pretrain.utils.safe_read import open_file
from pretrain_launch.journal import jobs_without_work, read_journal

POLL_S = 0.5
ASK_S = 5.0
_TAIL_BYTES = 1 << 20


def newest_log(run: RunDir, rank: int | None = None) -> Path:
    """Returns the log of a rank, which may be missing; for None of the newest Slurm job with work, else of rank 0."""
    jobs = set(run.logs.glob("slurm-*.out")) if rank is None else set()
    if len(jobs) > 1:  # a job whose chain had ended before it prints that alone
        jobs -= {run.logs / f"slurm-{job}.out" for job in jobs_without_work(read_journal(run))}
    return max(jobs, key=lambda path: path.stat().st_mtime, default=run.logs / f"rank-{rank or 0:05d}.log")


def find_log(run: RunDir, rank: int | None, about: Callable[[], str] = str) -> Path:
    """Returns the log that is there (`newest_log`). Raises: ConfigError: With `about`, where no log is there."""
    path = newest_log(run, rank)
    if path.is_file():
        return path
    names = ", ".join(sorted(path.name for path in run.logs.glob("*"))[:8])
    raise ConfigError(
        "no such log",
        where=str(path),
        fix=f"there are {names}" if names else about() or "it appears with the first start",
    )


def await_log(run: RunDir, is_over: Callable[[], bool]) -> None:
    """Waits until a log of the run is there, or the run is over, as after a cancelled submission."""
    is_over = seldom(is_over)
    while not (newest_log(run).is_file() or is_over()):
        time.sleep(POLL_S)


def last_lines(path: Path, count: int) -> tuple[str, int]:
    """Returns the last `count` lines of a file, and the offset in bytes up to which it was read."""
    with open_file(path) as file:
        begin = file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        content = _whole_characters(file.read())
    lines = content.decode(errors="replace").splitlines(keepends=True)
    return "".join(lines[-count:] if count else []), begin + len(content)


def _whole_characters(content: bytes) -> bytes:
    """Leaves out the beginning of a character whose rest is not written yet."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(content)
    return content.removesuffix(decoder.getstate()[0])


def follow(find: Callable[[], Path], start: Path, offset: int, is_over: Callable[[], bool]) -> Iterator[str]:
    """Yields new output of a log, and of those that replace it, until the run is over.

    `find` returns the file to show now: another job writes another one.
    """
    path = start
    while True:
        over = is_over()  # before the last read, which shows all that was written until then
        newest = find()
        if newest != path or newest.stat().st_size < offset:  # another file, or a shorter one
            path = newest
            offset = 0
        with open_file(path) as file:
            file.seek(offset)
            content = _whole_characters(file.read())
        offset += len(content)
        if content:
            yield content.decode(errors="replace")
        elif over:
            return
        else:
            time.sleep(POLL_S)


def seldom(ask: Callable[[], bool]) -> Callable[[], bool]:
    """Returns `ask` with its answer cached for `ASK_S` seconds, as Slurm is slow."""
    asked_at = time.monotonic()
    answer = False

    def is_over() -> bool:
        nonlocal asked_at, answer
        if not answer and time.monotonic() - asked_at > ASK_S:
            answer = ask()
            asked_at = time.monotonic()
        return answer

    return is_over
