"""`webdataset`: a tar of samples; members whose names agree up to the first dot are one sample.

    KEY.txt      the text of a document; KEY.json beside it has its fields
    KEY.json     a record
    KEY.jsonl    a record a line

Members of other kinds may stand beside these and are passed over; a sample of them alone is an error. Nothing is
decoded but text and JSON.
"""

from collections.abc import Iterator
from typing import Any

from pretrain.errors import DataError
from pretrain.prepare.documents import Document
from pretrain.prepare.inputs.opening import InputStream
from pretrain.prepare.readers.errors import decode, too_long
from pretrain.prepare.readers.framing import Lines
from pretrain.prepare.readers.jsonl import read_records
from pretrain.prepare.readers.records import BUILDERS, RecordError, parse_object
from pretrain.prepare.readers.rule import ReadRule
from pretrain.prepare.readers.tar import Member, TarMembers
from pretrain.prepare.sources import Slice

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
        self.key, self._stream, self._rule, self._offset = key, stream, rule, offset
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
