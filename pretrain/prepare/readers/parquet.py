"""`parquet` and `arrow`: a row is a record.

parquet    a slice has the row groups that begin in it
arrow      a stream or file of record batches, as `datasets` saves it, read whole
"""

from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate
from typing import Any

from pretrain.errors import DataError
from pretrain.prepare.filters import Document
from pretrain.prepare.input_parts import Slice
from pretrain.prepare.inputs.opening import InputStream
from pretrain.prepare.readers.record_fields import RecordError, spelled
from pretrain.prepare.readers.records import ReadRule, too_long

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
    import pyarrow

    try:
        yield from _read_groups(stream, piece, rule)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        # pyarrow itself raises an OSError without a number where data are damaged.
        is_of_disk = isinstance(error, OSError) and (error.errno or error.filename)
        if is_of_disk:
            raise
        raise _damaged(error, stream) from None


def read_arrow(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a file. Memory: a record batch (of `datasets`: 1,000 rows)."""
    import pyarrow

    try:
        yield from _read_batches(stream, rule)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        is_of_disk = isinstance(error, OSError) and (error.errno or error.filename)
        if is_of_disk:
            raise
        raise _damaged(error, stream, "Arrow") from None
    except MemoryError:
        # A damaged length asks for any amount.
        raise _damaged("a record batch that memory has no room for", stream, "Arrow") from None


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
    columns = _columns(reader.schema.names, stream, rule)
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
        own = iter([batch.select(columns)])
        yield from _documents(own, first_row, batch.num_rows, num_bytes, stream, rule)
        first_row += batch.num_rows


def _columns(known: Sequence[str], stream: InputStream, rule: ReadRule) -> list[str]:
    """Returns the columns that documents are made of. Raises: DataError: One is absent."""
    needed, others = rule.text_fields(known)
    for option, name in needed.items():
        if name not in known:
            what = f"there is no column {name!r}; columns: {', '.join(known[:20]) or 'none'}"
            fix = f"choose another with {spelled(option)}"
            raise DataError(what, where=stream.file.shown, fix=fix)
    wanted = dict.fromkeys((*needed.values(), *others, *rule.fields))
    return [name for name in wanted if name in known]


def _read_groups(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    import pyarrow.parquet

    options = {"pre_buffer": False, "buffer_size": BUFFER_BYTES, "page_checksum_verification": True}
    file = pyarrow.parquet.ParquetFile(stream.stored, **options)
    columns = _columns(file.schema_arrow.names, stream, rule)
    texts = [name for name in columns if _is_text(file.schema_arrow.field(name).type)]
    dictionaries = pyarrow.parquet.ParquetFile(stream.stored, metadata=file.metadata, read_dictionary=texts, **options)
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    bounds = _bounds(groups, stream.file.size)
    first_row = 0
    for number, group in enumerate(groups):
        if group.num_rows and piece.start <= bounds[number] < piece.stop:
            num_bytes = bounds[number + 1] - bounds[number]
            batch_rows = _batch_rows(dictionaries, number, texts)
            batches = file.iter_batches(batch_rows, [number], columns, use_threads=False)
            row = yield from _documents(batches, first_row, group.num_rows, num_bytes, stream, rule)
            if row != group.num_rows:
                raise _damaged(f"row group {number} has {row} rows, not {group.num_rows}", stream)
        first_row += group.num_rows


def _batch_rows(dictionaries: Any, number: int, texts: list[str]) -> int:
    """Returns the rows of a row group to decode at once, by its average row and its longest repeated value."""
    import pyarrow.compute

    group = dictionaries.metadata.row_group(number)
    rows = BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)
    first = next(dictionaries.iter_batches(1, [number], texts, use_threads=False), None) if texts else None
    for column in first.columns if first else ():
        # A value of the dictionary is stored once, and decoded as often as rows have it.
        longest = pyarrow.compute.max(pyarrow.compute.binary_length(column.dictionary)).as_py() or 1
        rows = min(rows, REPEATED_BYTES // longest)
    return max(1, min(MAX_BATCH_ROWS, rows))


def _documents(
    batches: Iterator[Any], first_row: int, num_rows: int, num_bytes: int, stream: InputStream, rule: ReadRule
) -> Generator[Document, None, int]:
    """Yields the documents of a row group, each with its share of `num_bytes`; returns the number of rows."""
    row = 0
    consumed = 0
    for batch in batches:
        for record in _rows(batch, first_row + row, stream):
            row += 1
            share = num_bytes * row // num_rows - consumed
            consumed += share
            where = f"{stream.file.shown}, row {first_row + row}"
            try:
                document = rule.build(record, share)
            except RecordError as error:
                raise error.at(where) from None
            if len(document.utf8) + len((document.source or "").encode()) > rule.limit:
                raise too_long("a document", rule.limit, where)
            yield document
    return row


def _rows(batch: Any, first_row: int, stream: InputStream) -> Iterator[dict[str, Any]]:
    """Yields the rows of a batch. Raises: DataError, for the row whose text is not UTF-8."""
    names = batch.schema.names
    for index, values in enumerate(zip(*batch.columns, strict=True)):
        try:
            yield {name: value.as_py() for name, value in zip(names, values, strict=True)}
        except UnicodeDecodeError as error:
            where = f"{stream.file.shown}, row {first_row + index + 1}"
            raise DataError(f"invalid UTF-8: {error.reason}", where=where, fix="write the column anew") from None


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


def _damaged(error: object, stream: InputStream, name: str = "Parquet") -> DataError:
    text = str(error).partition("\n")[0]
    what = f"damaged, or not {name}: {text}"
    return DataError(what, where=stream.file.shown, fix="copy or write the file again")
