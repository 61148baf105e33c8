"""Readers by format: slices of open input files -> documents, streamed, errors with file and line or byte.

A reader takes (stream, slice, rule) and yields documents in order. Its memory is bounded by the
longest document that is allowed. Malformed input is an error, never skipped: a silent hole in a
corpus is found months later, if ever.
"""

from collections.abc import Callable, Iterator

from pretrain.prepare.filters import Document
from pretrain.prepare.input_parts import Slice
from pretrain.prepare.inputs.opening import InputStream
from pretrain.prepare.readers.json import read_json, read_jsonl
from pretrain.prepare.readers.lines import read_lines, read_paired, read_text
from pretrain.prepare.readers.parquet import read_parquet
from pretrain.prepare.readers.rule import ReadRule
from pretrain.prepare.readers.webdataset import read_webdataset

ReadSlice = Callable[[InputStream, Slice, ReadRule], Iterator[Document]]

READERS: dict[str, ReadSlice] = {
    "text": read_text,
    "lines": read_lines,
    "paired": read_paired,
    "jsonl": read_jsonl,
    "json": read_json,
    "parquet": read_parquet,
    "webdataset": read_webdataset,
}
