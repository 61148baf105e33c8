"""Local inputs: files, folders (recursive, hidden files skipped) and globs."""

import glob
import os
from collections.abc import Callable
from pathlib import Path

from pretrain.errors import DataError
from pretrain.prepare.inputs.formats import KNOWN_SUFFIXES
from pretrain.prepare.sources import InputFile

Accepts = Callable[[str], object]
"""Says of a path, by a true or false value, whether the format of the file is known."""


def find_local(given: str, accepts: Accepts) -> list[InputFile]:
    """Returns the files that a path names, sorted.

    Raises:
        DataError: No such file, one that cannot be read, or a file named in full that is not accepted.
    """
    return [stat_local(path) for path in _expand(given, accepts)]


def stat_local(path: Path) -> InputFile:
    """Looks up one file. Raises: DataError."""
    try:
        status = path.stat()
    except OSError as error:
        raise _cannot_read(str(path), error) from error
    return InputFile(str(path), status.st_size, str(status.st_mtime_ns))


def _expand(given: str, accepts: Accepts) -> list[Path]:
    path = Path(given)
    if path.exists():
        if path.is_file() and not accepts(str(path)):
            fix = f"give one of {KNOWN_SUFFIXES}, or say its format in a config"
            raise DataError("unsupported file type", where=given, fix=fix)
        return _accepted(path, accepts)
    if not glob.has_magic(given):
        raise DataError("no such file or folder", where=given, fix="correct the path")
    matches = glob.glob(given, recursive=True)  # noqa: PTH207 -- Path.glob takes no absolute pattern
    return sorted({path for match in matches for path in _accepted(Path(match), accepts)}, key=lambda path: path.parts)


def _accepted(path: Path, accepts: Accepts) -> list[Path]:
    candidates = walk(path) if path.is_dir() else [path]
    return [path for path in candidates if accepts(str(path))]


def walk(root: Path, skip_dirs: tuple[str, ...] = ()) -> list[Path]:
    """Returns the files below `root`, sorted by relative path; follows links to folders, each folder once.

    Raises:
        DataError: A folder that cannot be read.
    """

    def fail(error: OSError) -> None:
        raise _cannot_read(error.filename, error) from error

    seen: set[tuple[int, int]] = set()
    found: list[Path] = []
    for name, dirs, files in os.walk(root, onerror=fail, followlinks=True):
        folder = Path(name)
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:
            dirs.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        dirs[:] = sorted(name for name in dirs if not name.startswith(".") and name not in skip_dirs)
        found += [folder / name for name in files if not name.startswith(".")]
    return sorted(found, key=lambda path: path.parts)


def _cannot_read(path: str, error: OSError) -> DataError:
    return DataError(
        f"cannot be read: {error.strerror or error}", where=path, fix="correct its permissions or remove it"
    )
