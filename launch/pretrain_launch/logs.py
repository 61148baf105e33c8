"""Output of a run: the newest file of its Slurm jobs or ranks, printed to its end or followed."""

import codecs
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pretrain.errors import ConfigError
from pretrain.run.folder import RunDir

POLL_S = 0.5
ASK_S = 5.0
_TAIL_BYTES = 1 << 20


def find_log(run: RunDir, rank: int | None) -> Path:
    """Returns the file to show.

    Args:
        run: The run folder.
        rank: Whose log; None: what the newest Slurm job printed, or, without one, rank 0's.

    Raises:
        ConfigError: There is none yet; names what there is.
    """
    if rank is None:
        jobs = sorted(run.logs.glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)
        if jobs:
            return jobs[-1]
    path = run.logs / f"rank-{rank or 0:05d}.log"
    if path.is_file():
        return path
    found = ", ".join(sorted(path.name for path in run.logs.glob("*"))[:8])
    fix = f"there are {found}" if found else "it appears with the first start"
    raise ConfigError("no such log", where=str(path), fix=fix)


def last_lines(path: Path, count: int) -> tuple[str, int]:
    """Returns the last `count` lines of a file, and how far it was read, in bytes."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        begin = file.seek(max(0, size - _TAIL_BYTES))
        content = _whole_characters(file.read())
    lines = content.decode(errors="replace").splitlines(keepends=True)
    return "".join(lines[-count:] if count else []), begin + len(content)


def _whole_characters(content: bytes) -> bytes:
    """Leaves out the beginning of a character whose rest is not written yet."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(content)
    return content.removesuffix(decoder.getstate()[0])


def follow(find: Callable[[], Path], start: Path, offset: int, is_over: Callable[[], bool]) -> Iterator[str]:
    """Yields what is appended to a log, to those that replace it, until the run is over.

    Args:
        find: Returns the file to show now: another job writes another one.
        start: The file that was shown so far.
        offset: How far, in bytes. A file that has become shorter is shown from its start.
        is_over: Whether nothing more will come; asked when nothing has.
    """
    path = start
    while True:
        over = is_over()  # before the last look: what was written until then is shown
        if (newest := find()) != path:
            path, offset = newest, 0
        if path.stat().st_size < offset:
            offset = 0
        with path.open("rb") as file:
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
    """Returns a function that asks every `ASK_S` seconds, and repeats the last answer in between: Slurm is slow."""
    asked_at, answer = time.monotonic(), False

    def is_over() -> bool:
        nonlocal asked_at, answer
        if not answer and time.monotonic() - asked_at > ASK_S:
            answer, asked_at = ask(), time.monotonic()
        return answer

    return is_over
