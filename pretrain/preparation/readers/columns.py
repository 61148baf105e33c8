"""Columns of the first records of an input of any format, before the kind of documents is chosen."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pkgutil import resolve_name
from typing import Any, NamedTuple

from pretrain.config.prepare import InputConfig
from pretrain.kinds.formats import FORMATS
from pretrain.preparation.filters import Document
from pretrain.preparation.input_parts import Slice
from pretrain.preparation.inputs.listing import list_inputs
from pretrain.preparation.inputs.opening import InputStream
from pretrain.preparation.readers.records import ReadRule


class RecordColumns(NamedTuple):
    """Names of the fields of one record, and its place: the file and its number there, from 1."""

    names: tuple[str, ...]
    file: str
    number: int


class _AllColumns(ReadRule):
    """Rule by which a record of any kind is a document without a text, with all its fields."""

    def choose_columns(self, known: Sequence[str], where: str) -> list[str]:
        return list(known)

    def build(self, record: Mapping[str, Any], consumed_bytes: int) -> Document:
        return Document("", b"", consumed_bytes, fields=record)


def read_columns(path: str, most: int = 1000) -> Iterator[RecordColumns]:
    """Yields the columns of at most `most` records of each file. Texts without records have the fields of their layout.

    Raises:
        ConfigError: No such format.
        DataError: No such file, or it cannot be read.
        LaunchError: A package that the format needs is not installed.
    """
    config = InputConfig(path=path)
    for file in list_inputs([config]):
        texts = FORMATS[file.format].layouts
        if texts:
            yield RecordColumns(field_names(config, texts[0]), file.shown, 1)
            continue
        with InputStream(file) as stream:
            piece = Slice(file, 0, file.size)
            documents = resolve_name(FORMATS[file.format].read)(stream, piece, _AllColumns(config))
            for number, document in enumerate(islice(documents, most), start=1):
                yield RecordColumns(tuple(document.fields), file.shown, number)


def field_names(config: InputConfig, kind: str, known: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the columns that documents of a kind need. `known`: all columns of a record."""
    needed, _ = ReadRule(config, kind).text_fields(known)
    return tuple(needed.values())
