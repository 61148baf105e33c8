"""A file of JSON objects, one a line, in order of `step`: appended during a run, cut back when it resumes.

    JsonLines(path)  ->  a torn last line (a crash while writing) is cut off
    append(row)      ->  one unbuffered write; a killed process loses no row, a killed machine those since sync()
                         a row that the disk refuses waits in memory, and is written before the next one
    rewind(step)     ->  rows after a committed step are gone; the file is replaced atomically, never edited in place

Not here: what rows mean. `metrics.jsonl` takes any row (`Tracker`), `audit.jsonl` has its own (`audit.py`).
"""

import errno
import json
import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pretrain.errors import DataError, DiskError
from pretrain.utils.io import write_file

_TAIL_BYTES = 1 << 16


def _parse(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields each whole row and the offset of the byte after it. Stops at a last line that is torn."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                row = json.loads(line)
                if type(row["step"]) is not int:
                    raise TypeError
            except (ValueError, LookupError, TypeError):
                raise DataError(
                    "this line is not a JSON object with a step",
                    where=f"{path}:{number}",
                    fix="restore the file, or move it away: it only records the run",
                ) from None
            yield row, end


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads every whole row; a torn last line is left out, a file that does not exist has none.

    Raises:
        DataError: A line other than the last is damaged; names it.
    """
    return [row for row, _ in _parse(path)] if path.exists() else []


class JsonLines:
    """An append-only file of rows. One process owns it.

    Args:
        path: Made if it does not exist. A torn last line is removed, by an atomic rewrite.

    Raises:
        DiskError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[bytes] = deque()
        self._open()

    def _open(self) -> None:
        try:
            content_end = self._whole_lines_end()
            if content_end is not None:
                write_file(self._path, self._path.read_bytes()[:content_end])
            # Unbuffered: each row is one write(2), so that a kill between two rows leaves whole lines.
            self._file = self._path.open("ab", buffering=0)
            self._torn_at: int | None = None
        except OSError as error:
            raise self._disk_error("open", error) from error

    def _whole_lines_end(self) -> int | None:
        """Returns where the last whole line ends if something torn follows it, else None."""
        if not self._path.exists():
            return None
        with self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read() in (b"", b"\n"):
                return None
            file.seek(0)
            return file.read().rfind(b"\n") + 1

    def _disk_error(self, action: str, error: OSError) -> DiskError:
        reason = error.strerror or str(error)
        return DiskError(f"cannot {action}: {reason}", where=str(self._path), fix="free space or fix permissions")

    @property
    def num_waiting(self) -> int:
        """Rows that are not written yet."""
        return len(self._waiting)

    def append(self, row: dict[str, Any]) -> None:
        """Writes a row, and those that wait before it. About 10 us. Raises: as `flush`."""
        self.add(row)
        self.flush()

    def add(self, row: dict[str, Any]) -> None:
        """Lets a row wait. `step` must be its first key, and never smaller than the last row's."""
        assert next(iter(row)) == "step", "rows are found by step, and read by people: it comes first"
        self._waiting.append(json.dumps(row, separators=(",", ":")).encode() + b"\n")

    def flush(self) -> None:
        """Writes the rows that wait.

        Raises:
            DiskError: The disk refused; the file still ends with a whole row, and what it has not taken waits on.
        """
        while self._waiting:
            self._write(self._waiting[0])
            self._waiting.popleft()

    def _write(self, line: bytes) -> None:
        try:
            self._take_back()
            self._torn_at = os.fstat(self._file.fileno()).st_size
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "no space left for a whole row")
            self._torn_at = None
        except OSError as error:
            with suppress(OSError):  # a disk that refuses this too is asked again before the next row
                self._take_back()
            raise self._disk_error("append", error) from error

    def _take_back(self) -> None:
        """Cuts off what a write that failed has left."""
        if self._torn_at is not None:
            os.ftruncate(self._file.fileno(), self._torn_at)
            self._torn_at = None

    def sync(self) -> None:
        """Makes all rows so far survive a crash of the machine. Raises: DiskError."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._disk_error("sync", error) from error

    def last_step(self) -> int | None:
        """Returns the step of the last row that is not damaged, or None. Reads the end of the file only."""
        with self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
        for line in reversed(lines):
            with suppress(ValueError, LookupError, TypeError):
                return int(json.loads(line)["step"])
        return None

    def rewind(self, step: int) -> None:
        """Removes the rows after `step`, and leaves the file alone if there are none.

        What a power failure has spoilt behind the row of `step` goes with them.

        Raises:
            DataError: Another line is damaged.
            DiskError: The disk refused; the file is as it was.
        """
        self._waiting = deque(line for line in self._waiting if json.loads(line)["step"] <= step)
        kept, last = 0, None
        try:
            for row, end in _parse(self._path):
                if row["step"] > step:
                    break
                kept, last = end, row["step"]
            else:
                return
        except DataError:
            if last != step:
                raise
        content = self._path.read_bytes()[:kept]
        self._file.close()
        try:
            write_file(self._path, content)
        finally:
            self._open()

    def close(self) -> None:
        """Closes the file. Idempotent. Rows that still wait are lost."""
        self._waiting.clear()
        self._file.close()
