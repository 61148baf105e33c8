"""How documents lie in a file, by its name, and which kinds of data a format can hold.

text         a file is a document                  jsonl        a line is a record
lines        a line is a document                  json         a list of records, or one record
paired       two files; a line is one side         parquet      a row is a record
                                                   webdataset   a tar; a sample is a document or records
"""

from importlib.util import find_spec

from pretrain.config.prepare import DATA_KINDS, DataKind, InputConfig
from pretrain.errors import ConfigError, LaunchError
from pretrain.prepare.inputs.urls import name_of
from pretrain.prepare.sources import InputFile

FORMAT_OF_SUFFIX = {
    ".txt": "text",
    ".py": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".tar": "webdataset",
}
COMPRESSION_OF_SUFFIX = {".gz": "gzip", ".zst": "zstd"}
KNOWN_SUFFIXES = f"{' '.join(FORMAT_OF_SUFFIX)}, or these with {' or '.join(COMPRESSION_OF_SUFFIX)}"

CUTTABLE = ("lines", "jsonl", "parquet")
KINDS_OF_FORMAT: dict[str, tuple[DataKind, ...]] = {"text": ("text",), "lines": ("text",), "paired": ("pairs",)}
"""Those of the other formats, which hold records: all."""


def compression_of(path: str) -> str:
    """Returns the compression that the name says, or the empty string."""
    name = name_of(path)
    found = (compression for suffix, compression in COMPRESSION_OF_SUFFIX.items() if name.endswith(suffix))
    return next(found, "")


def format_of(path: str) -> str:
    """Returns the format that the name says, or the empty string where it says none that is known."""
    name = name_of(path)
    for suffix in COMPRESSION_OF_SUFFIX:
        name = name.removesuffix(suffix)
    found = (known for suffix, known in FORMAT_OF_SUFFIX.items() if name.endswith(suffix))
    known = next(found, "")
    return "" if known == "parquet" and compression_of(path) else known


def check_kind(file: InputFile, config: InputConfig, kind: DataKind) -> None:
    """Refuses a file that cannot hold documents of this kind.

    Raises:
        ConfigError: It cannot.
        LaunchError: The package that reads its format is not installed.
    """
    if kind not in KINDS_OF_FORMAT.get(file.format, DATA_KINDS):
        if config.paired_path is not None:
            what, fix = f"paired_path goes with kind=pairs, not with kind={kind}", "leave it out, or set kind: pairs"
        elif kind == "pairs":
            what = f"format={file.format} holds no pairs"
            fix = "give records with source_field and target_field, or paired_path and format: lines"
        else:
            what = f"format={file.format} holds no {kind}"
            fix = "give .jsonl, .json, .parquet or webdataset tars of records"
        raise ConfigError(what, where=file.shown, fix=fix)
    if file.format == "parquet":
        require("pyarrow", "parquet", "Parquet files are read")


def require(package: str, extra: str, what: str) -> None:
    """Checks that an optional package is there.

    Raises:
        LaunchError: It is not; names the extra that brings it.
    """
    if find_spec(package) is None:
        raise LaunchError(
            f"{what} by {package}, which is not installed", fix=f"run: python -m pip install 'pretrain[{extra}]'"
        )
