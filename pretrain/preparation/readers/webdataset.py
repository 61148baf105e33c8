"""`webdataset`: a tar of samples; members whose names agree up to the first dot are one sample.

    KEY.txt      the text of a document; KEY.json of the same sample has its fields
    KEY.json     a record
    KEY.jsonl    a record a line

Members of other kinds are skipped; a sample of them alone is an error.

The tar is read forward only, and nothing of it is trusted. Neither tarfile nor webdataset reads it:
they take a tar that was cut off, or is damaged between two members, for a whole one, and webdataset
reads every member into memory. Nothing is extracted: names are keys here, never paths.
"""

import io
import tarfile
from collections.abc import Iterator
from itertools import groupby
from typing import Any, BinaryIO, cast

from pretrain.kinds.layouts import LAYOUTS
from pretrain.preparation.filters import BadInputError, BadItem, Document
from pretrain.preparation.input_parts import Slice
from pretrain.preparation.inputs.opening import InputStream
from pretrain.preparation.readers.json import read_records
from pretrain.preparation.readers.lines import Lines
from pretrain.preparation.readers.record_fields import RecordError, parse_object
from pretrain.preparation.readers.records import ReadRule, decode, too_long, without_marks

SKIP_BYTES = 2**20
MAX_NAME_BYTES = 2**20
MAX_LENGTH_DIGITS = 20
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
        """Yields the members; their unread bytes are skipped. Raises: DataError."""
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
                raise self._error(
                    f"member {info.name!r} is not a regular file",
                    offset,
                    "make the tar without links",
                )
            elif info.type != tarfile.XGLTYPE:
                overrides = {}
            left_bytes = member.left_bytes + -size % tarfile.BLOCKSIZE
            while left_bytes:
                left_bytes -= len(self.read(min(left_bytes, SKIP_BYTES)))

    def read(self, num_bytes: int) -> bytes:
        """Reads exactly `num_bytes`. Raises: DataError, where the tar is cut off."""
        data = self._plain.read(num_bytes)
        if len(data) < num_bytes:
            raise self._error(
                "the tar is cut off: it has no end mark",
                self.position,
                "copy the file again",
            )
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
                    raise self._error(
                        "data after the end of the tar",
                        offset,
                        "give joined tars one by one",
                    )
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            raise self._error(
                f"damaged, or not a tar: {error}",
                offset,
                "copy the file again",
            ) from None
        if info.size < 0:
            raise self._error("damaged: a member of negative size", offset, "copy the file again")
        return info

    def _read_overrides(self, info: tarfile.TarInfo, member: TarMember) -> dict[str, str]:
        """Reads a member with a long name, or the attributes, of the next."""
        if info.size > MAX_NAME_BYTES:
            raise self._error(
                f"a name or attributes of {info.size} bytes",
                member.offset,
                "make the tar anew",
            )
        data = member.read(info.size)
        if info.type == tarfile.GNUTYPE_LONGNAME:
            return {"path": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
        try:
            attributes = dict(_pax_records(data))
            if int(attributes.get("size", 0)) < 0:
                raise ValueError("a negative size")
        except ValueError:
            raise self._error(
                "damaged: malformed attributes",
                member.offset,
                "copy the file again",
            ) from None
        if any(key.startswith("GNU.sparse.") for key in attributes):
            raise self._error("a sparse member", member.offset, "make the tar without --sparse")
        return attributes

    def _error(self, what: str, offset: int, fix: str) -> BadInputError:
        return BadInputError(what, where=f"{self._name}, byte {offset}", fix=fix)


def _pax_records(data: bytes) -> Iterator[tuple[str, str]]:
    """Yields the attributes, `LENGTH KEY=VALUE` and a line end each. Raises: ValueError."""
    data = data.rstrip(b"\0")
    start = 0
    while start < len(data):
        space = data.index(b" ", start, start + MAX_LENGTH_DIGITS)
        end = start + int(data[start:space])
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not equals or data[end - 1 : end] != b"\n":
            raise ValueError("not an attribute")
        yield key.decode(), value.decode("utf-8", "surrogateescape")
        start = end


def read_webdataset(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a tar. Memory: the text and JSON of a sample, or a line."""
    name = stream.file.shown
    stored = stream.stored if stream.file.compression else None
    tar = TarReader(stream.plain, name)
    before = 0
    for key, members in groupby(filter(_sample_of, tar), key=_sample_of):
        place = ""
        bad: BadItem | None = None
        bodies: dict[str, bytes] = {}
        for member in members:
            place = place or f"{name}, byte {member.offset}"
            kind = split_name(member.path)[1]
            if kind in bodies:
                text = f"sample {key!r} has two members .{kind}"
                fix = "give each sample a key of its own"
                bad = rule.leave_out(BadInputError(text, where=place, fix=fix), 0)
            bodies[kind] = b""
            if kind == "jsonl":
                body = cast(BinaryIO, io.BufferedReader(member))
                inner = f"{name}/{member.path}"
                lines = Lines(body, inner, rule.limit, stored=stored, skips=rule.skips)
                yield from read_records(lines, rule)
            elif kind in TEXT_MEMBERS:
                if member.size > rule.limit:
                    text = f"member {member.path!r} of {member.size} bytes"
                    bad = rule.leave_out(too_long(text, rule.limit, place), 0)
                else:
                    bodies[kind] = without_marks(member.read(member.size))
        # Members that are skipped, too, are bytes of the input that are done.
        position = tar.position if stored is None else stored.tell()
        try:
            if bad is not None:
                bad.consumed_bytes = position - before
                yield bad
            elif not _is_of_lines(key, bodies, place):
                yield _build_document(bodies, f"{name}/{key}", rule, position - before)
        except RecordError as error:
            error.what = f"sample {key!r}: {error.what}"
            yield rule.leave_out(error.at(place), position - before)
        except BadInputError as error:
            yield rule.leave_out(error, position - before)
        before = position


def split_name(name: str) -> tuple[str, str]:
    """Returns the key and the kind of a member; no key: of no sample, without a dot or hidden."""
    folder, slash, base = name.rpartition("/")
    stem, dot, kind = base.partition(".")
    return (folder + slash + stem, kind.lower()) if stem and dot else ("", "")


def _sample_of(member: TarMember) -> str:
    return split_name(member.path)[0]


def _is_of_lines(key: str, bodies: dict[str, bytes], place: str) -> bool:
    """Returns True for a sample of a .jsonl, False for a document. Raises: DataError."""
    kinds = [kind for kind in TEXT_MEMBERS if kind in bodies]
    if not kinds or ("jsonl" in kinds and len(kinds) > 1):
        has = ", ".join(f".{kind}" for kind in kinds or bodies)
        number = "two texts" if kinds else "no text"
        raise BadInputError(
            f"sample {key!r} has {number} (it has {has})",
            where=place,
            fix="give .txt, .json or .jsonl, and of these only .txt and .json together",
        )
    return kinds == ["jsonl"]


def _build_document(bodies: dict[str, bytes], name: str, rule: ReadRule, consumed: int) -> Document:
    record: dict[str, Any] = {}
    if "json" in bodies:
        record = parse_object(decode(bodies["json"], f"{name}.json", 0))
    if "txt" not in bodies:
        return rule.build(record, consumed)
    if not LAYOUTS[rule.kind].running_text:
        raise RecordError(f"a .txt member holds no {rule.kind}", "give .json or .jsonl members")
    text = decode(bodies["txt"], f"{name}.txt", 0)
    return Document(text, bodies["txt"], consumed, fields=rule.select_fields(record))
