"""Input files: what `--input` names, as a list of files in a fixed order, and their cut into parts.

    list_inputs   files, folders (recursive, hidden files skipped) and globs  ->  [InputFile], sorted in each input
    list_stdlib   the default corpus: the source of the running Python's standard library
    plan_parts    [InputFile] -> [Part], by sizes alone, so that any number of processes shares the same parts out

Nothing is opened here. Reading is documents.py.
"""

import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import DataError

DOCUMENT_SUFFIXES = (".txt", ".py", ".md")
"""One file, one document."""

LINE_SUFFIXES = (".jsonl", ".jsonl.gz")
"""One line, one document."""

SUFFIXES = DOCUMENT_SUFFIXES + LINE_SUFFIXES

MIN_PART_BYTES = 2 * 2**20
MAX_PART_BYTES = 256 * 2**20
PARTS_WANTED = 64


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file as it was when listed.

    Attributes:
        path: As the user's input leads to it.
        size: Bytes.
        mtime_ns: Time of last change; with `size`, how a change is noticed.
    """

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes [start, stop) of a file. Of a .jsonl: the lines whose first byte lies there."""

    file: InputFile
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Part:
    """A unit of work: slices that one process reads in order and turns into shards of its own."""

    number: int
    slices: tuple[Slice, ...]

    @property
    def name(self) -> str:
        """Stem of the part's files."""
        return f"part-{self.number:05d}"

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return sum(piece.num_bytes for piece in self.slices)


def list_inputs(inputs: Iterable[str]) -> list[InputFile]:
    """Lists the files that `inputs` name: in the order given, sorted by path within each, every file once.

    Raises:
        DataError: No such file, an unsupported file named in full, or an input that matches nothing.
    """
    paths: dict[Path, None] = {}
    for given in inputs:
        found = _expand(given)
        if not found:
            raise DataError("nothing to read", where=given, fix=f"give files of {' '.join(SUFFIXES)}")
        paths.update(dict.fromkeys(found))
    return [_stat(path) for path in paths]


def list_stdlib() -> list[InputFile]:
    """Lists the *.py files of the running Python's standard library, installed packages excluded; about 30 MB."""
    skip = ("site-packages", "dist-packages", "__pycache__")
    return [_stat(path) for path in _walk(Path(sysconfig.get_path("stdlib")), skip) if path.name.endswith(".py")]


def _expand(given: str) -> list[Path]:
    path = Path(given)
    if path.exists():
        if path.is_file() and not path.name.endswith(SUFFIXES):
            raise DataError("unsupported file type", where=given, fix=f"give one of {' '.join(SUFFIXES)}")
        return _supported(path)
    if not glob.has_magic(given):
        raise DataError("no such file or folder", where=given, fix="correct the path")
    matches = glob.glob(given, recursive=True)  # noqa: PTH207 -- Path.glob takes no absolute pattern
    return sorted({path for match in matches for path in _supported(Path(match))}, key=lambda path: path.parts)


def _supported(path: Path) -> list[Path]:
    candidates = _walk(path) if path.is_dir() else [path]
    return [path for path in candidates if path.name.endswith(SUFFIXES)]


def _walk(root: Path, skip_dirs: tuple[str, ...] = ()) -> list[Path]:
    """Returns the files below `root`, sorted by relative path; follows links to folders, each folder once."""

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


def _stat(path: Path) -> InputFile:
    try:
        status = path.stat()
    except OSError as error:
        raise _cannot_read(str(path), error) from error
    return InputFile(str(path), status.st_size, status.st_mtime_ns)


def _cannot_read(path: str, error: OSError) -> DataError:
    return DataError(
        f"cannot be read: {error.strerror or error}", where=path, fix="correct its permissions or remove it"
    )


def plan_part_bytes(files: Iterable[InputFile]) -> int:
    """Returns the size of a part: a 64th of the input, from 2 to 256 MiB."""
    total = sum(file.size for file in files)
    return min(max(total // PARTS_WANTED, MIN_PART_BYTES), MAX_PART_BYTES)


def plan_parts(files: Iterable[InputFile], part_bytes: int) -> list[Part]:
    """Cuts the input into parts of about `part_bytes`, in order. A pure function of the listing.

    Only an uncompressed .jsonl is cut inside a file, by bytes; which line a cut falls in is settled when it is read.
    """
    parts: list[Part] = []
    pending: list[Slice] = []
    room = part_bytes
    for piece in _slices(files, part_bytes):
        pending.append(piece)
        room -= piece.num_bytes
        if room <= 0:
            parts.append(Part(len(parts), tuple(pending)))
            pending, room = [], part_bytes
    if pending:
        parts.append(Part(len(parts), tuple(pending)))
    return parts


def _slices(files: Iterable[InputFile], part_bytes: int) -> Iterator[Slice]:
    for file in files:
        if file.path.endswith(".jsonl") and file.size > part_bytes:
            starts = range(0, file.size, part_bytes)
            yield from (Slice(file, start, min(start + part_bytes, file.size)) for start in starts)
        else:
            yield Slice(file, 0, file.size)
