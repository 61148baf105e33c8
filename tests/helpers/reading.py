"""Reads inputs as `prepare` does: listed, cut into parts, read."""

from collections.abc import Iterable, Iterator, Sequence

from pretrain.config.prepare import InputConfig, PrepareConfig
from pretrain.preparation.filters import Document
from pretrain.preparation.input_parts import InputFile, Slice, plan_parts
from pretrain.preparation.inputs.listing import list_inputs
from pretrain.preparation.readers.dispatch import read_slices


def listing(*paths: object, kind: str = "text", **options: object) -> list[InputFile]:
    """Lists one input."""
    return list_inputs([InputConfig(path=[str(path) for path in paths], **options)], kind)


def documents(
    *paths: object, part_bytes: int = 1 << 20, kind: str = "text", fields: tuple[str, ...] = (), **options: object
) -> list[Document]:
    """Reads one input, cut into parts."""
    config = InputConfig(path=[str(path) for path in paths], **options)
    parts = plan_parts(list_inputs([config], kind), part_bytes)
    return [document for part in parts for document in read(part.slices, [config], kind, fields)]


def read(
    slices: Iterable[Slice], inputs: Sequence[InputConfig] = (), kind: str = "text", fields: Iterable[str] = ()
) -> Iterator[Document]:
    """Reads slices of files of these inputs, or of the default corpus."""
    values = {"kind": kind, "inputs": list(inputs), "filter": {"require": {name: [] for name in fields}}}
    return read_slices(PrepareConfig(output="", **values), slices)


def texts(*paths: object, **options: object) -> list[str]:
    """Reads the texts of one input."""
    return [document.text for document in documents(*paths, **options)]


def touch(folder, *names: str) -> None:
    """Writes files that hold their own names."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
