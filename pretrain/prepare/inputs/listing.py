"""Listing of the inputs: their files in a fixed order, before anything is written.

    list_inputs   [InputConfig] -> [InputFile]: in the order given, sorted by path within each path, every file once
    list_stdlib   the default corpus: the source of the running Python's standard library

Files are listed and asked for their sizes, not read. An input that names nothing readable is refused here.
"""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pretrain.config.prepare import DataKind, InputConfig
from pretrain.errors import ConfigError, DataError
from pretrain.prepare.input_parts import InputFile, local_path, scheme_of
from pretrain.prepare.inputs.local_files import (
    CUTTABLE,
    KNOWN_SUFFIXES,
    check_kind,
    compression_of,
    find_local,
    format_of,
    stat_local,
    walk,
)
from pretrain.prepare.inputs.remote_files import find_remote, serves_ranges
from pretrain.utils.remote import is_remote, without_secrets

ASKED_AT_ONCE = 16

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def list_inputs(inputs: Sequence[InputConfig], kind: DataKind = "text") -> list[InputFile]:
    """Lists the files that `inputs` name. A file that is named again, to be read in the same way, is listed once.

    Args:
        inputs: What to read. Empty: the default corpus.
        kind: Kind of the documents.

    Raises:
        ConfigError: Inputs that do not fit together, or cannot hold documents of this kind.
        DataError: No such file, an unsupported file named in full, an input that matches nothing,
            or a server that fails.
        LaunchError: A package that an input needs is not installed.
    """
    if not inputs:
        return list_stdlib()
    files: dict[object, InputFile] = {}
    for number, config in enumerate(inputs):
        how = config.model_copy(update={"path": [], "paired_path": None}).model_dump_json()
        for file in _list_input(number, config):
            check_kind(file, config, kind)
            files.setdefault((file.path, file.pair and file.pair.path, file.format, how), file)
    return list(files.values())


def list_stdlib() -> list[InputFile]:
    """Lists the *.py files of the running Python's standard library, installed packages excluded; about 30 MB."""
    skip = ("site-packages", "dist-packages", "__pycache__")
    paths = walk(Path(sysconfig.get_path("stdlib")), skip)
    return [stat_local(path) for path in paths if path.name.endswith(".py")]


def _list_input(number: int, config: InputConfig) -> Iterator[InputFile]:
    if not config.paths:
        raise ConfigError(f"input {number} names no path", where="inputs", fix="give it a path, or remove it")
    if config.paired_path is not None:
        yield from _list_paired(number, config)
        return

    def describe(file: InputFile) -> InputFile:
        known = format_of(file.path) if config.format == "auto" else config.format
        compression = "" if known == "parquet" else compression_of(file.path)
        can_cut = known in CUTTABLE and not compression and (not file.is_remote or serves_ranges(file))
        return replace(file, input=number, format=known, compression=compression, is_cuttable=can_cut)

    files = _find_all(config.paths, config.format)
    yield from _map(describe, files, at_once=any(file.is_remote for file in files))


def _list_paired(number: int, config: InputConfig) -> Iterator[InputFile]:
    if config.format not in ("auto", "lines"):
        raise ConfigError(
            f"paired_path does not go with format={config.format}", where="inputs", fix="use format: lines"
        )
    paired = [config.paired_path] if isinstance(config.paired_path, str) else config.paired_path or []
    sources, targets = _find_all(config.paths, "lines"), _find_all(paired, "lines")
    if len(sources) != len(targets):
        raise DataError(
            f"path names {len(sources)} files, paired_path {len(targets)}",
            where=without_secrets(config.paths[0]),
            fix="name as many files in the one as in the other, in the same order",
        )
    for source, target in zip(sources, targets, strict=True):
        sides = [replace(side, input=number, compression=compression_of(side.path)) for side in (source, target)]
        yield replace(sides[0], format="paired", pair=replace(sides[1], format="paired"))


def _find_all(paths: Sequence[str], wanted: str) -> list[InputFile]:
    """Returns the files that the paths name; with `auto`, of folders and globs only those of a known format."""
    accepts = format_of if wanted == "auto" else lambda path: True

    def find(given: str) -> list[InputFile]:
        scheme_of(given)
        found = find_remote(given, accepts) if is_remote(given) else find_local(local_path(given), accepts)
        if not found:
            raise DataError("nothing to read", where=without_secrets(given), fix=f"give files of {KNOWN_SUFFIXES}")
        return found

    files: dict[str, InputFile] = {}
    for found in _map(find, paths, at_once=any(map(is_remote, paths))):
        for file in found:
            files.setdefault(file.path, file)
    return list(files.values())


def _map(function: Callable[[_Item], _Result], items: Sequence[_Item], at_once: bool) -> Iterator[_Result]:
    """Yields `function` of each item, in order; several at once where a server takes its time to answer."""
    if not at_once or len(items) < 2:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(ASKED_AT_ONCE)
    try:
        yield from pool.map(function, items)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
