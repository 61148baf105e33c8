"""`jsonl`: a line is a record; blank lines are passed over."""

from collections.abc import Iterator

from pretrain.data.documents import Document
from pretrain.data.inputs.opening import InputStream
from pretrain.data.readers.errors import decode
from pretrain.data.readers.framing import Lines
from pretrain.data.readers.lines import UTF8_BOM
from pretrain.data.readers.records import BUILDERS, RecordError, parse_object
from pretrain.data.readers.rule import ReadRule
from pretrain.data.sources import Slice
from pretrain.errors import DataError


def read_jsonl(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a slice. Memory: a line."""
    return read_records(Lines.of_slice(stream, piece, rule.limit), stream.file.shown, rule)


def read_records(lines: Lines, name: str, rule: ReadRule) -> Iterator[Document]:
    """Yields the document of each line; `name` is what the file is called in errors. Raises: DataError."""
    build = BUILDERS[rule.kind]
    for line in lines:
        start = lines.offset
        if start == 0 and line.startswith(UTF8_BOM):
            line, start = line[len(UTF8_BOM) :], len(UTF8_BOM)
        if not line or line.isspace():
            continue
        text = decode(line, name, start)
        try:
            document = build(parse_object(text), rule, lines.consumed_bytes)
        except RecordError as error:
            raise DataError(error.what, where=lines.place(), fix=error.fix) from None
        yield document
