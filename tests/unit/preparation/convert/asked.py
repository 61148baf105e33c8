"""Runs conversions in tests: a small source of two files of nanoGPT, and the options that convert it."""

import json
import random
from pathlib import Path
from unittest import mock

from pretrain.preparation.convert.convert import convert_tokens
from pretrain.preparation.convert.convert_part import ConvertOptions
from pretrain.preparation.progress import Progress, no_progress
from pretrain.shards.index import DataIndex
from tests.unit.preparation.convert import writers
from tests.unit.preparation.convert.writers import EOS_ID, VOCAB_SIZE, join


def make_documents(number: int = 40, seed: int = 0) -> list[list[int]]:
    """Random documents that end with EOS_ID."""
    rng = random.Random(seed)
    return [[*rng.choices(range(1, VOCAB_SIZE), k=rng.randrange(1, 20)), EOS_ID] for _ in range(number)]


DOCUMENTS = make_documents()


def write_source(folder: Path) -> None:
    """Writes DOCUMENTS as two files, and their tokenizer."""
    writers.write_tokenizer(folder / "tokenizer.json")
    (folder / "in").mkdir()
    writers.write_flat(folder / "in/a.bin", join(DOCUMENTS[:25]))
    writers.write_flat(folder / "in/b.bin", join(DOCUMENTS[25:]))


def options(folder: Path, name: str = "out", **changes: object) -> ConvertOptions:
    """Converts what `write_source` wrote in `folder`."""
    defaults = {
        "kind": "nanogpt",
        "source": (str(folder / "in"),),
        "tokenizer": str(folder / "tokenizer.json"),
        "split": "hash:0.2",
    }
    return ConvertOptions(folder / name, **{**defaults, **changes})


def convert(
    asked: ConvertOptions, progress: Progress = no_progress, processes: int = 1, part_bytes: int = 150
) -> DataIndex:
    """Converts in small parts, by default in this process, where faults can be injected."""
    with mock.patch("pretrain.preparation.convert.convert.plan_part_bytes", lambda files: part_bytes):
        return convert_tokens(asked, progress, processes=processes)


def facts(folder: Path) -> dict:
    """What the proof of a conversion says."""
    return json.loads((folder / "conversion.json").read_text())
