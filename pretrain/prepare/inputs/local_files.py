"""Formats of input files by their names, the kinds of data that each can contain, and local listings.

text         a file is a document                  jsonl        a line is a record
lines        a line is a document                  json         a list of records, or one record
paired       two files; a line is one side         parquet      a row is a record
                                                   webdataset   a tar; a sample is a document or records
"""

import glob
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from pretrain.config.prepare import DATA_KINDS, DataKind, InputConfig
from pretrain.errors import ConfigError, DataError, LaunchError
from pretrain.prepare.input_parts import InputFile, name_of

FORMAT_OF_SUFFIX = {
    ".txt": "text",
    ".py": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".tar": "webdataset",
}

COMPRESSION_OF_SUFFIX = {".gz": "gzip", ".zst": "zstd"}

KNOWN_SUFFIXES = f"{' '.join(FORMAT_OF_SUFFIX)}, or these with {' or '.join(COMPRESSION_OF_SUFFIX)}"

CUTTABLE = ("lines", "jsonl", "parquet")

KINDS_OF_FORMAT: dict[str, tuple[DataKind, ...]] = {"text": ("text",), "lines": ("text",), "paired": ("pairs",)}

"""Those of the other formats, which hold records: all."""


def compression_of(path: str) -> str:
    """Returns the compression that the name says, or the empty string."""
    name = name_of(path)
    found = (compression for suffix, compression in COMPRESSION_OF_SUFFIX.items() if name.endswith(suffix))
    return next(found, "")


def format_of(path: str) -> str:
    """Returns the format that the name says, or the empty string where it says none that is known."""
    name = name_of(path)
    for suffix in COMPRESSION_OF_SUFFIX:
        name = name.removesuffix(suffix)
    found = (known for suffix, known in FORMAT_OF_SUFFIX.items() if name.endswith(suffix))
    known = next(found, "")
    return "" if known == "parquet" and compression_of(path) else known


def check_kind(file: InputFile, config: InputConfig, kind: DataKind) -> None:
    """Refuses a file that cannot hold documents of this kind.

    Raises:
        ConfigError: It cannot.
        LaunchError: The package that reads its format is not installed.
    """
    if kind not in KINDS_OF_FORMAT.get(file.format, DATA_KINDS):
        if config.paired_path is not None:
            what, fix = f"paired_path goes with kind=pairs, not with kind={kind}", "leave it out, or set kind: pairs"
        elif kind == "pairs":
            what = f"format={file.format} holds no pairs"
            fix = "give records with source_field and target_field, or paired_path and format: lines"
        else:
            what = f"format={file.format} holds no {kind}"
            fix = "give .jsonl, .json, .parquet or webdataset tars of records"
        raise ConfigError(what, where=file.shown, fix=fix)
    if file.format == "parquet":
        require("pyarrow", "parquet", "Parquet files are read")


def require(package: str, extra: str, what: str) -> None:
    """Checks that an optional package is there.

    Raises:
        LaunchError: It is not; names the extra that brings it.
    """
    if find_spec(package) is None:
        raise LaunchError(
            f"{what} by {package}, which is not installed", fix=f"run: python -m pip install 'pretrain[{extra}]'"
        )


# Files, folders (recursive, hidden files skipped) and globs.


Accepts = Callable[[str], object]

"""Returns a true value for a path whose format is known."""


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
