"""`text`: a file is one document, byte for byte, without translation of line ends."""

from collections.abc import Iterator
from typing import BinaryIO

from pretrain.prepare.documents import Document
from pretrain.prepare.inputs.opening import InputStream
from pretrain.prepare.readers.errors import not_utf8, too_long
from pretrain.prepare.readers.rule import ReadRule
from pretrain.prepare.sources import Slice

BLOCK_BYTES = 2**20


def read_text(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the one document of a file. Memory: the file, of at most the limit."""
    file = stream.file
    if not file.compression and file.size > rule.limit:
        raise too_long(f"a document of {file.size} bytes", rule.limit, file.shown)
    utf8 = _read_up_to(stream.plain, rule.limit) if file.compression else stream.plain.read()
    if len(utf8) > rule.limit:
        raise too_long("a document", rule.limit, file.shown)
    try:
        text = utf8.decode()
    except UnicodeDecodeError as error:
        if not rule.skip_undecodable:
            raise not_utf8(error, file.shown, 0) from None
        yield Document("", b"", file.size, is_undecodable=True)
    else:
        yield Document(text, utf8, file.size)


def _read_up_to(plain: BinaryIO, limit: int) -> bytes:
    """Reads to the end, or a block further than the limit."""
    utf8 = bytearray()
    while len(utf8) <= limit and (block := plain.read(BLOCK_BYTES)):
        utf8 += block
    return bytes(utf8)
