"""Opens the data of a config to look at: folders of this machine, or addresses through its cache."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config.data import DataConfig
from pretrain.config.load import load_config, parse_section
from pretrain.config.objective import NEEDS
from pretrain.config.presets import expand_preset
from pretrain.config.run import RunConfig
from pretrain.config.yaml_nodes import LocatedTree
from pretrain.data.source_streams import open_stores
from pretrain.datacheck.reading import PADDED_ROWS, choose_packing
from pretrain.errors import ConfigError
from pretrain.run.folder import RunDir
from pretrain.shards.dataset import Dataset, check_tokenizers, open_dataset
from pretrain.shards.index import LABELLED
from pretrain.shards.store import ShardStore, is_remote
from pretrain.tokenizer import load_tokenizer, special_tokens_of


@contextlib.contextmanager
def open_data(config: DataConfig) -> Iterator[tuple[Dataset, Sequence[ShardStore]]]:
    """Gives the sources of a config and where the shards of each are.

    Raises:
        DataError: A folder, an index or a file is missing, or not of the size that the index says; a tokenizer is not
            the one that made the shards; or the sources do not go together.
        DiskError: The cache cannot be used.
        LaunchError: A package that reads such addresses is missing.
    """
    stores = open_stores(config, lambda: False)
    try:
        folders = {path: store.folder for path, store in zip(config.paths, stores, strict=True)}
        dataset = open_dataset(config, folders.__getitem__)
        for store in stores:
            store.check()
        check_tokenizers(dataset)
        yield dataset, stores
    finally:
        for store in stores:
            store.close()


# What rows are shown of: the config of a run, or for a shard folder the one that its options say.
#
# CONFIG, or a run  ->  its config, under the options of the command line       |
# DIR               ->  the objective and packing that suit its kind, likewise  |  ->  RunConfig


SPLITS = ("train", "validation")

DEFAULT_SEQ_LEN = 512

"""Of a shard folder, which has no config."""

OBJECTIVE_OF = {"text": "causal", "pairs": "seq2seq", "records": "supervised", "classes": "classify", "tags": "tag"}

"""What a shard folder is shown for, by its kind."""

MODEL_OF = {"decoder": "llama-tiny", "encoder": "bert-tiny", "encoder+decoder": "t5-v1.1-tiny"}

"""A model of each shape, which a config has to have; rows depend on the shape alone."""


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """What the command line says; None: as the config, or the default.

    Attributes:
        position: First row: samples of the run before it, or rows of the split.
        rows: How many.
        split: `train` or `validation`.
        source: Validation of a mixture: name of the source.
        objective: Of a shard folder: what its rows are shown for.
        seq_len: Tokens of a row.
        source_len: Of a source row.
        packing: `concat`, `bins` or `padded`.
        seed: Of order and corruption.
    """

    position: int = 0
    rows: int = 2
    split: str = "train"
    source: str | None = None
    objective: str | None = None
    seq_len: int | None = None
    source_len: int | None = None
    packing: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ConfigError(f"there is no split {self.split!r}", where="--split", fix=f"use {' or '.join(SPLITS)}")

    def given(self) -> dict[str, Any]:
        """Returns the keys of a config that it sets."""
        values = {
            "batch.seq_len": self.seq_len,
            "batch.source_len": self.source_len,
            "data.packing": self.packing,
            "seed": self.seed,
        }
        return {key: value for key, value in values.items() if value is not None}


def find_config_of(what: str, overrides: Sequence[str], choice: ReadingOptions) -> RunConfig | None:
    """Returns the config of a run; None: `what` is a shard folder, or the address of one.

    Raises:
        ConfigError: There is none, or options that do not go with it.
    """
    path, run = Path(what), RunDir(Path(what))
    if is_remote(what) or (path.is_dir() and not run.config.is_file()):
        if overrides:
            raise ConfigError(f"{overrides[0]}: a shard folder has no config to lay this over", fix="leave it out")
        return None
    if choice.objective is not None:
        fix = f"lay objective.kind={choice.objective} over it"
        raise ConfigError("a config has an objective of its own", where="--objective", fix=fix)
    source = run.config if run.config.is_file() else what
    config = load_config(source, overrides)
    given = choice.given()
    if choice.seq_len is not None:  # as many rows as before: the order of padded ones depends on it
        given["batch.global_tokens"] = config.batch.rows * choice.seq_len
    return load_config(source, [*overrides, *(f"{key}={value}" for key, value in given.items())]) if given else config


def folder_config(what: str, dataset: Dataset, choice: ReadingOptions) -> RunConfig:
    """Returns the config of a run that a shard folder could be read by.

    Args:
        what: What the user calls the folder.
        dataset: It.
        choice: How its rows are made.

    Raises:
        ConfigError: Options that do not go together.
    """
    kind = dataset.index.kind
    objective = choice.objective or OBJECTIVE_OF[kind]
    seq_len = choice.seq_len or DEFAULT_SEQ_LEN
    shapes = NEEDS[objective].shapes if objective in NEEDS else tuple(MODEL_OF)
    batch = {"seq_len": seq_len, "global_tokens": PADDED_ROWS * seq_len, "micro": 1, "source_len": choice.source_len}
    max_len = max(seq_len, choice.source_len or 0)
    head = {"head": {"kind": "labels"}, "tied_embeddings": False, "pooler": False} if kind in LABELLED else {}
    model: dict[str, Any] = expand_preset({"preset": MODEL_OF[shapes[0]], "max_seq_len": max_len, **head})
    if (
        choice.objective is None
        and kind == "pairs"
        and special_tokens_of(load_tokenizer(dataset.tokenizer_path)).start is None
    ):
        # A run would be refused; what is to be seen of its data does not depend on it.
        model["special_tokens"] = {"start": dataset.index.eos_id}
    values = {
        "run": {"name": "show"},
        "data": {
            "path": what,
            "packing": choice.packing or choose_packing(kind),
            "document_mask": objective != "ul2",
        },
        "batch": batch,
        "model": model,
        "objective": {"kind": objective},
        "optim": {"lr": 1e-3},
        "train": {"steps": 10**6},
        **({} if choice.seed is None else {"seed": choice.seed}),
    }
    return parse_section(RunConfig, LocatedTree(values, dict(OPTION_OF)), what)


OPTION_OF: Mapping[str, str] = {
    "objective.kind": "--objective",
    "data.packing": "--packing",
    "batch.seq_len": "--seq-len",
    "batch.source_len": "--source-len",
    "seed": "--seed",
}

"""Where a key of a folder's config was written."""
