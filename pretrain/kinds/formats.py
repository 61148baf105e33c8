"""Formats of input files of `prepare`, by `inputs.format`. A new one: its reader, and a record here."""

from dataclasses import dataclass

_READERS = "pretrain.preparation.readers"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFormat:
    """A format of files.

    Attributes:
        read: `"module:function"` of (stream, slice, rule) -> documents (`readers/dispatch.py`).
        suffixes: Endings of names that tell it.
        layouts: Layouts of the documents that it holds. Empty: records, of any.
        is_cuttable: A slice may begin anywhere in a file that is not compressed.
        is_columnar: It compresses its own pages.
        is_chosen: A config may name it; else another option does.
        needs: What the files are called, the package that reads them, and its extra.
    """

    read: str
    suffixes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    is_cuttable: bool = False
    is_columnar: bool = False
    is_chosen: bool = True
    needs: tuple[str, str, str] | None = None


FORMATS: dict[str, InputFormat] = {
    "text": InputFormat(read=f"{_READERS}.lines:read_text", suffixes=(".txt", ".py", ".md"), layouts=("text",)),
    "lines": InputFormat(read=f"{_READERS}.lines:read_lines", layouts=("text",), is_cuttable=True),
    "paired": InputFormat(read=f"{_READERS}.lines:read_paired", layouts=("pairs",), is_chosen=False),
    "docstrings": InputFormat(read=f"{_READERS}.docstrings:read_docstrings", layouts=("triples",)),
    "jsonl": InputFormat(read=f"{_READERS}.json:read_jsonl", suffixes=(".jsonl",), is_cuttable=True),
    "json": InputFormat(read=f"{_READERS}.json:read_json", suffixes=(".json",)),
    "csv": InputFormat(read=f"{_READERS}.csv:read_csv", suffixes=(".csv",)),
    "tsv": InputFormat(read=f"{_READERS}.csv:read_csv", suffixes=(".tsv",)),
    "parquet": InputFormat(
        read=f"{_READERS}.parquet:read_parquet",
        suffixes=(".parquet",),
        is_cuttable=True,
        is_columnar=True,
        needs=("Parquet files", "pyarrow", "parquet"),
    ),
    "arrow": InputFormat(
        read=f"{_READERS}.parquet:read_arrow",
        suffixes=(".arrow",),
        is_columnar=True,
        needs=("Arrow files", "pyarrow", "parquet"),
    ),
    "webdataset": InputFormat(read=f"{_READERS}.webdataset:read_webdataset", suffixes=(".tar",)),
    "warc": InputFormat(
        read=f"{_READERS}.warc:read_warc",
        suffixes=(".warc", ".wet"),
        layouts=("text",),
        needs=("web archives", "resiliparse", "web"),
    ),
}
"""Record of each format."""
