"""`webdataset`: a tar of samples; members whose names agree up to the first dot are one sample.

    KEY.txt      the text of a document; KEY.json of the same sample has its fields
    KEY.json     a record
    KEY.jsonl    a record a line

Members of other kinds are skipped; a sample of them alone is an error. Nothing is decoded but text and JSON.

The tar is read forward only, and nothing of it is trusted. Neither tarfile nor webdataset reads it:
they take a tar that was cut off, or is damaged between two members, for a whole one, and webdataset
reads every member into memory. Nothing is extracted: names are keys here, never paths.
"""

import io
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from pretrain.errors import DataError
from pretrain.prepare.filters import Document
from pretrain.prepare.input_parts import Slice
from pretrain.prepare.inputs.opening import InputStream
from pretrain.prepare.readers.json import read_records
from pretrain.prepare.readers.lines import Lines
from pretrain.prepare.readers.records import (
    ReadRule,
    RecordError,
    decode,
    parse_object,
    too_long,
)

SKIP_BYTES = 2**20
MAX_NAME_BYTES = 2**20
TEXT_MEMBERS = ("txt", "json", "jsonl")

_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_NAMED_NEXT = (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_SKIPPED = (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK, tarfile.DIRTYPE)


class TarMember(io.RawIOBase):
    """A member of a tar, as a stream of its bytes, until the next member is asked for.

    Attributes:
        path: Name in the tar.
        size: Size in bytes.
        offset: Offset of its header in the tar, uncompressed.
        left_bytes: Bytes that were not read yet.
    """

    def __init__(self, tar: "TarReader", path: str, size: int, offset: int) -> None:
        self._tar = tar
        self.path = path
        self.size = size
        self.offset = offset
        self.left_bytes = size

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills `buffer`. Raises: DataError, where the tar is cut off."""
        data = self._tar.read(min(len(buffer), self.left_bytes))
        self.left_bytes -= len(data)
        buffer[: len(data)] = data
        return len(data)


class TarReader:
    """The regular files of an open tar, in order; `position` is the offset in it, uncompressed."""

    def __init__(self, plain: BinaryIO, name: str) -> None:
        """Takes over an open tar, at its beginning; `name` is for errors."""
        self._plain = plain
        self._name = name
        self.position = 0

    def __iter__(self) -> Iterator[TarMember]:
        """Yields the members; their unread bytes are skipped.

        Raises:
            DataError: A tar that is damaged or cut off, or a member that is no regular file.
        """
        overrides: dict[str, str] = {}
        while (info := self._read_header()) is not None:
            offset = self.position - tarfile.BLOCKSIZE
            is_regular = info.type in _REGULAR
            size = int(overrides.get("size", info.size)) if is_regular else info.size
            member = TarMember(self, overrides.get("path", info.name), size, offset)
            if info.type in _NAMED_NEXT:
                overrides |= self._read_overrides(info, member)
            elif is_regular:
                yield member
                overrides = {}
            elif info.type not in _SKIPPED:
                what = f"member {info.name!r} is not a regular file"
                raise self._error(what, offset, "make the tar without links")
            elif info.type != tarfile.XGLTYPE:
                overrides = {}
            left_bytes = member.left_bytes + -size % tarfile.BLOCKSIZE
            while left_bytes:
                left_bytes -= len(self.read(min(left_bytes, SKIP_BYTES)))

    def read(self, num_bytes: int) -> bytes:
        """Reads exactly `num_bytes`. Raises: DataError, where the tar is cut off."""
        data = self._plain.read(num_bytes)
        if len(data) < num_bytes:
            what = "the tar is cut off: it has no end mark"
            raise self._error(what, self.position, "copy the file again")
        self.position += num_bytes
        return data

    def _read_header(self) -> tarfile.TarInfo | None:
        """Reads a header; returns None at the end mark, after which there must be nothing."""
        offset = self.position
        block = self.read(tarfile.BLOCKSIZE)
        if not any(block):
            self.position = offset
            while rest := self._plain.read(SKIP_BYTES):
                if rest.strip(b"\0"):
                    what = "data after the end of the tar"
                    raise self._error(what, offset, "give joined tars one by one")
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            what = f"damaged, or not a tar: {error}"
            raise self._error(what, offset, "copy the file again") from None
        if info.size < 0:
            what = "damaged: a member of negative size"
            raise self._error(what, offset, "copy the file again")
        return info

    def _read_overrides(self, info: tarfile.TarInfo, member: TarMember) -> dict[str, str]:
        """Reads a member with a long name, or the attributes, of the next."""
        if info.size > MAX_NAME_BYTES:
            what = f"a name or attributes of {info.size} bytes"
            raise self._error(what, member.offset, "make the tar anew")
        data = member.read(info.size)
        if info.type == tarfile.GNUTYPE_LONGNAME:
            return {"path": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
        try:
            found = dict(_pax_records(data))
            if int(found.get("size", 0)) < 0:
                raise ValueError("a negative size")
        except ValueError:
            what = "damaged: malformed attributes"
            raise self._error(what, member.offset, "copy the file again") from None
        if any(key.startswith("GNU.sparse.") for key in found):
            raise self._error("a sparse member", member.offset, "make the tar without --sparse")
        return found

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


def read_webdataset(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a tar. Memory: the text and JSON of a sample, or a line of a .jsonl member.

    Raises:
        DataError: Malformed input.
    """
    tar = TarReader(stream.plain, stream.file.shown)
    sample: _Sample | None = None
    for member in tar:
        key, kind = split_name(member.path)
        if not key:
            continue
        if sample is None or sample.key != key:
            if sample is not None:
                yield from sample.finish(member.offset)
            sample = _Sample(key, stream, rule, member.offset)
        yield from sample.add(kind, member)
    if sample is not None:
        yield from sample.finish(tar.position)


def split_name(name: str) -> tuple[str, str]:
    """Returns the key and the kind of a member, both empty for one that is of no sample: no dot, or hidden."""
    folder, slash, base = name.rpartition("/")
    stem, dot, kind = base.partition(".")
    return (folder + slash + stem, kind.lower()) if stem and dot else ("", "")


class _Sample:
    """One sample while its members come."""

    def __init__(self, key: str, stream: InputStream, rule: ReadRule, offset: int) -> None:
        self.key = key
        self._name = stream.file.shown
        self._place = f"{self._name}@{offset}"
        self._rule = rule
        self._stored = stream.stored if stream.file.compression else None
        self._bodies: dict[str, bytes] = {}
        """Members by kind; only those of a document of its own are read."""
        self._start = self._tell(offset)

    def _tell(self, offset: int) -> int:
        """Returns the bytes of the file, as stored, that were read up to `offset` of the tar."""
        return offset if self._stored is None else self._stored.tell()

    def add(self, kind: str, member: TarMember) -> Iterator[Document]:
        """Adds one member; yields the documents of one that has many."""
        if kind in self._bodies:
            fix = "give each sample a key of its own"
            raise self._error(f"sample {self.key!r} has two members .{kind}", fix)
        self._bodies[kind] = b""
        if kind == "jsonl":
            name = f"{self._name}/{member.path}"
            body = cast(BinaryIO, io.BufferedReader(member))
            yield from read_records(Lines(body, name, self._rule.limit, stored=self._stored), self._rule)
        elif kind in TEXT_MEMBERS:
            if member.size > self._rule.limit:
                what = f"member {member.path!r} of {member.size} bytes"
                raise too_long(what, self._rule.limit, self._place)
            self._bodies[kind] = member.read(member.size)

    def finish(self, stop: int) -> Iterator[Document]:
        """Yields the document of a sample whose last member ends before byte `stop` of the tar."""
        found = [kind for kind in TEXT_MEMBERS if kind in self._bodies]
        if not found or ("jsonl" in found and len(found) > 1):
            has = ", ".join(f".{kind}" for kind in found or self._bodies)
            what = "no text" if not found else "two texts"
            fix = "give .txt, .json or .jsonl, and of these only .txt and .json together"
            raise self._error(f"sample {self.key!r} has {what} (it has {has})", fix)
        if found == ["jsonl"]:
            return
        try:
            yield self._document(self._tell(stop) - self._start)
        except RecordError as error:
            raise self._error(f"sample {self.key!r}: {error.what}", error.fix) from None

    def _document(self, consumed: int) -> Document:
        record: dict[str, Any] = {}
        if "json" in self._bodies:
            record = parse_object(self._decode("json"))
        if "txt" not in self._bodies:
            return self._rule.build(record, consumed)
        if self._rule.kind != "text":
            what = f"a .txt member holds no {self._rule.kind}"
            raise RecordError(what, "give .json or .jsonl members")
        fields = self._rule.select_fields(record)
        return Document(self._decode("txt"), self._bodies["txt"], consumed, fields=fields)

    def _decode(self, kind: str) -> str:
        return decode(self._bodies[kind], f"{self._name}/{self.key}.{kind}", 0)

    def _error(self, what: str, fix: str) -> DataError:
        return DataError(what, where=self._place, fix=fix)
