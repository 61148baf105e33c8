"""`pretrain data show`: rows of a shard folder or of a run's data, as the model will see them.

DIR                   -> the options of the command line     |
RUN-CONFIG, or a run  -> its config, under these options     | -> Dataset, DataConfig, BatchConfig, seed
train                 -> the samples from a position of the run on, whatever source they come from
validation            -> the rows of one source from a number on, in their fixed order
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from pretrain.config.base import Section
from pretrain.config.data import DataConfig
from pretrain.config.lengths import RowLengths, row_lengths
from pretrain.config.load import load_config
from pretrain.data.mixture_stream import SOURCE_BITS, source_of
from pretrain.data.remote.store import ShardStore, is_remote
from pretrain.data.source_streams import SourceStreams, open_windows
from pretrain.data.tokenizer import load_tokenizer
from pretrain.errors import ConfigError, DataError
from pretrain.index import INDEX_NAME
from pretrain.index.dataset import Dataset
from pretrain.report.data_course import PADDED_ROWS, Order, choose_packing
from pretrain.report.data_open import open_data
from pretrain.report.data_rows import ShownRow, describe_rows
from pretrain.rows import PairRows, TokenRows
from pretrain.rundir import RunDir

SPLITS = ("train", "validation")
DEFAULT_SEQ_LEN = 512
"""Of a shard folder, which has no config."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the command line says; None: as the config, or the default.

    Attributes:
        position: First row: samples of the run before it, or rows of the split.
        rows: How many.
        split: `train` or `validation`.
        source: Validation of a mixture: name of the source.
        seq_len: Tokens of a row.
        source_len: Of a source row.
        packing: `concat` or `bins`.
        seed: Of the order.
    """

    position: int = 0
    rows: int = 2
    split: str = "train"
    source: str | None = None
    seq_len: int | None = None
    source_len: int | None = None
    packing: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ConfigError(f"there is no split {self.split!r}", where="--split", fix=f"use {' or '.join(SPLITS)}")


@dataclass(frozen=True, slots=True)
class Shown:
    """Rows, and what is to be known of all of them.

    Attributes:
        name: Of what was opened.
        split: They are of this.
        first: Position of the first.
        sources: Name of the source of each row; empty where there is only one.
        numbers: Number of each sample within its source.
        rows: In words.
        special_tokens: How special tokens are spelled.
        document_mask: Documents do not see each other.
    """

    name: str
    split: str
    first: int
    sources: tuple[str, ...]
    numbers: tuple[int, ...]
    rows: tuple[ShownRow, ...]
    special_tokens: tuple[str, ...]
    document_mask: bool

    def facts(self) -> dict[str, Any]:
        """Returns all as JSON has it."""
        rows = [
            {"position": self.first + place, "source": self.sources[place] if self.sources else None, **asdict(row)}
            for place, row in enumerate(self.rows)
        ]
        return {"kind": "rows", "path": self.name, "split": self.split, "rows": rows}


def show(what: str, overrides: Sequence[str], choice: Choice) -> Shown:
    """Reads rows.

    Args:
        what: A shard folder, a run's config, or a run.
        overrides: `a.b=c`, laid over a config.
        choice: Which rows, and how they are made.

    Raises:
        ConfigError: Options that do not go together.
        DataError: A shard is missing or damaged.
    """
    setup = _configure(what, overrides, choice)
    data = setup.data
    with open_data(data) as (dataset, stores):
        if not setup.is_config and choice.packing is None:
            data = _with(data, packing=choose_packing(dataset.index.kind))
        rows = _read_rows(dataset, stores, replace(setup, data=data), choice)
        tokenizer = load_tokenizer(dataset.tokenizer_path)
    numbers = (rows.target if isinstance(rows, PairRows) else rows).sample_ids
    names: tuple[str, ...] = ()
    if data.mixture and choice.split == "train":
        names = tuple(dataset.sources[number].name for number in source_of(numbers).tolist())
        numbers = numbers & ((1 << (63 - SOURCE_BITS)) - 1)
    special = (token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)
    return Shown(
        name=what,
        split=choice.split,
        first=choice.position,
        sources=names,
        numbers=tuple(numbers.tolist()),
        rows=tuple(describe_rows(rows, tokenizer, data.document_mask)),
        special_tokens=tuple(special),
        document_mask=data.document_mask,
    )


@dataclass(frozen=True, slots=True)
class _Setup:
    """How rows are read, and whether a config says so."""

    data: DataConfig
    lengths: RowLengths
    batch_rows: int
    seed: int
    is_config: bool


def _configure(what: str, overrides: Sequence[str], choice: Choice) -> _Setup:
    path = Path(what)
    run = RunDir(path)
    if not is_remote(what) and (run.config.is_file() or not path.is_dir()):
        config = load_config(run.config if run.config.is_file() else what, overrides)
        batch = _with(config.batch, seq_len=choice.seq_len, source_len=choice.source_len)
        lengths = row_lengths(config.objective, batch, len(config.stacks))
        data, seed = _with(config.data, packing=choice.packing), config.seed
        return _Setup(data, lengths, config.batch.rows, seed if choice.seed is None else choice.seed, True)
    if overrides:
        raise ConfigError(f"{overrides[0]}: a shard folder has no config to lay this over", fix="leave it out")
    order = Order(choice.seq_len or DEFAULT_SEQ_LEN, choice.source_len, choice.packing)
    seed = order.seed if choice.seed is None else choice.seed
    return _Setup(order.data(what, "text"), order.lengths, PADDED_ROWS, seed, False)


def _read_rows(dataset: Dataset, stores: Sequence[ShardStore], setup: _Setup, choice: Choice) -> TokenRows | PairRows:
    positions = range(choice.position, choice.position + choice.rows)
    if choice.split == "train":
        return SourceStreams(dataset, stores, setup.data, setup.lengths, setup.batch_rows, setup.seed).read(positions)
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
    windows = open_windows(*held[name], setup.data, setup.lengths, setup.batch_rows)
    end = windows.num_windows()
    if choice.position >= end:
        raise ConfigError(f"there is no row {choice.position}, the split has {end}", fix="lower --position")
    return windows.read_windows(range(choice.position, min(positions.stop, end)))


Part = TypeVar("Part", bound=Section)


def _with(section: Part, **values: Any) -> Part:
    """Returns a section with those values that are not None."""
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return type(section).model_validate(section.model_dump() | given) if given else section
    except pydantic.ValidationError as error:
        detail = error.errors()[0]
        name = ".".join(map(str, detail["loc"])).replace("_", "-")
        raise ConfigError(f"--{name} {detail['input']}: {detail['msg']}", fix="see --help") from None
