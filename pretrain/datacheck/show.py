"""`pretrain data show`: rows of a shard folder or of a run's data, as the model will see them.

what, options  ->  RunConfig (data_setup.py)  ->  rows of its data  ->  those of its objective, in words (data_rows.py)

train          ->  the samples from a position of the run on, whatever source they come from
validation     ->  the rows of one source from a number on, in their fixed order
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pretrain.config.data import DataConfig
from pretrain.config.run import RunConfig
from pretrain.data.mixture_stream import SOURCE_BITS, source_of
from pretrain.data.source_streams import SourceStreams, open_windows
from pretrain.datacheck.open import open_data
from pretrain.datacheck.rows import ShownRow, describe_rows
from pretrain.datacheck.setup import Choice, find_config_of, folder_config
from pretrain.errors import ConfigError, DataError
from pretrain.resolve import context_of_run, fit_config
from pretrain.rows import PairRows, TokenRows
from pretrain.shards.dataset import Dataset
from pretrain.shards.index import INDEX_NAME
from pretrain.shards.store import ShardStore
from pretrain.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class Shown:
    """Rows, and what is to be known of all of them.

    Attributes:
        name: Of what was opened.
        split: They are of this.
        objectives: Kinds of the run's.
        first: Position of the first.
        sources: Name of the source of each row; empty where there is only one.
        numbers: Number of each sample within its source.
        rows: In words.
        document_mask: Documents do not see each other.
    """

    name: str
    split: str
    objectives: tuple[str, ...]
    first: int
    sources: tuple[str, ...]
    numbers: tuple[int, ...]
    rows: tuple[ShownRow, ...]
    document_mask: bool

    def facts(self) -> dict[str, Any]:
        """Returns all as JSON has it."""
        rows = [
            {"position": self.first + place, "source": self.sources[place] if self.sources else None, **asdict(row)}
            for place, row in enumerate(self.rows)
        ]
        return {"kind": "rows", "path": self.name, "split": self.split, "rows": rows}


def show(what: str, overrides: Sequence[str], choice: Choice) -> Shown:
    """Reads rows, and makes of them what the objective makes.

    Args:
        what: A shard folder, a run's config, or a run.
        overrides: `a.b=c`, laid over a config.
        choice: Which rows, and how they are made.

    Raises:
        ConfigError: Options that do not go together, or the tokenizer lacks a token that the objective needs.
        DataError: A shard is missing or damaged.
    """
    config = find_config_of(what, overrides, choice)
    with open_data(DataConfig(path=what) if config is None else config.data) as (dataset, stores):
        config = fit_config(config or folder_config(what, dataset, choice), dataset)
        context, tokenizer = context_of_run(config, dataset), load_tokenizer(dataset.tokenizer_path)
        rows = _read_rows(dataset, stores, config, choice)
        shown = describe_rows(rows, config.objective, context, tokenizer, dataset.index.labels)
    numbers = (rows.target if isinstance(rows, PairRows) else rows).sample_ids
    names: tuple[str, ...] = ()
    if config.data.mixture and choice.split == "train":
        names = tuple(dataset.sources[number].name for number in source_of(numbers).tolist())
        numbers = numbers & ((1 << (63 - SOURCE_BITS)) - 1)
    return Shown(
        name=what,
        split=choice.split,
        objectives=tuple(task.kind for task in config.objective.tasks),
        first=choice.position,
        sources=names,
        numbers=tuple(numbers.tolist()),
        rows=tuple(shown),
        document_mask=config.data.document_mask,
    )


def _read_rows(
    dataset: Dataset, stores: Sequence[ShardStore], config: RunConfig, choice: Choice
) -> TokenRows | PairRows:
    positions, batch_rows = range(choice.position, choice.position + choice.rows), config.batch.rows
    if choice.split == "train":
        return SourceStreams(dataset, stores, config.data, config.lengths, batch_rows, config.seed).read(positions)
    held = {
        source.name: (source.index, store)
        for source, store in zip(dataset.sources, stores, strict=True)
        if "validation" in source.index.splits
    }
    if not held:
        raise DataError("there is no split 'validation'", where=INDEX_NAME, fix="show --split train")
    name = choice.source or next(iter(held))
    if name not in held:
        raise ConfigError(
            f"{name!r} is no source with a validation split", where="--source", fix=f"use {', '.join(held)}"
        )
    windows = open_windows(*held[name], config.data, config.lengths, batch_rows)
    end = windows.num_windows()
    if choice.position >= end:
        raise ConfigError(f"there is no row {choice.position}, the split has {end}", fix="lower --position")
    return windows.read_windows(range(choice.position, min(positions.stop, end)))
