"""Reads inputs as `prepare` does: listed, cut into parts, read."""

from pretrain.config.prepare import InputConfig
from pretrain.prepare.filters import Document
from pretrain.prepare.input_parts import InputFile, plan_parts
from pretrain.prepare.inputs.listing import list_inputs
from pretrain.prepare.readers.dispatch import Reader


def listing(*paths: object, kind: str = "text", **options: object) -> list[InputFile]:
    """Lists one input."""
    return list_inputs([InputConfig(path=[str(path) for path in paths], **options)], kind)


def documents(
    *paths: object, part_bytes: int = 1 << 20, kind: str = "text", fields: tuple[str, ...] = (), **options: object
) -> list[Document]:
    """Reads one input, cut into parts."""
    config = InputConfig(path=[str(path) for path in paths], **options)
    reader = Reader((config,), kind, fields)
    parts = plan_parts(list_inputs([config], kind), part_bytes)
    return [document for part in parts for document in reader.read(part.slices)]


def texts(*paths: object, **options: object) -> list[str]:
    """Reads the texts of one input."""
    return [document.text for document in documents(*paths, **options)]


def touch(folder, *names: str) -> None:
    """Writes files that hold their own names."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
