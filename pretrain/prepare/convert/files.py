"""Which files a source of tokens names: files, folders and globs of this machine, in a fixed order."""

import glob
from collections.abc import Sequence
from pathlib import Path

from pretrain.errors import DataError
from pretrain.prepare.inputs.local import walk
from pretrain.prepare.inputs.urls import is_remote, shown


def find_files(sources: Sequence[str], suffix: str) -> list[Path]:
    """Returns the files whose names end in `suffix`: in the order given, sorted within a folder or glob, each once.

    Raises:
        DataError: A URL, no such file, a file named in full that ends in something else, or nothing found.
    """
    found: dict[Path, None] = {}
    for source in sources:
        files = _expand(source, suffix)
        if not files:
            raise DataError(f"holds no *{suffix}", where=source, fix="correct the path")
        found.update(dict.fromkeys(files))
    return list(found)


def _expand(source: str, suffix: str) -> list[Path]:
    if is_remote(source):
        raise DataError("token data are read from local files only", where=shown(source), fix="copy them first")
    path = Path(source)
    if path.is_dir():
        return [file for file in walk(path) if file.name.endswith(suffix)]
    if path.exists():
        if not path.name.endswith(suffix):
            raise DataError(f"not a *{suffix}", where=source, fix=f"give files that end in {suffix}, or their folder")
        return [path]
    if not glob.has_magic(source):
        raise DataError("no such file or folder", where=source, fix="correct the path")
    matches = sorted(glob.glob(source, recursive=True))  # noqa: PTH207 -- Path.glob takes no absolute pattern
    found = [file for match in matches for file in (walk(Path(match)) if Path(match).is_dir() else [Path(match)])]
    return [file for file in found if file.name.endswith(suffix)]
