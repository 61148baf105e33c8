"""Before anything is built: config and data are checked against each other, and the run folder is taken.

config, index  ->  vocabulary and special tokens that the config leaves open  ->  what makes rows  ->  lease  ->  Claim
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain import dist
from pretrain.artifact.normalize import dump_normalize, normalize_of_data
from pretrain.checkpoint.leftovers import remove_leftovers
from pretrain.config.data import plan_batch
from pretrain.config.load import dump_config, load_config
from pretrain.config.resumption import check_config
from pretrain.config.run import RunConfig
from pretrain.data.source_streams import check_packing, open_stores
from pretrain.dist import World
from pretrain.errors import ConfigError
from pretrain.objective import RowMaker, build_rows
from pretrain.resolve import context_of_run, fit_config
from pretrain.run.folder import RunDir, begin_attempt
from pretrain.run.lease import Lease
from pretrain.run.stop import StopFlag
from pretrain.shards.dataset import Dataset, check_tokenizers, open_dataset
from pretrain.shards.store import ShardStore
from pretrain.tracking.pictures import ATTENTION
from pretrain.utils.io import write_file


@dataclass(frozen=True, slots=True)
class Claim:
    """A run folder that is ours: its paths, its lease (rank 0), its data, and what makes its rows of them."""

    folder: RunDir
    lease: Lease | None
    dataset: Dataset
    stores: list[ShardStore]
    config: RunConfig
    make_rows: RowMaker

    @property
    def lease_number(self) -> int:
        """Which owner of the folder this is, from 1; 0 on ranks other than 0."""
        return self.lease.number if self.lease else 0

    def check_lease(self) -> None:
        """Makes sure, on rank 0, that the folder is ours still. Raises: LockedError, DiskError."""
        if self.lease is not None:
            self.lease.check()


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
    check_tokenizers(dataset)
    config = fit_config(config, dataset)
    check_packing(dataset.index, config.data)
    try:
        make_rows = build_rows(config.objective, context_of_run(config, dataset))
    except ConfigError as error:
        raise ConfigError(error.what, where=str(dataset.tokenizer_path), fix=error.fix) from None
    folder = RunDir(Path(config.run.dir) / config.run.name)
    lease = Lease(folder.lease) if world.is_main else None
    try:
        if folder.config.is_file():
            stored = load_config(folder.config, import_extensions=False)
            check_config(stored, config, has_saved=folder.has_saved())
        if lease is not None:
            sweep(folder)
    except BaseException:
        if lease is not None:
            lease.release()
        raise
    return Claim(folder, lease, dataset, stores, config, make_rows)


def sweep(folder: RunDir) -> None:
    """Removes what killed attempts were writing. Raises: DiskError."""
    remove_leftovers(folder.checkpoints)
    for place in (folder.path, folder.checkpoints, folder.path / ATTENTION):
        for leftover in place.glob("?*.tmp-*"):  # of a file that is replaced
            with suppress(OSError):  # one that stays is in nobody's way
                leftover.unlink()


def begin(claim: Claim, world: World, facts: dict[str, Any]) -> dict[str, Any]:
    """Writes what the run folder says of this attempt (rank 0); returns run.json on every rank. Collective."""
    record = None
    claim.check_lease()
    if world.is_main:
        write_file(claim.folder.config, dump_config(claim.config).encode())
        tokenizer = claim.dataset.tokenizer_path.read_bytes()
        if not claim.folder.tokenizer.is_file() or claim.folder.tokenizer.read_bytes() != tokenizer:
            steps = normalize_of_data([source.folder for source in claim.dataset.sources])
            write_file(claim.folder.normalize, dump_normalize(steps))
            write_file(claim.folder.tokenizer, tokenizer)
        record = begin_attempt(claim.folder, claim.config.run.name, facts)
    result = dist.broadcast_object(record)
    assert isinstance(result, dict)
    return result
