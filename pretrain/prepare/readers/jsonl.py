"""`jsonl`: a line is a record; blank lines are passed over."""

from collections.abc import Iterator

from pretrain.errors import DataError
from pretrain.prepare.documents import Document
from pretrain.prepare.inputs.opening import InputStream
from pretrain.prepare.readers.errors import decode
from pretrain.prepare.readers.framing import Lines
from pretrain.prepare.readers.lines import UTF8_BOM
from pretrain.prepare.readers.records import BUILDERS, RecordError, parse_object
from pretrain.prepare.readers.rule import ReadRule
from pretrain.prepare.sources import Slice


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
