"""`lines`: a line is a document, without its end; an empty line is an empty one."""

from collections.abc import Iterator

from pretrain.prepare.documents import Document
from pretrain.prepare.inputs.opening import InputStream
from pretrain.prepare.readers.errors import decode
from pretrain.prepare.readers.framing import Lines, strip_end
from pretrain.prepare.readers.rule import ReadRule
from pretrain.prepare.sources import Slice

UTF8_BOM = b"\xef\xbb\xbf"


def line_text(line: bytes, lines: Lines, name: str) -> tuple[str, bytes]:
    """Returns the text of the last line of `lines`, and it in UTF-8. Raises: DataError."""
    utf8 = strip_end(line)
    start = lines.offset
    if start == 0 and utf8.startswith(UTF8_BOM):
        utf8, start = utf8[len(UTF8_BOM) :], len(UTF8_BOM)
    return decode(utf8, name, start), utf8


def read_lines(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a slice. Memory: a line."""
    lines = Lines.of_slice(stream, piece, rule.limit)
    for line in lines:
        text, utf8 = line_text(line, lines, stream.file.shown)
        yield Document(text, utf8, lines.consumed_bytes)
