"""The claim of a run folder: checks before anything is built, and the lease.

config, index  ->  vocabulary, special tokens left open  ->  row maker  ->  lease  ->  Claim
"""

import logging
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pretrain import dist
from pretrain.artifact.open import dump_normalize, normalize_of_data, template_of_data
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.retention import remove_leftovers
from pretrain.checkpoint.state import TrainState
from pretrain.config.load import dump_config
from pretrain.config.resumption import is_allowed
from pretrain.config.run import RunConfig
from pretrain.config.train import OF_A_SOURCE
from pretrain.data.stream import check_packing, open_stores
from pretrain.dist import World
from pretrain.doctor.versions import digest_of, own_versions, refuse_differences
from pretrain.errors import ConfigError, DataError, DiskError
from pretrain.objective import RowMaker, build_rows
from pretrain.plan.trained import plan_trained
from pretrain.resolve import context_of_run, fit_config
from pretrain.run.folder import COMMITTED, RunDir, begin_attempt, change_record
from pretrain.run.lease import Lease
from pretrain.run.stop import StopFlag
from pretrain.shards.dataset import Dataset, check_tokenizers, open_dataset
from pretrain.shards.store import ShardStore
from pretrain.tracking.picture_files import ATTENTION
from pretrain.tracking.run_output import check_trackers
from pretrain.training.resolution import follow_stored
from pretrain.utils.io import write_file
from pretrain.utils.jsonl import rows_with
from pretrain.utils.status_line import show_phase

log = logging.getLogger(__name__)

_ORDER = ("data", "batch", "seed")
"""Sections whose keys, where they are allowed to change, change the order of samples."""


def agree_on_versions(world: World) -> None:
    """Compares the versions of all ranks. Collective; a small gather, and 20 ms to read our source.

    With other packages on one node a run fails in obscure ways, or trains with sums that differ
    from its peers. Raises: LaunchError, with host and package of every rank.
    """
    if world.size == 1:
        return
    versions = own_versions()
    if len(set(dist.gather_objects(digest_of(versions)))) > 1:
        rows = dist.gather_objects({"host": socket.gethostname(), "versions": versions})
        refuse_differences([(one["host"], one["versions"]) for one in rows])


@dataclass(frozen=True, slots=True)
class Claim:
    """A leased run folder: its paths, lease (rank 0), data, and the row maker of its objective."""

    folder: RunDir
    lease: Lease | None
    dataset: Dataset
    stores: list[ShardStore]
    config: RunConfig
    make_rows: RowMaker

    @property
    def lease_number(self) -> int:
        """Number of this owner of the folder, from 1; 0 on ranks other than 0."""
        return self.lease.number if self.lease else 0

    def check_lease(self) -> None:
        """Makes sure, on rank 0, that the folder is still ours. Raises: LockedError, DiskError."""
        if self.lease is not None:
            self.lease.check()


def claim_run(config: RunConfig, world: World, stop: StopFlag) -> Claim:
    """Checks config and data, and takes the run folder, before there is a process group.

    Raises:
        LockedError: Another live run owns the folder.
        ConfigError: The config contradicts the data or the run that is resumed, or the tokenizer
            lacks a token that the objective needs.
        LaunchError: A tracker's package is missing.
        DataError: Shards are missing or damaged.
    """
    config.plan_ranks(world.size)
    if world.is_main:
        check_trackers(config.tracking)
    show_phase(f"reading {', '.join(dict.fromkeys(config.data.paths))}")
    stores = open_stores(config.data, lambda: bool(stop))
    folders = {path: store.folder for path, store in zip(config.data.paths, stores, strict=True)}
    dataset = open_dataset(config.data, folders.__getitem__)
    for store in stores:
        if world.is_main or not store.fetches:  # one rank asks a server about every shard
            store.check()
    check_tokenizers(dataset)
    config = fit_config(config, dataset)
    check_packing(dataset.index, config.data)
    plan_trained(config.model, config.init.freeze, config.finetune)  # refuses patterns before a model is built
    _check_metric(config.checkpoint.best, dataset)
    try:
        make_rows = build_rows(config.objective, context_of_run(config, dataset))
    except ConfigError as error:
        raise ConfigError(error.what, where=str(dataset.tokenizer_path), fix=error.fix) from None
    folder = RunDir(config.folder)
    lease = Lease(folder.lease) if world.is_main else None
    try:
        config = follow_stored(config, folder)
        if lease is not None:
            sweep(folder)
    except BaseException:
        if lease is not None:
            lease.release()
        raise
    return Claim(folder, lease, dataset, stores, config, make_rows)


def sweep(folder: RunDir) -> None:
    """Removes the unfinished files of killed attempts. Raises: DiskError."""
    remove_leftovers(folder.checkpoints)
    for place in (folder.path, folder.checkpoints, folder.path / ATTENTION):
        for leftover in place.glob("?*.tmp-*"):  # of a file that is replaced
            with suppress(OSError):  # a file that stays does no harm
                leftover.unlink()


def begin(claim: Claim, world: World, facts: dict[str, Any]) -> dict[str, Any]:
    """Writes config, tokenizer and attempt to the run folder; returns run.json. Collective."""
    record = None
    claim.check_lease()
    if world.is_main:
        write_file(claim.folder.config, dump_config(claim.config).encode())
    if world.is_main and claim.dataset.index.has_tokenizer:
        tokenizer = claim.dataset.tokenizer_path.read_bytes()
        if not claim.folder.tokenizer.is_file() or claim.folder.tokenizer.read_bytes() != tokenizer:
            folders = [source.folder for source in claim.dataset.sources]
            begin = claim.dataset.index.begin_id
            content = dump_normalize(normalize_of_data(folders), template_of_data(folders), begin)
            write_file(claim.folder.normalize, content)
            write_file(claim.folder.tokenizer, tokenizer)
    if world.is_main:
        record = begin_attempt(claim.folder, claim.config.run.name, facts)
    result = dist.broadcast_object(record)
    assert isinstance(result, dict)
    return result


def check_data(saved: TrainState, fresh: TrainState, allow: list[str]) -> None:
    """Compares data of a checkpoint with those at hand. Raises: ConfigError."""
    pairs = {
        "tokenizer": (saved.tokenizer_hash, fresh.tokenizer_hash),
        "token shards": (saved.data_hash, fresh.data_hash),
    }
    for name, (old, new) in pairs.items():
        if old != new and not is_allowed("data.path", allow):
            raise ConfigError(
                f"the {name} at data.path differ from those of the run (sha256 {old[:12]} -> {new[:12]})",
                fix="restore them, use another run.name, or pass resume.allow=[data]",
            )


def check_order(saved: TrainState, next_digest: str, allow: list[str]) -> None:
    """Compares the next samples with the samples of the checkpoint's next step. Raises: DataError.

    Where `resume.allow` lets the order change, a difference is a warning. `next_digest`: of the
    global sample ids; "": there is no next step.
    """
    if not (next_digest and saved.next_digest) or next_digest == saved.next_digest:
        return
    error = DataError(
        f"the samples of step {saved.step + 1} are not those that its checkpoint says come next "
        f"(digest {saved.next_digest} -> {next_digest})",
        fix="use the data, config and version of the run so far, or pass resume.allow=[data]",
    )
    if not any(key.split(".")[0] in _ORDER for key in allow):
        raise error
    log.warning("%s", error.what)


def note_commit(folder: RunDir, step: int) -> None:
    """Writes the newest commit of the last attempt to run.json. Thread-safe.

    A failure is a warning: the checkpoint is valid all the same, and the next commit tries again.
    """
    try:
        change_record(folder, lambda record: record["attempts"][-1].update({COMMITTED: step}))
    except (ConfigError, DiskError) as error:
        log.warning("%s", error)


def _check_metric(metric: str | None, dataset: Dataset) -> None:
    if metric is None:
        return
    sources = [source.name for source in dataset.sources if "validation" in source.index.splits]
    is_of_another = metric.startswith(OF_A_SOURCE) and metric.removeprefix(OF_A_SOURCE) not in sources
    if is_of_another or not sources:
        raise ConfigError(
            f"checkpoint.best={metric}: the data have no validation split that tells it",
            fix="prepare another folder with --split tail:0.05, or leave it out",
        )


def recall_evaluations(checkpoints: CheckpointManager, metric: str | None, run: RunDir) -> None:
    """Notes earlier evaluations: a killed attempt may not have marked its best checkpoint.

    The run folder is rewound to the step that the attempt continues from.
    """
    if metric is None:
        return
    try:
        rows = list(rows_with(run.metrics, metric))
    except DataError as error:
        log.warning("%s", error)
        return
    for row in rows:
        checkpoints.note_evaluation(row["step"], row)
