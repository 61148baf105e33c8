"""Before anything is built: config and data are checked against each other, and the run folder is taken.

config, index  ->  vocabulary and special tokens that the config leaves open  ->  what makes rows  ->  lock  ->  Claim
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain import dist
from pretrain.config.data import plan_batch
from pretrain.config.load import dump_config, load_config
from pretrain.config.model import SpecialTokens
from pretrain.config.objective import NEEDS
from pretrain.config.run import RunConfig
from pretrain.control import StopFlag
from pretrain.data.remote.store import ShardStore
from pretrain.data.source_streams import open_stores
from pretrain.data.tokenizer import describe_vocabulary, load_tokenizer, special_tokens_of
from pretrain.dist import World
from pretrain.errors import ConfigError
from pretrain.index.dataset import Dataset, open_dataset
from pretrain.io import write_file
from pretrain.objective import RowContext, RowMaker, build_rows
from pretrain.rundir import Lock, RunDir, begin_attempt
from pretrain.train.resume import check_config


@dataclass(frozen=True, slots=True)
class Claim:
    """A run folder that is ours: its paths, its lock (rank 0), its data, and what makes its rows of them."""

    folder: RunDir
    lock: Lock | None
    dataset: Dataset
    stores: list[ShardStore]
    config: RunConfig
    make_rows: RowMaker


def claim_run(config: RunConfig, world: World, stop: StopFlag) -> Claim:
    """Checks config and data, and takes the run folder. Needs no process group, so bad input is told within seconds.

    Raises:
        LockedError: Another live run holds the folder.
        ConfigError: The config contradicts the data or the run that is resumed, or the tokenizer lacks a token that the
            objective needs.
        DataError: Shards are missing or damaged.
    """
    plan_batch(config.batch, world.size)
    stores = open_stores(config.data, lambda: bool(stop))
    folders = {path: store.folder for path, store in zip(config.data.paths, stores, strict=True)}
    dataset = open_dataset(config.data, folders.__getitem__)
    for store in stores:
        if world.is_main or not store.fetches:  # one rank is enough to ask a server about every shard
            store.check()
    config = _with_vocabulary(config, dataset)
    _check_kind(config, dataset)
    make_rows = _row_maker(config, dataset)
    folder = RunDir(Path(config.run.dir) / config.run.name)
    if folder.config.is_file():
        check_config(load_config(folder.config, import_extensions=False), config)
    lock = Lock(folder.path / ".lock") if world.is_main else None
    return Claim(folder, lock, dataset, stores, config, make_rows)


def _with_vocabulary(config: RunConfig, dataset: Dataset) -> RunConfig:
    """Fills in what the config leaves to the tokenizer: the size of the vocabulary, and what special tokens mean."""
    vocab_size, index = config.model.vocab_size, dataset.index
    if vocab_size is not None and vocab_size < index.vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is smaller than the {index.vocab_size} tokens of the shards",
            where=str(dataset.sources[0].folder),
            fix=f"use model.vocab_size={index.vocab_size}, or leave it out",
        )
    found = special_tokens_of(load_tokenizer(dataset.tokenizer_path)).model_copy(update={"eos": index.eos_id})
    named = {name: number for name, number in config.model.special_tokens if number is not None}
    special = SpecialTokens.model_validate(found.model_dump() | named)
    model = config.model.model_copy(update={"vocab_size": vocab_size or index.vocab_size, "special_tokens": special})
    return config.model_copy(update={"model": model})


def _check_kind(config: RunConfig, dataset: Dataset) -> None:
    kind = dataset.index.kind
    for task in config.objective.tasks:
        if kind not in NEEDS[task.kind].data:
            raise ConfigError(
                f"objective.kind={task.kind} learns from {' or '.join(NEEDS[task.kind].data)}, and the data are {kind}",
                where=str(dataset.sources[0].folder),
                fix="choose another objective.kind or data.path",
            )


def _row_maker(config: RunConfig, dataset: Dataset) -> RowMaker:
    """Returns the part of the objective that makes rows. Raises: ConfigError: The tokenizer lacks what it needs."""
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    whole_words = any(task.kind == "masked" and task.masked.whole_words for task in config.objective.tasks)
    context = RowContext(
        seed=config.seed,
        vocabulary=describe_vocabulary(tokenizer, config.model.special_tokens, whole_words=whole_words),
        lengths=config.lengths,
        num_stacks=len(config.stacks),
        document_mask=config.data.document_mask,
    )
    return build_rows(config.objective, context)


def begin(claim: Claim, world: World, facts: dict[str, Any]) -> dict[str, Any]:
    """Writes what the run folder says of this attempt (rank 0); returns run.json on every rank. Collective."""
    record = None
    if world.is_main:
        write_file(claim.folder.config, dump_config(claim.config).encode())
        if not claim.folder.tokenizer.is_file():
            write_file(claim.folder.tokenizer, claim.dataset.tokenizer_path.read_bytes())
        record = begin_attempt(claim.folder, claim.config.run.name, facts)
    result = dist.broadcast_object(record)
    assert isinstance(result, dict)
    return result
