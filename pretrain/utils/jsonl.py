"""A file of JSON objects, one a line, by `step`: appended during a run, cut when it resumes.

    JsonLines(path)  ->  a torn last line (a crash while writing) is cut off
    append(row)      ->  one unbuffered write; a killed process loses no row, a killed machine those
                         since sync(); a row that the disk refuses waits in memory, and is written
                         before the next one
    rewind(step)     ->  removes the rows after a committed step; the file is replaced atomically

Not here: what rows mean. `metrics.jsonl` takes any row (`Tracker`), `audit.jsonl` has its own
(`audit.py`).
"""

import errno
import json
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pretrain.errors import DataError
from pretrain.utils.io import disk_error, disk_errors, write_file
from pretrain.utils.safe_read import MAX_LINE_BYTES, open_file, parse_json, read_lines

_TAIL_BYTES = 1 << 16
_FIX = "restore the file, or move it away: it only records the run"


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns what is no file of rows into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), fix=_FIX) from None


def _parse(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields each whole row and the offset of the byte after it. Stops at a last line that is torn.

    Raises: DataError: A line is damaged, or the file cannot be read.
    """
    end = 0
    with _readable(path), open_file(path) as file:
        for number, line in enumerate(read_lines(file), start=1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                row = parse_json(line)
                if type(row["step"]) is not int:
                    raise TypeError
            except (ValueError, LookupError, TypeError):
                raise DataError(
                    "this line is not a JSON object with a step",
                    where=f"{path}:{number}",
                    fix=_FIX,
                ) from None
            yield row, end


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads every whole row, without a torn last line; a missing file has none. Raises: DataError."""
    return [row for row, _ in _parse(path)] if path.exists() else []


def last_row(path: Path) -> dict[str, Any] | None:
    """Returns the last intact row; None without one. Reads the end of the file only."""
    if not path.exists():
        return None
    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with suppress(ValueError, LookupError, TypeError):
            row: dict[str, Any] = parse_json(line)
            if type(row["step"]) is int:
                return row
    return None


class JsonLines:
    """An append-only file of rows, made if missing; one process owns it.

    Raises: DiskError; DataError: The end of the file is no torn row.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[bytes] = deque()
        self._open()

    def _open(self) -> None:
        with disk_errors("open", self._path):
            content_end = self._whole_lines_end()
            if content_end is not None:
                os.truncate(self._path, content_end)
            # Unbuffered: each row is one write(2), so that a kill leaves whole lines.
            self._file = self._path.open("ab", buffering=0)
            self._torn_at: int | None = None

    def _whole_lines_end(self) -> int | None:
        """Returns the end of the last whole line if a torn one follows, else None. Raises: DataError."""
        if not self._path.exists():
            return None
        with open_file(self._path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read() in (b"", b"\n"):
                return None
            start = max(0, size - MAX_LINE_BYTES)
            file.seek(start)
            end = file.read().rfind(b"\n") + 1
        if start and not end:
            size_text = f"more than {MAX_LINE_BYTES:,} bytes"
            raise DataError(f"ends with {size_text} without a line", where=str(self._path), fix=_FIX)
        return start + end

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
        assert next(iter(row)) == "step", "rows are found by step"
        self._waiting.append(json.dumps(row, separators=(",", ":")).encode() + b"\n")

    def flush(self) -> None:
        """Writes the rows that wait. Raises: DiskError; the file still ends with a whole row."""
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
            with suppress(OSError):  # tried again before the next row
                self._take_back()
            raise disk_error("append", self._path, error) from error

    def _take_back(self) -> None:
        if self._torn_at is not None:
            os.ftruncate(self._file.fileno(), self._torn_at)
            self._torn_at = None

    def sync(self) -> None:
        """Makes all rows so far survive a crash of the machine. Raises: DiskError."""
        with disk_errors("sync", self._path):
            os.fsync(self._file.fileno())

    def last_step(self) -> int | None:
        """Returns the step of the last intact row, or None."""
        row = last_row(self._path)
        return None if row is None else int(row["step"])

    def rewind(self, step: int) -> None:
        """Removes the rows after `step`, and lines behind it that a power failure has damaged.

        Raises:
            DataError: An earlier line is damaged.
            DiskError: The disk refused; the file is as it was.
        """
        self._waiting = deque(line for line in self._waiting if parse_json(line)["step"] <= step)
        end_of_valid = 0
        last = None
        try:
            for row, end in _parse(self._path):
                if row["step"] > step:
                    break
                end_of_valid = end
                last = row["step"]
            else:
                return
        except DataError:
            if last != step:
                raise
        with disk_errors("read", self._path), open_file(self._path) as file:
            content = file.read(end_of_valid)
        self._file.close()
        try:
            write_file(self._path, content)
        finally:
            self._open()

    def close(self) -> None:
        """Closes the file. Idempotent. Rows that still wait are lost."""
        self._waiting.clear()
        self._file.close()
