"""The one layer for durable writes, temporary name, fsync, rename, CRC32, and for checks of them.

    write_file / write_json   ->  name.tmp-<pid>, write, fsync, rename, fsync the folder
    AtomicWriter              ->  the same, for content that comes piece by piece
    cut_file                  ->  remove the end of a file, fsync
    append_line               ->  one write at the end of a file of several processes, fsync
    write_chunks              ->  write in place, inside a folder that is renamed later, fsync; CRCs
    publish_dir               ->  fsync the folder, rename it to its final name, fsync the parent
    remove_dir                ->  rename to .trash-name, fsync the parent, remove its content
    check_file, find_damage   ->  compare a file with its record: size, CRC32 of each chunk

Every operation passes through `_operation` first, so that a test can make any single one of them
fail, or kill the process there (`set_fault_hook`). Nothing else in this package opens a file for
writing that must survive a crash.
"""

import errno
import fcntl
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pretrain.errors import ConfigError, DiskError, disk_fix

CRC_CHUNK_BYTES = 16 * 1024 * 1024
# Waits before a file that could not be read is read again.
READ_AGAIN_S = (0.2, 1.0)
# Longer than any append takes; an append that hangs elsewhere is not waited for.
LOCK_WAIT_S = 5.0
LOOK_EVERY_S = 0.02

FaultHook = Callable[[str, Path], None]

_fault_hook: FaultHook | None = None


def set_fault_hook(hook: FaultHook | None) -> None:
    """Installs `hook(operation, path)`, called before each write operation; `None` removes it."""
    global _fault_hook
    _fault_hook = hook


def _operation(name: str, path: Path) -> None:
    if _fault_hook is not None:
        _fault_hook(name, path)


def disk_error(action: str, path: Path, error: OSError) -> DiskError:
    """Returns the error `path: cannot ACTION: ...`."""
    return DiskError(
        f"cannot {action}: {error.strerror or error}",
        where=str(path),
        fix=disk_fix(error),
    )


@contextmanager
def disk_errors(action: str, path: Path) -> Iterator[None]:
    """Raises failures of the operating system as `disk_error`."""
    try:
        yield
    except OSError as error:
        raise disk_error(action, path, error) from error
    except ValueError as error:  # a path with a NUL
        raise ConfigError(str(error), where=str(path), fix="correct the path") from None


def make_dir(path: Path) -> Path:
    """Creates `path` and its parents, durably. Raises: DiskError."""
    # Where the disk refuses, new folders stay: another process may have begun to use them.
    with disk_errors("create the folder", path):
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
        _operation("mkdir", path)
        path.mkdir(parents=True, exist_ok=True)
        for folder in reversed(new):
            fsync_dir(folder.parent)
    return path


def fsync_dir(path: Path) -> None:
    """Makes the entries of folder `path` durable."""
    _operation("fsync_dir", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and chunk CRC32s that a written file must have when it is read back."""

    name: str
    num_bytes: int
    crc32s: list[int]


def _rechunk(chunks: Iterable[memoryview], size: int) -> Iterator[memoryview]:
    """Cuts a sequence of buffers at multiples of `size` bytes of their concatenation."""
    room = size
    for chunk in chunks:
        view = chunk.cast("B")
        while len(view):
            yield view[:room]
            taken = min(room, len(view))
            view = view[taken:]
            room = (room - taken) or size


def write_chunks(path: Path, chunks: Iterable[memoryview], *, over: bool = False) -> FileRecord:
    """Writes buffers one after another to a new file, or `over` one, and fsyncs it.

    The CRCs are those of the memory, not of the disk.

    Raises:
        DiskError: The disk refused, and the half-written file is removed; or a file of this name
            exists, and stays as it is.
    """
    crc32s: list[int] = []
    total = 0
    with disk_errors("write", path):
        _operation("open", path)
        file = path.open("r+b" if over else "xb")
        try:
            with file:
                for piece in _rechunk(chunks, CRC_CHUNK_BYTES):
                    if total % CRC_CHUNK_BYTES == 0:
                        crc32s.append(0)
                    crc32s[-1] = zlib.crc32(piece, crc32s[-1])
                    _operation("write", path)
                    file.write(piece)
                    total += len(piece)
                if over:
                    file.truncate()
                file.flush()
                _operation("fsync", path)
                os.fsync(file.fileno())
        except OSError:
            _unlink(path)
            raise
    return FileRecord(path.name, total, crc32s)


def _unlink(path: Path) -> None:
    """Removes a temporary file, if the disk permits: nothing reads it."""
    with suppress(OSError):
        path.unlink()


def write_file(path: Path, content: bytes) -> FileRecord:
    """Replaces a file: a reader sees the old one or the new one, never a part. Raises: DiskError.

    What is no file, as /dev/null or a pipe, is written to: root could put a file in its place.
    """
    with disk_errors("write", path):
        if path.exists() and not (path.is_file() or path.is_dir()):
            path.write_bytes(content)
            return FileRecord(path.name, len(content), [])
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    _unlink(temporary)  # left by a dead process that had our process id
    record = write_chunks(temporary, [memoryview(content)])
    with disk_errors("write", path):
        try:
            _rename(temporary, path)
        except OSError:
            _unlink(temporary)
            raise
    return FileRecord(path.name, record.num_bytes, record.crc32s)


def cut_file(path: Path, num_bytes: int) -> None:
    """Removes the end of a file, durably. Raises: DiskError: The file is as it was."""
    with disk_errors("cut", path):
        _operation("truncate", path)
        os.truncate(path, num_bytes)
        _operation("fsync", path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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


def append_line(path: Path, line: bytes) -> None:
    """Appends a line, without its line feed, durably; a line that a crash has torn is ended first.

    Behind a lock where the file system has locks; without, one write at the end must do. The file
    is made if it does not exist.

    Raises:
        DiskError: The disk refused; the file is as it was, unless others append to it without a lock.
    """
    with disk_errors("append", path):
        is_new = not path.exists()
        _operation("append", path)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            has_lock = False
            with suppress(OSError):  # a file system without locks
                has_lock = take_flock(descriptor, wait_s=LOCK_WAIT_S)
            size = os.fstat(descriptor).st_size
            is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            content = (b"\n" if is_torn else b"") + line + b"\n"
            if os.write(descriptor, content) != len(content):
                if has_lock:
                    os.ftruncate(descriptor, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _operation("fsync", path)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)  # with its lock
        if is_new:
            fsync_dir(path.parent)


class AtomicWriter:
    """A file written piece by piece, which appears under its name only when `commit` returns.

    A crash before that leaves `name.tmp-<pid>`, which nothing reads. Raises: DiskError from every
    method; the temporary file is then removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        self._file: BinaryIO | None = None
        with self._guard():
            _operation("open", self._temporary)
            self._file = self._temporary.open("wb")

    @contextmanager
    def _guard(self) -> Iterator[None]:
        with disk_errors("write", self.path):
            try:
                yield
            except OSError:
                self.discard()
                raise

    def write(self, piece: bytes | memoryview) -> None:
        """Appends `piece`."""
        assert self._file is not None
        with self._guard():
            _operation("write", self._temporary)
            self._file.write(piece)

    def commit(self) -> None:
        """Makes the file durable and visible."""
        assert self._file is not None
        with self._guard():
            self._file.flush()
            _operation("fsync", self._temporary)
            os.fsync(self._file.fileno())
            self._file.close()
            _rename(self._temporary, self.path)

    def discard(self) -> None:
        """Gives the file up; harmless when it was committed or discarded before."""
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
        _unlink(self._temporary)


def json_bytes(value: Any) -> bytes:
    """Returns what `write_json` writes: indented JSON with sorted keys, and a newline."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def write_json(path: Path, value: Any) -> FileRecord:
    """Writes `json_bytes(value)`, atomically. Raises: DiskError."""
    return write_file(path, json_bytes(value))


def publish_dir(temporary: Path, final: Path) -> None:
    """Makes a finished folder visible under its final name: the commit point of a checkpoint or shards.

    Raises:
        DiskError: The disk refused. `temporary` stays where it is; only where the last fsync
            failed, `final` is there, whole, but a power failure may still undo the rename.
    """
    with disk_errors("commit", final):
        fsync_dir(temporary)
        _rename(temporary, final)


def check_new_folder(out: Path) -> None:
    """Checks that a folder to write is not there, or is empty. Raises: ConfigError."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError("exists and is not an empty folder", where=str(out), fix="give another name, or remove it")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Gives a temporary folder to fill; it appears as `out` when the block ends, or is removed.

    Raises:
        ConfigError: `out` exists and holds something.
        DiskError: The disk refused; nothing is left under `out`.
    """
    out = out.resolve()
    check_new_folder(out)
    temporary = make_dir(out.parent) / f".tmp-{out.name}-{os.getpid()}"
    if temporary.exists():
        remove_dir(temporary)  # left by a dead process that had our process id
    try:
        make_dir(temporary)
        yield temporary
        publish_dir(temporary, out)
    except BaseException:
        with suppress(DiskError):
            if temporary.exists():
                remove_dir(temporary)
        raise


def remove_dir(path: Path) -> None:
    """Removes a folder in two steps, so that a crash half-way leaves a name that nothing reads (`.trash-*`).

    The new name is durable before anything is removed: after a power failure too, the folder is
    whole or has no name.

    Raises:
        DiskError: The disk refused; the folder is whole under its name, or in part under the other.
    """
    trash = path.with_name(f".trash-{path.name}")
    with disk_errors("remove", path):
        if trash.exists():
            _remove_tree(trash)
        _rename(path, trash)
        _remove_tree(trash)


def remove_tree(path: Path) -> None:
    """Removes a folder that nothing reads; links in it are not followed. Raises: DiskError."""
    with disk_errors("remove", path):
        _remove_tree(path)


def _remove_tree(path: Path) -> None:
    with os.scandir(path) as entries:
        inside = sorted((Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries)
    for entry, is_folder in inside:
        if is_folder:
            _remove_tree(entry)
        else:
            _operation("unlink", entry)
            entry.unlink()
    _operation("rmdir", path)
    path.rmdir()


def rename_dir(path: Path, target: Path) -> None:
    """Gives a folder another name, durably. Raises: DiskError: The name is taken, too."""
    with disk_errors("rename", path):
        _rename(path, target)


def _rename(path: Path, target: Path) -> None:
    _operation("rename", target)
    path.rename(target)
    fsync_dir(target.parent)


# Locks that the operating system releases when the process ends. Not `filelock`: it has no shared
# mode, and truncates the file that it locks, while ours contain owners, promises or the log itself.


def take_flock(descriptor: int, operation: int = fcntl.LOCK_EX, wait_s: float = 0.0) -> bool:
    """Tries to lock an open file for up to `wait_s` seconds; returns whether it is locked.

    Closing the descriptor releases the lock, and so does LOCK_UN. Raises: OSError: No locks here.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_EVERY_S)
        else:
            return True
