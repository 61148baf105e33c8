"""`csv` and `tsv`: the first line names the columns, and each row is a record of strings.

    fields in quotes    may have delimiters, line ends and doubled quotes (RFC 4180)
    delimiter           of .tsv the tab; of .csv the one of `, ; tab |` that the header has most of
    blank lines, the header again (joined files)    are passed over

Quotes are read strictly: one that is not closed would else make a text of many rows. A file is one
slice, as a line may be inside quotes.
"""

import csv
from collections.abc import Iterator

from pretrain.preparation.filters import BAD_FIELD, BadInputError, Document
from pretrain.preparation.input_parts import Slice
from pretrain.preparation.inputs.opening import InputStream
from pretrain.preparation.readers.record_fields import RecordError
from pretrain.preparation.readers.records import UTF8_BOM, ReadRule, not_utf8, too_long

DELIMITERS = ",;\t|"
_FIX = 'put the field in quotes, and write a quote in it twice: "so ""it"" is"'


class _TextLines:
    """The lines of a file with their ends, for `csv.reader`."""

    def __init__(self, stream: InputStream, limit: int) -> None:
        self._plain = stream.plain
        self._name = stream.file.shown
        self._limit = limit
        self.number = 0
        self.num_bytes = 0
        self.bad: BadInputError | None = None  # since `begin`
        self._begun = (0, 0)

    def begin(self) -> str:
        """Begins a record; returns its place."""
        self.bad = None
        self._begun = (self.number, self.num_bytes)
        return f"{self._name}:{self.number + 1}"

    def __iter__(self) -> "_TextLines":
        return self

    def __next__(self) -> str:
        """Returns a line; one that is too long or not UTF-8 is blank, and `bad` has its error.

        Raises: BadInputError: A row of several lines beyond the limit, whose end is not known.
        """
        start = self.num_bytes
        line = self._readline()
        if not line:
            raise StopIteration
        if self.num_bytes - self._begun[1] > self._limit:
            self.bad = too_long("a row", self._limit, f"{self._name}:{self._begun[0] + 1}")
            num_quotes = line.count(b'"')
            while len(line) > self._limit and not line.endswith(b"\n") and (line := self._readline()):
                num_quotes += line.count(b'"')
            if num_quotes % 2 or start != self._begun[1]:
                raise self.bad
            return "\n"
        try:
            return line.removeprefix(UTF8_BOM).decode()
        except UnicodeDecodeError as error:
            self.bad = self.bad or not_utf8(error, self._name, start)
            return line.decode("utf-8", "replace")

    def _readline(self) -> bytes:
        line = self._plain.readline(self._limit + 1)
        self.num_bytes += len(line)
        self.number += line.endswith(b"\n")
        return line


def read_csv(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a file. Memory: a row, of at most the limit."""
    csv.field_size_limit(max(csv.field_size_limit(), rule.limit))
    lines = _TextLines(stream, rule.limit)
    lines.begin()
    first = next(lines, "")
    if lines.bad is not None:
        raise lines.bad
    delimiter = "\t" if stream.file.format == "tsv" else max(DELIMITERS, key=first.count)
    header = next(csv.reader([first], delimiter=delimiter), [])
    if header:
        rule.choose_columns(header, stream.file.shown)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    before = 0
    while True:
        where = lines.begin()
        row: list[str] = []
        bad = None
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            bad = BadInputError(f"not CSV: {error}", where=where, fix=_FIX, reason=BAD_FIELD)
        bad = lines.bad or bad
        if bad is None and row in ([], header):
            continue
        position = stream.stored.tell() if stream.file.compression else lines.num_bytes
        consumed_bytes = position - before
        before = position
        try:
            if bad is None and len(row) != len(header):
                raise RecordError(
                    f"a row of {len(row)} fields, where the header has {len(header)}",
                    _FIX,
                    BAD_FIELD,
                )
            if bad is None:
                document = rule.build(dict(zip(header, row, strict=True)), consumed_bytes)
            else:
                document = rule.leave_out(bad, consumed_bytes, lost_bytes=consumed_bytes)
        except RecordError as error:
            document = rule.leave_out(error.at(where), consumed_bytes)
        yield document
