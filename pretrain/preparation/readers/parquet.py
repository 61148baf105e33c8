"""`parquet` and `arrow`: a row is a record.

parquet    a slice has the row groups that begin in it
arrow      a stream or file of record batches, as `datasets` saves it, read whole
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from pretrain.kinds.layouts import LAYOUTS
from pretrain.preparation.filters import BAD_FIELD, TOO_LARGE, UNDECODABLE, BadInputError, Document
from pretrain.preparation.input_parts import Slice
from pretrain.preparation.inputs.opening import InputStream
from pretrain.preparation.readers.record_fields import RecordError
from pretrain.preparation.readers.records import ReadRule, too_long

BUFFER_BYTES = 2**20
BATCH_BYTES = 4 * 2**20
REPEATED_BYTES = 64 * 2**20
MAX_BATCH_ROWS = 1024
ARROW_MAGIC = b"ARROW1"
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"


def read_parquet(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a slice. Memory: a page of each column, a few MiB of rows, and one row.

    A page is decompressed whole, so that of the readers this one alone cannot bound the cost of a
    malicious file.
    """
    try:
        yield from _read_groups(stream, piece, rule)
    except _damage_types() as error:
        # Of all slices the first counts the file.
        damage = _damaged(error, stream)
        yield rule.leave_out(damage, piece.num_bytes, int(piece.start == 0), piece.num_bytes)


def read_arrow(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a file. Memory: a record batch (of `datasets`: 1,000 rows)."""
    try:
        yield from _read_batches(stream, rule)
    except _damage_types() as error:
        raise _damaged(error, stream, "Arrow") from None
    except MemoryError:
        # A damaged length asks for any amount.
        raise _damaged("a record batch that memory has no room for", stream, "Arrow") from None


def _damage_types() -> tuple[type[Exception], ...]:
    """Returns what pyarrow raises where data are damaged; OSErrors without a number, too."""
    import pyarrow

    return pyarrow.ArrowException, UnicodeDecodeError, OSError


def _read_batches(stream: InputStream, rule: ReadRule) -> Iterator[Document]:
    import pyarrow.ipc

    stored = stream.stored
    is_file = stored.read(len(ARROW_MAGIC)) == ARROW_MAGIC
    if not is_file:
        # Without its end mark a stream that was cut off between two batches looks whole.
        stored.seek(max(stream.file.size - len(ARROW_END), 0))
        if stored.read() != ARROW_END:
            raise _damaged("it has no end mark", stream, "Arrow")
    stored.seek(0)
    reader = pyarrow.ipc.open_file(stored) if is_file else pyarrow.ipc.open_stream(stored)
    names = reader.schema.names
    columns = rule.choose_columns(names, stream.file.shown)
    names = [name for name in names if names.count(name) == 1]
    numbers = range(reader.num_record_batches) if is_file else ()
    batches = (reader.get_batch(number) for number in numbers) if is_file else reader
    first_row = 0
    before = 0
    for batch in batches:
        # Offsets of a damaged batch would be read as they are.
        batch.validate(full=True)
        position = stored.tell()
        num_bytes = max(position - before, 0)
        before = position
        nulls = {name: batch.column(name).null_count for name in {*names}.difference(columns)}
        unread = {name: batch.num_rows - count for name, count in nulls.items()}
        batches_of_one = iter([batch.select(columns)])
        documents = _documents(batches_of_one, first_row, batch.num_rows, num_bytes, stream, rule)
        yield from _with_unread(documents, unread, rule)
        first_row += batch.num_rows


def _read_groups(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    import pyarrow.parquet

    options = {"pre_buffer": False, "buffer_size": BUFFER_BYTES, "page_checksum_verification": True}
    file = pyarrow.parquet.ParquetFile(stream.stored, **options)
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    bounds = _bounds(groups, stream.file.size)
    in_piece = [n for n in range(len(groups)) if piece.start <= bounds[n] < piece.stop]
    in_piece = [n for n in in_piece if groups[n].num_rows]
    try:
        columns = rule.choose_columns(file.schema_arrow.names, stream.file.shown)
    except BadInputError as error:
        num_rows = sum(groups[number].num_rows for number in in_piece)
        yield rule.leave_out(error, piece.num_bytes, num_rows, piece.num_bytes)
        return
    texts = [name for name in columns if _is_text(file.schema_arrow.field(name).type)]
    dictionaries = pyarrow.parquet.ParquetFile(stream.stored, metadata=file.metadata, read_dictionary=texts, **options)
    first_rows = list(accumulate((group.num_rows for group in groups), initial=0))
    for number in in_piece:
        num_rows = groups[number].num_rows
        num_bytes = left_bytes = bounds[number + 1] - bounds[number]
        row = 0
        try:
            batch_rows = _batch_rows(dictionaries, number, texts)
            batches = file.iter_batches(batch_rows, [number], columns, use_threads=False)
            first_row = first_rows[number]
            documents = _documents(batches, first_row, num_rows, num_bytes, stream, rule)
            # Nulls count too: how many there are is in columns that are not read.
            unread = dict.fromkeys({*file.schema_arrow.names}.difference(columns), num_rows)
            for document in _with_unread(documents, unread, rule):
                row += 1
                left_bytes -= document.consumed_bytes
                yield document
            if row != num_rows:
                raise pyarrow.ArrowInvalid(f"row group {number} has {row} rows, not {num_rows}")
        except _damage_types() as error:
            damage = _damaged(error, stream)
            yield rule.leave_out(damage, left_bytes, num_rows - row, max(left_bytes, 1))


def _batch_rows(dictionaries: Any, number: int, texts: list[str]) -> int:
    """Returns the rows of a row group to decode at once, by its average row and its longest repeated value."""
    import pyarrow.compute

    group = dictionaries.metadata.row_group(number)
    rows = BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)
    first = next(dictionaries.iter_batches(1, [number], texts, use_threads=False), None) if texts else None
    columns = first.columns if first else []
    # Of a column with a dot in its name, pyarrow reads a struct beside it too.
    for column in (column for column in columns if pyarrow.types.is_dictionary(column.type)):
        # A value of the dictionary is stored once, and decoded as often as rows have it.
        longest = pyarrow.compute.max(pyarrow.compute.binary_length(column.dictionary)).as_py() or 1
        rows = min(rows, REPEATED_BYTES // longest)
    return max(1, min(MAX_BATCH_ROWS, rows))


def _documents(
    batches: Iterator[Any], first_row: int, num_rows: int, num_bytes: int, stream: InputStream, rule: ReadRule
) -> Iterator[Document]:
    """Yields the documents of a row group, each with its share of `num_bytes`."""
    consumed = 0
    for row, values in enumerate((values for batch in batches for values in _rows(batch)), 1):
        share = num_bytes * row // num_rows - consumed
        consumed += share
        where = f"{stream.file.shown}, row {first_row + row}"
        try:
            document = rule.build(_record(values), share)
        except RecordError as error:
            document = rule.leave_out(error.at(where), share)
        if len(document.utf8) + len((document.source or "").encode()) > rule.limit:
            document = rule.leave_out(too_long("a document", rule.limit, where), share)
        yield document


def _with_unread(documents: Iterator[Document], columns: dict[str, int], rule: ReadRule) -> Iterator[Document]:
    """Yields documents, of conversations the first with the columns that are not read, and their values."""
    for document in documents:
        if LAYOUTS[rule.kind].loss_mask and columns:
            document.unused = Counter(document.unused) + Counter(columns)
            columns = {}
        yield document


def _rows(batch: Any) -> Iterator[list[tuple[str, Any, bool]]]:
    """Yields the name, the value and whether bytes are in it, of the columns of each row."""
    names = batch.schema.names
    binary = ["binary" in str(field.type) for field in batch.schema]
    for values in zip(*batch.columns, strict=True):
        yield list(zip(names, values, binary, strict=True))


def _record(row: list[tuple[str, Any, bool]]) -> dict[str, Any]:
    """Returns a row as a record, with bytes as text. Raises: RecordError: They are not UTF-8."""
    try:
        return {
            name: _without_nulls(_decoded(value.as_py()) if is_binary else value.as_py())
            for name, value, is_binary in row
        }  # fmt: skip
    except UnicodeDecodeError as error:
        raise RecordError(
            f"invalid UTF-8: {error.reason}",
            "write the column anew",
            UNDECODABLE,
        ) from None
    except ValueError as error:  # a struct with two fields of one name
        raise RecordError(str(error), "rename one", BAD_FIELD) from None


def _decoded(value: Any) -> Any:
    """Returns a value whose bytes are decoded, inside of it too. Raises: UnicodeDecodeError."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {key: _decoded(inner) for key, inner in value.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value


def _without_nulls(value: Any) -> Any:
    """Returns a value without keys that are null: a schema adds those that other rows have."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _is_text(kind: Any) -> bool:
    import pyarrow.types

    tests = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_binary)
    return any(test(kind) for test in tests)


def _bounds(groups: Sequence[Any], size: int) -> list[int]:
    """Returns the approximate beginning of each row group, by their sizes; and the end.

    The exact offsets are in the metadata of each column, which pyarrow (26) cannot read in a
    damaged file without aborting the whole process.
    """
    ends = list(accumulate((max(group.total_byte_size, 1) for group in groups), initial=0))
    return [size * end // ends[-1] for end in ends] if groups else []


def _damaged(error: object, stream: InputStream, name: str = "Parquet") -> BadInputError:
    """Builds the error of damage. Raises: OSError: Of a disk or a server, which has a number."""
    if isinstance(error, OSError) and (error.errno or error.filename):
        raise error
    import pyarrow

    text = str(error).partition("\n")[0]
    if isinstance(error, pyarrow.ArrowNotImplementedError) or "encrypt" in text or "ize limit" in text:
        return BadInputError(
            f"a limit of pyarrow, no damage: {text}",
            where=stream.file.shown,
            fix="write it anew: as plain Parquet with zstd, or .jsonl",
            reason=TOO_LARGE,
        )
    return BadInputError(
        f"damaged, or not {name}: {text}",
        where=stream.file.shown,
        fix="copy or write the file again",
    )
