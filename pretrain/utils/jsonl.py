"""A file of JSON objects, one a line, by `step`: appended during a run, cut when it resumes.

    JsonLines(path)  ->  a torn last line (a crash while writing) is cut off
    append(row)      ->  one unbuffered write; a killed process loses no row, a killed machine those
                         since sync(); a row that the disk refuses waits in memory, and is written
                         before the next one
    rewind(step)     ->  cuts off the rows after a committed step, which are searched by halves: a
                         start costs the same behind a million rows
    each_row(path)   ->  every row; `rows_with`, those that have a key, and parses no others;
                         `newest_rows`, from the end

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
from typing import Any, BinaryIO

from pretrain.errors import DataError
from pretrain.utils.io import cut_file, disk_error, disk_errors
from pretrain.utils.safe_read import MAX_LINE_BYTES, open_file, parse_json, read_lines

_BLOCK_BYTES = 1 << 16
_FIX = "restore the file, or move it away: it only records the run"


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns what is no file of rows into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), fix=_FIX) from None


def _parse(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields each whole row and the offset of the byte after it. Stops at a last line that is torn.

    `start`: offset of the first line.

    Raises: DataError: A line is damaged, or the file cannot be read.
    """
    end = start
    with _readable(path), open_file(path) as file:
        file.seek(start)
        for line in read_lines(file):
            if not line.endswith(b"\n"):
                return
            row = _row_of(line)
            if row is None:
                raise _damaged(path, end)
            end += len(line)
            yield row, end


def _row_of(line: bytes) -> dict[str, Any] | None:
    """Returns the row of a line; None of a damaged one."""
    with suppress(ValueError, LookupError, TypeError):
        row: dict[str, Any] = parse_json(line)
        if type(row["step"]) is int:
            return row
    return None


def _damaged(path: Path, offset: int) -> DataError:
    """Returns the error of the line that begins at an offset."""
    number = 1
    with open_file(path) as file:
        while offset > 0:
            block = file.read(min(offset, _BLOCK_BYTES))
            number += block.count(b"\n")
            offset -= len(block)
    where = f"{path}:{number}"
    return DataError("this line is not a JSON object with a step", where=where, fix=_FIX)


def _find_line(path: Path, step: int) -> int:
    """Returns the offset of a line with a row of an earlier step, some rows before `step`; else 0.

    Halves the file by offsets, as steps never fall. A line that is damaged, or longer than a block,
    counts as later: who reads on from the offset meets it.
    """
    with _readable(path), open_file(path) as file:
        low = 0
        high = file.seek(0, os.SEEK_END)
        while high - low > _BLOCK_BYTES:
            middle = (low + high) // 2
            start, line = _line_after(file, middle)
            row = _row_of(line)
            if row is not None and row["step"] < step and start < high:
                low = start
            else:
                high = middle
    return low


def _line_after(file: BinaryIO, offset: int) -> tuple[int, bytes]:
    """Returns the first line behind an offset, and where it begins; empty: none within reach."""
    file.seek(offset)
    if not file.readline(_BLOCK_BYTES).endswith(b"\n"):
        return offset, b""
    return file.tell(), file.readline(_BLOCK_BYTES)


def each_row(path: Path) -> Iterator[dict[str, Any]]:
    """Yields every whole row, without a torn last line; a missing file has none. Raises: DataError."""
    return (row for row, _ in _parse(path)) if path.exists() else iter(())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of `each_row`."""
    return list(each_row(path))


def rows_with(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """Yields the whole rows that have a key, and parses no others; a missing file has none.

    Raises: DataError: A line with the key is damaged, or the file cannot be read.
    """
    if not path.exists():
        return
    name = json.dumps(key).encode()
    offset = 0
    with _readable(path), open_file(path) as file:
        # A block ends where a line does, so that no row is in two.
        while block := file.read(_BLOCK_BYTES) + file.readline(MAX_LINE_BYTES):
            lines = block.splitlines(keepends=True) if name in block else []
            for line in lines:
                if name in line and line.endswith(b"\n"):
                    row = _row_of(line)
                    if row is None:
                        raise _damaged(path, offset + block.index(line))
                    if key in row:
                        yield row
            offset += len(block)


def newest_rows(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """Yields the intact rows that have a key, the last one first; reads no further than asked.

    A missing file has none. Raises: OSError.
    """
    if not path.exists():
        return
    name = json.dumps(key).encode()
    with open_file(path) as file:
        start = file.seek(0, os.SEEK_END)
        lines = [b""]
        while start > 0 and len(lines[0]) <= MAX_LINE_BYTES:
            size = min(start, _BLOCK_BYTES)
            start = file.seek(start - size)
            lines = (file.read(size) + lines[0]).split(b"\n")
            # The first line may have begun in the block before.
            for line in reversed(lines if start == 0 else lines[1:]):
                row = _row_of(line) if name in line else None
                if row is not None and key in row:
                    yield row


def last_row(path: Path) -> dict[str, Any] | None:
    """Returns the last intact row; None without one. Raises: OSError."""
    return next(newest_rows(path, "step"), None)


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

        Damage before the last row of an earlier step is met by whoever reads the whole file, and
        here only where it is near.

        Raises:
            DataError: A line between that row and the row of `step` is damaged.
            DiskError: The disk refused; the file is as it was.
        """
        self._waiting = deque(line for line in self._waiting if parse_json(line)["step"] <= step)
        end_of_valid = _find_line(self._path, step)
        last = None
        try:
            for row, end in _parse(self._path, end_of_valid):
                if row["step"] > step:
                    break
                end_of_valid = end
                last = row["step"]
            else:
                return
        except DataError:
            if last != step:
                raise
        cut_file(self._path, end_of_valid)
        self._torn_at = None

    def close(self) -> None:
        """Closes the file. Idempotent. Rows that still wait are lost."""
        self._waiting.clear()
        self._file.close()
