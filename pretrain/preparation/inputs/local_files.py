"""Files of this machine: folders (recursive, hidden files skipped) and globs."""

import glob
import os
import stat
from pathlib import Path

from pretrain.errors import DataError
from pretrain.preparation.input_parts import InputFile


def find_local(given: str) -> list[str]:
    """Returns the files that a path, folder or glob names, sorted. Raises: DataError."""
    path = Path(given)
    if path.is_dir():
        return [str(file) for file in walk(path)]
    if path.exists():
        return [str(path)]
    if not glob.has_magic(given):
        raise DataError(
            "no such file or folder",
            where=given,
            fix="correct the path (--input, or inputs.N.path of a config)",
        )
    paths: set[Path] = set()
    for match in glob.glob(given, recursive=True):  # noqa: PTH207 -- Path.glob takes no absolute pattern
        paths.update(walk(Path(match)) if Path(match).is_dir() else [Path(match)])
    return [str(file) for file in sorted(paths, key=lambda path: path.parts)]


def stat_local(path: str | Path) -> InputFile:
    """Looks up one file. Raises: DataError."""
    try:
        status = Path(path).stat()
    except OSError as error:
        raise _cannot_read(str(path), error) from error
    if not stat.S_ISREG(status.st_mode):  # a FIFO would block
        raise DataError("not a regular file", where=str(path), fix="copy its content to a file")
    return InputFile(str(path), status.st_size, str(status.st_mtime_ns))


def walk(root: Path, skip_dirs: tuple[str, ...] = ()) -> list[Path]:
    """Returns the files below `root`, sorted; follows links, each folder once. Raises: DataError."""

    def fail(error: OSError) -> None:
        raise _cannot_read(error.filename, error) from error

    seen: set[tuple[int, int]] = set()
    paths: list[Path] = []
    for name, dirs, files in os.walk(root, onerror=fail, followlinks=True):
        folder = Path(name)
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:
            dirs.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        # In place, and sorted, so that of two links to a folder always the same is followed.
        dirs[:] = sorted(name for name in dirs if not name.startswith(".") and name not in skip_dirs)
        paths += [folder / name for name in files if not name.startswith(".")]
    return sorted(paths, key=lambda path: path.parts)


def _cannot_read(path: str, error: OSError) -> DataError:
    return DataError(
        f"cannot be read: {error.strerror or error}",
        where=path,
        fix="correct its permissions or remove it",
    )
