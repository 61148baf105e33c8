"""Checks files against their records: size, and CRC32 of each 16 MiB chunk."""

import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CRC_CHUNK_BYTES = 16 * 1024 * 1024
# Waits before a file that could not be read is read again.
READ_AGAIN_S = (0.2, 1.0)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and chunk CRC32s that a written file must have when it is read back."""

    name: str
    num_bytes: int
    crc32s: list[int]


def check_file(path: Path, record: FileRecord) -> str | None:
    """Compares a file with its record; returns what is wrong first, or None."""
    return next(find_damage(path, record), None)


def find_damage(path: Path, record: FileRecord) -> Iterator[str]:
    """Compares a file with its record; yields all that is wrong, a line for each bad chunk.

    A file that exists and cannot be read is tried again: its server may be away for a moment.
    """
    for wait_s in (*READ_AGAIN_S, None):
        try:
            yield from list(_compare(path, record))
            return
        except OSError as error:
            if wait_s is None or isinstance(error, FileNotFoundError):
                yield f"{path.name}: {error.strerror or error}"
                return
            time.sleep(wait_s)


def _compare(path: Path, record: FileRecord) -> Iterator[str]:
    size = path.stat().st_size
    if size != record.num_bytes:
        yield f"{path.name} has {size} bytes, the manifest says {record.num_bytes}"
        return
    if len(record.crc32s) != -(-size // CRC_CHUNK_BYTES):
        yield f"{path.name}: the manifest has {len(record.crc32s)} CRC32s for {size} bytes"
        return
    with path.open("rb") as file:
        for number, expected in enumerate(record.crc32s):
            if zlib.crc32(file.read(CRC_CHUNK_BYTES)) != expected:
                yield f"{path.name}: CRC32 of chunk {number} (at byte {number * CRC_CHUNK_BYTES}) does not match"
