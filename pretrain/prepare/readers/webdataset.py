"""Members of a tar, in order, read forward only, and nothing of it taken on trust.

Neither tarfile's nor webdataset's own reading: they take a tar that was cut off, or is damaged
between two members, for a whole one, and webdataset reads every member into memory. Nothing is
extracted: names are keys here, never paths.
"""

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from pretrain.errors import DataError
from pretrain.prepare.filters import Document
from pretrain.prepare.input_parts import Slice
from pretrain.prepare.inputs.opening import InputStream
from pretrain.prepare.readers.json import read_records
from pretrain.prepare.readers.lines import Lines
from pretrain.prepare.readers.records import BUILDERS, RecordError, parse_object
from pretrain.prepare.readers.rule import ReadRule, decode, too_long

SKIP_BYTES = 2**20

MAX_NAME_BYTES = 2**20

_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)

_NAMED_NEXT = (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)

_PASSED_OVER = (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK, tarfile.DIRTYPE)


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in a tar.

    Attributes:
        name: Name in the tar.
        size: Size in bytes.
        offset: Offset of its header in the tar, uncompressed.
    """

    name: str
    size: int
    offset: int


class TarMembers:
    """The regular files of an open tar."""

    def __init__(self, plain: BinaryIO, name: str) -> None:
        """Takes over an open tar, at its beginning; `name` is what it is called in errors."""
        self._plain = plain
        self._name = name
        self.position = 0
        self._body_left = self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        """Yields the members; what is not read of one is passed over.

        Raises:
            DataError: A tar that is damaged or cut off, or a member that is no regular file.
        """
        overrides: dict[str, str] = {}
        while True:
            self._pass_over(self._body_left + self._padding)
            offset = self.position
            info = self._read_header()
            if info is None:
                return
            self._body_left = info.size
            self._padding = -info.size % tarfile.BLOCKSIZE
            if info.type in _NAMED_NEXT:
                overrides |= self._read_overrides(info, offset)
                continue
            if info.type not in _REGULAR and info.type not in _PASSED_OVER:
                raise self._error(f"member {info.name!r} is not a regular file", offset, "make the tar without links")
            if info.type in _REGULAR:
                size = int(overrides.get("size", info.size))
                self._body_left = size
                self._padding = -size % tarfile.BLOCKSIZE
                yield Member(overrides.get("path", info.name), size, offset)
            if info.type != tarfile.XGLTYPE:
                overrides = {}

    def read(self, num_bytes: int) -> bytes:
        """Reads up to `num_bytes` of the last member; empty at its end. Raises: DataError, where the tar is cut off."""
        wanted = min(num_bytes, self._body_left)
        data = self._plain.read(wanted)
        if len(data) < wanted:
            raise self._cut_off()
        self._body_left -= wanted
        self.position += wanted
        return data

    def open_body(self) -> BinaryIO:
        """Returns the last member as a file."""
        return cast(BinaryIO, io.BufferedReader(_Body(self), io.DEFAULT_BUFFER_SIZE))

    def _read_header(self) -> tarfile.TarInfo | None:
        """Reads a header; returns None at the end mark, after which there must be nothing."""
        block = self._plain.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE:
            raise self._cut_off()
        if not any(block):
            while rest := self._plain.read(SKIP_BYTES):
                if rest.strip(b"\0"):
                    raise self._error("data after the end of the tar", self.position, "give joined tars one by one")
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            raise self._error(f"damaged, or not a tar: {error}", self.position, "copy the file again") from None
        self.position += tarfile.BLOCKSIZE
        if info.size < 0:
            raise self._error("damaged: a member of negative size", self.position, "copy the file again")
        return info

    def _read_overrides(self, info: tarfile.TarInfo, offset: int) -> dict[str, str]:
        """Reads a member that holds a long name, or the attributes, of the next."""
        if info.size > MAX_NAME_BYTES:
            raise self._error(f"a name or attributes of {info.size} bytes", offset, "make the tar anew")
        data = self.read(info.size)
        if info.type == tarfile.GNUTYPE_LONGNAME:
            return {"path": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
        try:
            found = dict(_pax_records(data))
            if int(found.get("size", 0)) < 0:
                raise ValueError("a negative size")
        except ValueError:
            raise self._error("damaged: malformed attributes", offset, "copy the file again") from None
        if any(key.startswith("GNU.sparse.") for key in found):
            raise self._error("a sparse member", offset, "make the tar without --sparse")
        return found

    def _pass_over(self, num_bytes: int) -> None:
        while num_bytes > 0:
            data = self._plain.read(min(num_bytes, SKIP_BYTES))
            if not data:
                raise self._cut_off()
            num_bytes -= len(data)
            self.position += len(data)

    def _cut_off(self) -> DataError:
        return self._error("the tar is cut off: it has no end mark", self.position, "copy the file again")

    def _error(self, what: str, offset: int, fix: str) -> DataError:
        return DataError(what, where=f"{self._name}@{offset}", fix=fix)


def _pax_records(data: bytes) -> Iterator[tuple[str, str]]:
    """Yields the attributes, each written as `LENGTH KEY=VALUE` and a line end. Raises: ValueError."""
    while data.strip(b"\0"):
        digits, _, _ = data.partition(b" ")
        length = int(digits)
        key, equals, value = data[len(digits) + 1 : length - 1].partition(b"=")
        if not equals or data[length - 1 : length] != b"\n":
            raise ValueError("not an attribute")
        yield key.decode(), value.decode("utf-8", "surrogateescape")
        data = data[length:]


class _Body(io.RawIOBase):
    """The bytes of the last member."""

    def __init__(self, members: TarMembers) -> None:
        self._members = members

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._members.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


# `webdataset`: a tar of samples; members whose names agree up to the first dot are one sample.
#
#     KEY.txt      the text of a document; KEY.json beside it has its fields
#     KEY.json     a record
#     KEY.jsonl    a record a line
#
# Members of other kinds may stand beside these and are passed over; a sample of them alone is an
# error. Nothing is decoded but text and JSON.


TEXT_MEMBERS = ("txt", "json", "jsonl")


def read_webdataset(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a tar. Memory: the text and JSON of a sample, or a line of a .jsonl member.

    Raises:
        DataError: Malformed input.
    """
    members = TarMembers(stream.plain, stream.file.shown)
    sample: _Sample | None = None
    for member in members:
        key, kind = split_name(member.name)
        if not key:
            continue
        if sample is None or sample.key != key:
            if sample is not None:
                yield from sample.finish(member.offset)
            sample = _Sample(key, stream, rule, member.offset)
        yield from sample.add(kind, member, members)
    if sample is not None:
        yield from sample.finish(members.position)


def split_name(name: str) -> tuple[str, str]:
    """Returns the key of a member and what it holds, or nothing for one that is of no sample: no dot, or hidden."""
    folder, slash, base = name.rpartition("/")
    stem, dot, kind = base.partition(".")
    return (folder + slash + stem, kind.lower()) if stem and dot else ("", "")


class _Sample:
    """One sample while its members come."""

    def __init__(self, key: str, stream: InputStream, rule: ReadRule, offset: int) -> None:
        self.key = key
        self._stream = stream
        self._rule = rule
        self._offset = offset
        self._bodies: dict[str, bytes] = {}
        self._kinds: list[str] = []
        self._consumed_before = stream.stored.tell() if stream.file.compression else offset

    def add(self, kind: str, member: Member, members: TarMembers) -> Iterator[Document]:
        """Takes one member in; yields the documents of one that has many."""
        if kind in self._kinds:
            raise self._error(f"sample {self.key!r} has two members .{kind}", "give each sample a key of its own")
        self._kinds.append(kind)
        if kind == "jsonl":
            name = f"{self._stream.file.shown}/{member.name}"
            stored = self._stream.stored if self._stream.file.compression else None
            lines = Lines(members.open_body(), name, self._rule.limit, stored=stored)
            yield from read_records(lines, name, self._rule)
        elif kind in TEXT_MEMBERS:
            if member.size > self._rule.limit:
                raise too_long(f"member {member.name!r} of {member.size} bytes", self._rule.limit, self._place())
            self._bodies[kind] = members.read(member.size)

    def finish(self, stop: int) -> Iterator[Document]:
        """Yields the document of a sample whose last member ends before byte `stop` of the tar."""
        found = [kind for kind in TEXT_MEMBERS if kind in self._kinds]
        if not found or ("jsonl" in found and len(found) > 1):
            has = ", ".join(f".{kind}" for kind in found or self._kinds)
            what = "no text" if not found else "two texts"
            fix = "give .txt, .json or .jsonl, and of these only .txt and .json together"
            raise self._error(f"sample {self.key!r} has {what} (it has {has})", fix)
        if found == ["jsonl"]:
            return
        yield self._document(stop)

    def _document(self, stop: int) -> Document:
        end = self._stream.stored.tell() if self._stream.file.compression else stop
        consumed = end - self._consumed_before
        try:
            record = self._record()
            if "txt" in self._bodies:
                return self._text_document(record, consumed)
            return BUILDERS[self._rule.kind](record, self._rule, consumed)
        except RecordError as error:
            raise self._error(f"sample {self.key!r}: {error.what}", error.fix) from None

    def _text_document(self, record: dict[str, Any], consumed: int) -> Document:
        if self._rule.kind != "text":
            raise RecordError(f"a .txt member holds no {self._rule.kind}", "give .json or .jsonl members")
        utf8 = self._bodies["txt"]
        text = decode(utf8, f"{self._stream.file.shown}/{self.key}.txt", 0)
        fields = {name: record[name] for name in self._rule.fields if name in record}
        return Document(text, utf8, consumed, fields=fields)

    def _record(self) -> dict[str, Any]:
        """The record of the .json member, or an empty one."""
        body = self._bodies.get("json")
        return {} if body is None else parse_object(decode(body, f"{self._stream.file.shown}/{self.key}.json", 0))

    def _place(self) -> str:
        return f"{self._stream.file.shown}@{self._offset}"

    def _error(self, what: str, fix: str) -> DataError:
        return DataError(what, where=self._place(), fix=fix)
