"""`parquet`: a row is a record; a slice has the row groups that begin in it."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from pretrain.errors import DataError
from pretrain.prepare.filters import Document
from pretrain.prepare.input_parts import Slice
from pretrain.prepare.inputs.opening import InputStream
from pretrain.prepare.readers.records import ReadRule, RecordError, spelled, too_long

BUFFER_BYTES = 2**20
BATCH_BYTES = 4 * 2**20
MIN_BATCH_ROWS = 16
MAX_BATCH_ROWS = 1024


def read_parquet(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a slice. Memory: a page of each column and a few MiB of rows.

    A row is decoded before its length is known, so that of the readers this one alone cannot bound
    the cost of one malicious value.
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


def _read_groups(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(
        stream.stored, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True
    )
    known = file.schema_arrow.names
    needed, others = rule.text_fields(known)
    for option, name in needed.items():
        if name not in known:
            what = f"there is no column {name!r}; columns: {', '.join(known[:20]) or 'none'}"
            fix = f"choose another with {spelled(option)}"
            raise DataError(what, where=stream.file.shown, fix=fix)
    wanted = dict.fromkeys((*needed.values(), *others, *rule.fields))
    columns = [name for name in wanted if name in known]
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    bounds = _bounds(groups, stream.file.size)
    first_row = 0
    for number, group in enumerate(groups):
        if group.num_rows and piece.start <= bounds[number] < piece.stop:
            num_bytes = bounds[number + 1] - bounds[number]
            yield from _read_group(file, number, columns, first_row, num_bytes, stream, rule)
        first_row += group.num_rows


def _read_group(
    file: Any, number: int, columns: list[str], first_row: int, num_bytes: int, stream: InputStream, rule: ReadRule
) -> Iterator[Document]:
    """Yields the documents of a row group, each with its share of the group's `num_bytes`."""
    group = file.metadata.row_group(number)
    # About BATCH_BYTES, by the average row of the group.
    batch_rows = BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)
    batch_rows = max(MIN_BATCH_ROWS, min(MAX_BATCH_ROWS, batch_rows))
    row = 0
    consumed = 0
    for batch in file.iter_batches(batch_rows, [number], columns, use_threads=False):
        for record in _rows(batch, first_row + row, stream):
            row += 1
            share = num_bytes * row // group.num_rows - consumed
            consumed += share
            where = f"{stream.file.shown}, row {first_row + row}"
            try:
                document = rule.build(record, share)
            except RecordError as error:
                raise error.at(where) from None
            if len(document.utf8) + len((document.source or "").encode()) > rule.limit:
                raise too_long("a document", rule.limit, where)
            yield document
    if row != group.num_rows:
        raise _damaged(f"row group {number} has {row} rows, not {group.num_rows}", stream)


def _rows(batch: Any, first_row: int, stream: InputStream) -> list[dict[str, Any]]:
    """Returns the rows of a batch. Raises: DataError, for the row whose text is not UTF-8."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                batch.slice(index, 1).to_pylist()
            except UnicodeDecodeError as error:
                where = f"{stream.file.shown}, row {first_row + index + 1}"
                what = f"invalid UTF-8: {error.reason}"
                raise DataError(what, where=where, fix="write the column anew") from None
        raise


def _bounds(groups: Sequence[Any], size: int) -> list[int]:
    """Returns the approximate beginning of each row group, by their sizes; and the end.

    The exact offsets are in the metadata of each column, which pyarrow (26) cannot read in a
    damaged file without aborting the whole process.
    """
    ends = list(accumulate((max(group.total_byte_size, 1) for group in groups), initial=0))
    return [size * end // ends[-1] for end in ends] if groups else []


def _damaged(error: object, stream: InputStream) -> DataError:
    text = str(error).partition("\n")[0]
    what = f"damaged, or not Parquet: {text}"
    return DataError(what, where=stream.file.shown, fix="copy or write the file again")
