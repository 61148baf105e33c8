"""Listing of the inputs: their files in a fixed order, and their formats.

    list_inputs   [InputConfig] -> [InputFile]: in the order given, sorted within each path
    list_stdlib   the default corpus: the source of the running Python's standard library

text         a file is a document                  jsonl        a line is a record
lines        a line is a document                  json         a list of records, or one record
paired       two files; a line is one side         csv, tsv     a row below the header is a record
                                                   parquet      a row is a record
                                                   arrow        a row is a record
                                                   webdataset   a tar; a sample is a document or records
                                                   warc         a web archive; a page is a document

Files are listed and asked for their sizes, not read.
"""

import logging
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from pretrain.config.prepare import DataKind, InputConfig
from pretrain.errors import ConfigError, DataError, LaunchError, install_fix
from pretrain.kinds.formats import FORMATS
from pretrain.kinds.layouts import LAYOUTS
from pretrain.preparation.input_parts import InputFile
from pretrain.preparation.inputs.hub_datasets import Read, choose_files
from pretrain.preparation.inputs.local_files import find_local, stat_local, walk
from pretrain.preparation.inputs.opening import InputStream
from pretrain.preparation.inputs.remote_files import find_remote, serves_ranges
from pretrain.utils.foreign_files import name_text, read_head
from pretrain.utils.remote import INPUT_SCHEMES, is_remote, without_secrets
from pretrain.utils.units import plural

ASKED_AT_ONCE = 16
FORMAT_OF_SUFFIX = {suffix: name for name, one in FORMATS.items() for suffix in one.suffixes}
COMPRESSION_OF_SUFFIX = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bzip2"}
KNOWN_SUFFIXES = f"{' '.join(FORMAT_OF_SUFFIX)}, or these with {', '.join(COMPRESSION_OF_SUFFIX)}"
AS_TEXT = "every file of an input is read as text by a config's `inputs: [{path: ..., format: text}]`"

# Generated files of the standard library: long tables of characters and numbers, and a manual in strings.
_TABLES = ("encodings", "pydoc_data", "stringprep.py", "entities.py", "_sysconfigdata")

_log = logging.getLogger(__name__)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(::|://)")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def list_inputs(inputs: Sequence[InputConfig], kind: DataKind = "text") -> list[InputFile]:
    """Lists the files of the inputs, each once for each way to read it, or the default corpus.

    Raises:
        ConfigError: Inputs that do not fit together, or cannot contain documents of this kind.
        DataError: No such file, an unsupported file named in full, an input that matches nothing,
            or a server that fails.
        LaunchError: A package that an input needs is not installed.
    """
    if not inputs:
        if not LAYOUTS[kind].library_format:
            text = f"kind={kind} needs inputs: Python's library has none"
            raise ConfigError(text, fix="give --input FILES")
        return [replace(file, format=LAYOUTS[kind].library_format) for file in list_stdlib()]
    files: dict[object, InputFile] = {}
    for number, config in enumerate(inputs):
        how = config.model_copy(update={"path": [], "paired_path": None}).model_dump_json()
        for file in _name_input(number, config):
            _check_kind(file, config, kind)
            pair_path = file.pair and file.pair.path
            # Of a local file, however its path is spelled.
            place = file.path if file.is_remote else os.path.abspath(file.path)  # noqa: PTH100 -- links stay
            files.setdefault((place, pair_path, file.format, how), file)
    return list(files.values())


def list_stdlib() -> list[InputFile]:
    """Lists the *.py files of the running Python's standard library, without generated tables; about 30 MB."""
    paths = walk(Path(sysconfig.get_path("stdlib")), ("site-packages", "dist-packages", "__pycache__", *_TABLES))
    return [stat_local(path) for path in paths if path.suffix == ".py" and not path.name.startswith(_TABLES)]


def _name_input(number: int, config: InputConfig) -> Iterator[InputFile]:
    """Lists the files of an input; an error about its path names the input by its number."""
    try:
        yield from _list_input(number, config)
    except (DataError, LaunchError) as error:
        or_not = f", or leave out this input, of split: {config.split}" if config.split is not None else ""
        raise type(error)(
            error.what,
            where=error.where,
            fix=error.fix.replace("inputs.N.path of a config)", f"inputs.{number}.path of a config){or_not}"),
        ) from None


def _list_input(number: int, config: InputConfig) -> Iterator[InputFile]:
    if not config.paths:
        raise ConfigError(
            f"input {number} names no path",
            where="inputs",
            fix="give it a path, or remove it",
        )
    if config.paired_path is not None:
        yield from _list_paired(number, config, config.paired_path)
        return

    def describe(file: InputFile) -> InputFile:
        named = (_format_of(file.path) or "text") if config.format == "auto" else config.format
        compression = "" if FORMATS[named].is_columnar else _compression_of(file.path)
        can_cut = FORMATS[named].is_cuttable and not compression
        can_cut = can_cut and (not file.is_remote or serves_ranges(file))
        return replace(file, input=number, format=named, compression=compression, is_cuttable=can_cut)

    files = _find_all(config.paths, config.format, config)
    yield from _map(describe, files, at_once=any(file.is_remote for file in files))


def _list_paired(number: int, config: InputConfig, paired_path: str | list[str]) -> Iterator[InputFile]:
    if config.format not in ("auto", "lines"):
        raise ConfigError(
            f"paired_path does not go with format={config.format}",
            where="inputs",
            fix="use format: lines",
        )
    paired = [paired_path] if isinstance(paired_path, str) else paired_path
    sources = _find_all(config.paths, "lines")
    targets = _find_all(paired, "lines")
    if len(sources) != len(targets):
        raise DataError(
            f"path names {len(sources)} files, paired_path {len(targets)}",
            where=without_secrets(config.paths[0]),
            fix="name as many files in the one as in the other, in the same order",
        )
    for sides in zip(sources, targets, strict=True):
        source, target = (
            replace(side, input=number, format="paired", compression=_compression_of(side.path)) for side in sides
        )
        yield replace(source, pair=target)


def _find_all(paths: Sequence[str], wanted: str, config: InputConfig | None = None) -> list[InputFile]:
    """Returns the files that the paths name; with `auto`, the ones of a known format.

    Of a data set, those of the split that `config` asks for.
    """

    find = partial(_find, wanted, config)
    files: dict[str, InputFile] = {}
    for of_path in _map(find, paths, at_once=any(map(is_remote, paths))):
        for file in of_path:
            files.setdefault(file.path, file)
    return list(files.values())


def _find(wanted: str, config: InputConfig | None, given: str) -> list[InputFile]:
    path = unquote(urlsplit(given).path) if _scheme_of(given) == "file" else given
    remote: dict[str, InputFile] = {}
    if is_remote(given):
        remote = find_remote(path)
        listed = list(remote)
    else:
        listed = find_local(path)
    files = listed if config is None else _of_split(given, path, listed, config, partial(_read_beginning, remote))
    chosen = [file for file in files if wanted != "auto" or _format_of(file)]
    # A file that is named and has no ending, as README, is text; of a folder, it may be anything.
    if not chosen and listed == [path] and "." not in _without_compression(path):
        chosen = listed
    if not chosen:
        raise _nothing_to_read(given, path, remote)
    _tell_left_out(given, set(listed).difference(chosen))
    return [remote.get(file) or stat_local(file) for file in chosen]


def _of_split(given: str, path: str, listed: list[str], config: InputConfig, read: Read) -> list[str]:
    """Returns the files of the split that an input asks for; all where they are no data set. Raises: ConfigError."""
    chosen = choose_files(path, listed, config, read)
    if chosen is not None:
        return chosen
    if config.subset or config.dataset_split:
        raise ConfigError(
            f"subset={config.subset}, dataset_split={config.dataset_split} go with a whole data set",
            where=without_secrets(given),
            fix="leave them out, or give hf://datasets/OWNER/NAME or a folder of save_to_disk",
        )
    return listed


def _nothing_to_read(given: str, path: str, remote: dict[str, InputFile]) -> DataError:
    text = "nothing to read"
    fix = f"give files of {KNOWN_SUFFIXES}"
    if path in remote or Path(path).is_file():
        head = b"" if is_remote(given) else read_head(Path(path))
        unknown = ("unsupported file type", f"give one of {KNOWN_SUFFIXES}")
        text, fix = name_text(_name_of(path), head) or unknown
        fix = f"{fix}; {AS_TEXT}"
    return DataError(text, where=without_secrets(given), fix=fix)


def _read_beginning(remote: dict[str, InputFile], name: str, most_bytes: int) -> bytes:
    """Returns the first bytes of a file, one of `remote` or a local one."""
    with InputStream(remote.get(name) or stat_local(name)) as stream:
        return stream.stored.read(most_bytes)


def _tell_left_out(given: str, files: set[str]) -> None:
    """Says how many files of a folder are of types that are not read, by their endings."""
    names = [_name_of(file) for file in files]
    ends = (name[len(Path(_without_compression(name)).stem) :] or "without ending" for name in names)
    endings = Counter(sorted(ends))
    shown = [f"{count} {ending}" for ending, count in endings.most_common(8)]
    if files:
        rest = ", ..." if len(endings) > len(shown) else ""
        text = "%s: %s of other types left out: %s%s; " + AS_TEXT
        _log.info(text, without_secrets(given), plural(len(files), "file"), ", ".join(shown), rest)


def _map(function: Callable[[_Item], _Result], items: Sequence[_Item], at_once: bool) -> Iterator[_Result]:
    """Yields `function` of each item, in order; several at once where servers answer."""
    if not at_once or len(items) < 2:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(ASKED_AT_ONCE)
    try:
        yield from pool.map(function, items)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _scheme_of(path: str) -> str:
    """Returns the scheme of a URL, or the empty string for a path. Raises: DataError."""
    match = _SCHEME.match(path)
    if match is None:
        return ""
    if match[2] == "://" and match[1] in (*INPUT_SCHEMES, "file"):
        return match[1]
    raise DataError(
        f"URLs of {match[1]!r} are not read",
        where=without_secrets(path),
        fix=f"use a path, or a URL of {', '.join(INPUT_SCHEMES)} or file",
    )


def _name_of(path: str) -> str:
    """Returns the end of a path or URL, by which its format goes: no query, no fragment."""
    if path.startswith(("http://", "https://")):
        path = unquote(urlsplit(path).path)
    return path.rpartition("/")[2]


def _without_compression(path: str) -> str:
    """Returns the name without the ending that tells its compression."""
    name = _name_of(path)
    return next((name[: -len(suffix)] for suffix in COMPRESSION_OF_SUFFIX if name.lower().endswith(suffix)), name)


def _by_suffix(name: str, known: dict[str, str]) -> str:
    return next((value for suffix, value in known.items() if name.lower().endswith(suffix)), "")


def _compression_of(path: str) -> str:
    return _by_suffix(_name_of(path), COMPRESSION_OF_SUFFIX)


def _format_of(path: str) -> str:
    name = _by_suffix(_without_compression(path), FORMAT_OF_SUFFIX)
    # A columnar file compresses its pages; as a whole it could not be cut.
    return "" if name and FORMATS[name].is_columnar and _compression_of(path) else name


def _check_kind(file: InputFile, config: InputConfig, kind: DataKind) -> None:
    """Refuses a file that cannot contain this kind. Raises: ConfigError, LaunchError."""
    layouts = FORMATS[file.format].layouts
    if layouts and kind not in layouts:
        text = f"format={file.format} holds no {kind}"
        fix = "give .jsonl, .json, .parquet or webdataset tars of records"
        if config.paired_path is not None:
            text = f"paired_path goes with kind=pairs, not with kind={kind}"
            fix = "leave it out, or set kind: pairs"
        elif LAYOUTS[kind].has_source:
            fix = "give records with source_field and target_field, or paired_path and format: lines"
        raise ConfigError(text, where=file.shown, fix=fix)
    if needs := FORMATS[file.format].needs:
        noun, package, extra = needs
        if find_spec(package) is None:
            raise LaunchError(f"{noun} are read by {package}, which is not installed", fix=install_fix(extra))
