"""`warc`: pages of a web archive (Common Crawl and others), as text.

    response, resource    HTML: the main content, by resiliparse; plain text as it is
    conversion            plain text, as in a .wet file

Records of other types (request, metadata, revisit) have no page. What has no text here is counted
as `not_a_page`: other media types, statuses other than 200, pages of more levels of elements than
browsers keep, and records over the limit, which are not read. The text is decoded as browsers do:
by a byte-order mark, the charset of the server, that of the page, or by detection; a name that
browsers do not know counts as none, and wrong bytes become U+FFFD.

Records are cut here, by their Content-Length: warcio 1.8 and FastWARC 2.0 take an archive that was
cut off for a whole one. FastWARC then parses the one record, with its chunked and compressed bodies.
"""

import codecs
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple

from pretrain.preparation.filters import DAMAGED, NOT_A_PAGE, BadInputError, Document
from pretrain.preparation.input_parts import Slice
from pretrain.preparation.inputs.opening import InputStream
from pretrain.preparation.readers.records import ReadRule, RecordError

SKIP_BYTES = 2**20
MAX_HEADER_BYTES = 2**20
HTML = ("text/html", "application/xhtml+xml")
PLAIN = "text/plain"
MAX_DEPTH = 512
"""Most levels of elements, as in Chromium and WebKit."""
PAGE_TYPES = ("response", "resource", "conversion")

# Of elements that may contain themselves.
_NESTING_TAG = re.compile(
    r"<(/?)(?!(?:br|hr|img|input|meta|link|p|li|dd|dt|t[hdr]|tbody|option|source|wbr)\b)[a-z]", re.IGNORECASE
)
_FIX = "copy the file again"
_BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


class _Head(NamedTuple):
    """The headers of a record; `offset` is where it begins, uncompressed."""

    offset: int
    raw: bytes  # with the empty line at their end
    fields: dict[str, str]  # by lower-case name
    num_bytes: int  # of the content


class _RecordReader:
    """The records of an open archive, in order."""

    def __init__(self, plain: BinaryIO, name: str) -> None:
        self._plain = plain
        self._name = name
        self._position = 0

    def next_head(self) -> _Head | None:
        """Reads the headers of the next record; None at the archive's end. Raises: DataError."""
        offset = self._position
        line = self._readline(MAX_HEADER_BYTES)
        while line in (b"\r\n", b"\n"):  # after the record before
            offset = self._position
            line = self._readline(MAX_HEADER_BYTES)
        if not line:
            return None
        if not line.startswith(b"WARC/"):
            raise self.error("damaged, or not a WARC: no record begins here", offset)
        raw = bytearray(line)
        fields: dict[str, str] = {}
        while (line := self._readline(MAX_HEADER_BYTES - len(raw))) not in (b"\r\n", b"\n"):
            if not line.endswith(b"\n"):
                text = "the archive is cut off in the headers of a record"
                if len(raw) + len(line) >= MAX_HEADER_BYTES:
                    text = "headers without an end"
                raise self.error(text, offset)
            raw += line
            key, _, value = line.decode("utf-8", "replace").partition(":")
            fields[key.strip().lower()] = value.strip()
        length = fields.get("content-length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 19):
            raise self.error(f"a record whose Content-Length is {length!r}", offset)
        return _Head(offset, bytes(raw + line), fields, int(length))

    def read_content(self, head: _Head) -> bytes:
        """Reads the content of a record. Raises: DataError: cut off."""
        content = self._plain.read(head.num_bytes)
        self._position += len(content)
        self._check_whole(head, len(content))
        return content

    def skip_content(self, head: _Head) -> None:
        """Passes over the content of a record. Raises: DataError: cut off."""
        left_bytes = head.num_bytes
        while left_bytes and (piece := self._plain.read(min(left_bytes, SKIP_BYTES))):
            left_bytes -= len(piece)
        self._position += head.num_bytes - left_bytes
        self._check_whole(head, head.num_bytes - left_bytes)

    def error(self, what: str, offset: int) -> BadInputError:
        """Builds the error of a record."""
        return BadInputError(what, where=f"{self._name}, byte {offset}", fix=_FIX)

    def _check_whole(self, head: _Head, num_bytes: int) -> None:
        if num_bytes < head.num_bytes:
            raise self.error(
                f"the archive is cut off: {num_bytes} of the {head.num_bytes} bytes of a record",
                head.offset,
            )

    def _readline(self, room: int) -> bytes:
        line = self._plain.readline(room)
        self._position += len(line)
        return line


def read_warc(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the pages of an archive. Memory: a record, of at most the limit, its page and its text."""
    name = stream.file.shown
    records = _RecordReader(stream.plain, name)
    before = 0
    while (head := records.next_head()) is not None:
        text: str | None = None
        if head.fields.get("warc-type", "") not in PAGE_TYPES:
            records.skip_content(head)
            continue
        media_type = ""
        bad = None
        if head.num_bytes > rule.limit:
            records.skip_content(head)
        else:
            try:
                media_type, text = _page(records, head, rule.limit)
            except RecordError as error:
                bad = error.at(f"{name}, byte {head.offset}")
        position = stream.stored.tell()
        consumed_bytes = position - before
        before = position
        if bad is not None:
            yield rule.leave_out(bad, consumed_bytes)
            continue
        if text is None:
            yield Document("", b"", consumed_bytes, refused=NOT_A_PAGE)
            continue
        fields = {
            "url": head.fields.get("warc-target-uri", "").strip("<>"),
            "date": head.fields.get("warc-date", ""),
            "media_type": media_type,
        }
        try:
            document = rule.build({**fields, rule.config.text_field: text}, consumed_bytes)
        except RecordError as error:
            document = rule.leave_out(error.at(f"{name}, byte {head.offset}"), consumed_bytes)
        yield document


def _page(records: _RecordReader, head: _Head, limit: int) -> tuple[str, str | None]:
    """Returns the media type of a record and the text of its page; None: it is none.

    Raises: BadInputError: The archive is cut off; RecordError: The record is damaged.
    """
    from fastwarc.warc import WarcRecord

    content = records.read_content(head)
    try:
        record = WarcRecord.from_bytes(head.raw + content + b"\r\n\r\n")
        is_response = head.fields["warc-type"] == "response"
        if is_response:
            record.parse_http(auto_decode="all", quirks_mode=True)
            if record.http_headers is None or record.http_headers.status_code != 200:
                return "", None
        # Of a response, that of the server; of others, that of the record.
        declared = record.http_content_type if is_response else head.fields.get("content-type")
        media_type = (declared or "").partition(";")[0].strip().lower()
        if media_type not in (*HTML, PLAIN):
            return media_type, None
        body = record.reader.read(limit + 1)
    except (OSError, ValueError) as error:
        raise RecordError(f"a damaged record: {error}", _FIX, DAMAGED) from None
    if len(body) > limit:
        return media_type, None
    text = _decode(body, record.http_charset if is_response else None)
    if media_type not in HTML:
        return media_type, text
    if _is_too_deep(text):
        return media_type, None
    from resiliparse.extract.html2text import extract_plain_text

    return media_type, extract_plain_text(text, main_content=True, alt_texts=False)


def _decode(body: bytes, charset: str | None) -> str:
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5

    marked = next((encoding for bom, encoding in _BOMS.items() if body.startswith(bom)), None)
    # By the table of browsers, which has no codecs that are none of text; other names count as none.
    named = charset and map_encoding_to_html5(charset, fallback_utf8=False)
    encoding = marked or named or detect_encoding(body, from_html_meta=True) or "utf-8"
    # Without other encodings to try, which would decode a whole page wrongly for one wrong byte.
    return bytes_to_str(body, encoding, errors="replace", fallback_encodings=())


def _is_too_deep(html: str) -> bool:
    """True for a page whose main content takes time that grows with the square of its depth."""
    steps = (-1 if closes else 1 for closes in _NESTING_TAG.findall(html))
    if max(accumulate(steps, lambda depth, step: max(0, depth + step), initial=0)) <= MAX_DEPTH:
        return False
    from resiliparse.parse.html import HTMLTree, traverse_dom

    def look(context: Any) -> None:
        if context.depth > MAX_DEPTH:
            raise OverflowError

    root = HTMLTree.parse(html).document
    try:  # scripts have tags too, and some elements close others
        if root is not None:
            traverse_dom(root, look)
    except OverflowError:
        return True
    return False
