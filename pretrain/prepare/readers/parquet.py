"""`parquet`: a row is a record; a slice has the row groups that begin in it; only the columns needed are read."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from pretrain.errors import DataError
from pretrain.prepare.filters import Document
from pretrain.prepare.input_parts import Slice
from pretrain.prepare.inputs.opening import InputStream
from pretrain.prepare.readers.records import BUILDERS, RecordError
from pretrain.prepare.readers.rule import ReadRule, too_long

BUFFER_BYTES = 2**20
BATCH_BYTES = 4 * 2**20
BATCH_ROWS = (16, 1024)


def read_parquet(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a slice.

    Memory: a page of each column and a few MiB of rows. A row is decoded before its length is
    known, so that of the readers this one alone cannot bound what one malicious value costs.

    Raises:
        DataError: Malformed input.
        OSError: The file system or the server failed.
    """
    import pyarrow

    try:
        yield from _read_groups(stream, piece, rule)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise _damaged(error, stream) from None
    except OSError as error:
        # Of its own accord pyarrow raises this without a number, where data are damaged.
        if error.errno is not None or error.filename is not None:
            raise
        raise _damaged(error, stream) from None


def _read_groups(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(
        stream.stored, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True
    )
    known = file.schema_arrow.names
    for name in rule.text_fields:
        if name not in known:
            what = f"there is no column {name!r}; columns: {', '.join(known[:20]) or 'none'}"
            raise DataError(what, where=stream.file.shown, fix=f"choose another with {_option(rule, name)}")
    columns = [name for name in dict.fromkeys((*rule.text_fields, *rule.fields)) if name in known]
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
    """Yields the documents of one row group, each with its share of the group's `num_bytes` in the file."""
    group = file.metadata.row_group(number)
    build = BUILDERS[rule.kind]
    row = 0
    consumed = 0
    for batch in file.iter_batches(_batch_rows(group), [number], columns, use_threads=False):
        for record in _rows(batch, first_row + row, stream):
            row += 1
            share = num_bytes * row // group.num_rows - consumed
            consumed += share
            where = f"{stream.file.shown}, row {first_row + row}"
            try:
                document = build(record, rule, share)
            except RecordError as error:
                raise DataError(error.what, where=where, fix=error.fix) from None
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
                raise DataError(f"invalid UTF-8: {error.reason}", where=where, fix="write the column anew") from None
        raise


def _bounds(groups: Sequence[Any], size: int) -> list[int]:
    """Returns where each row group begins in a file of `size` bytes, and `size`; about, in proportion to their sizes.

    Where they begin in truth stands in what the file says of each column, which pyarrow (26) cannot
    be asked about in a damaged file without the whole process being aborted.
    """
    ends = list(accumulate((max(group.total_byte_size, 1) for group in groups), initial=0))
    return [size * end // ends[-1] for end in ends] if groups else []


def _batch_rows(group: Any) -> int:
    """Rows that are about BATCH_BYTES, going by the average of the group."""
    least, most = BATCH_ROWS
    return max(least, min(most, BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)))


def _option(rule: ReadRule, name: str) -> str:
    config = rule.config
    options = [option for option in type(config).model_fields if getattr(config, option) == name]
    return next((option for option in options if option.endswith("_field")), "a *_field of the input")


def _damaged(error: object, stream: InputStream) -> DataError:
    text = str(error).partition("\n")[0]
    return DataError(f"damaged, or not Parquet: {text}", where=stream.file.shown, fix="copy or write the file again")
