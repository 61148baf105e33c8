"""Writes a released run: a copy of all that another person needs, checked and hashed on the way.

    run.json, config  ->  no owner  ->  checkpoints chosen  ->  ledger whole up to the newest
    ->  data and prediction  ->  room  ->  .tmp-OUT: records, checkpoints (CRC32s of their manifests),
    data, ledger.json, card, release.json  ->  still no owner  ->  renamed to OUT

An interruption leaves no OUT. Hosts, processes and reasons of failures stay behind, as trackers and
paths outside do.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format import MANIFEST, Manifest, list_checkpoints, load_manifest, step_of
from pretrain.checkpoint.state import TrainState
from pretrain.config.load import dump_config, load_config
from pretrain.config.run import RunConfig
from pretrain.errors import CheckpointError, DataError, DiskError
from pretrain.release.released_card import write_card
from pretrain.release.released_course import LEDGER, Course, hash_course, read_course
from pretrain.release.released_run import (
    CARD,
    DATA,
    PREDICTION,
    ReleasedRun,
    copy_file,
    cut_rows,
    hash_file,
    portable,
    with_data_paths,
)
from pretrain.run.folder import RunDir
from pretrain.run.lease import refuse_if_owned
from pretrain.scale.prediction import PredictionScore, load_prediction, score
from pretrain.shards.dataset import open_dataset
from pretrain.shards.index import INDEX_NAME, data_hash, load_index
from pretrain.utils.io import json_bytes, make_dir, new_folder, write_file, write_json
from pretrain.utils.remote import is_remote
from pretrain.utils.safe_read import read_json

ROWS = ("metrics.jsonl", "audit.jsonl")
FILES = ("evaluations.jsonl", "tokenizer.json", "normalize.json", "reference.safetensors")
_RECORD = ("id", "name", "created", "skips", "rollbacks")
_ATTEMPT = (
    *("number", "started", "ended", "exit_code", "world_size", "engine", "from_step", "committed_step"),
    *("versions", "numerics"),
)
"""Facts of a start that are published."""
PREPARE, OPTIONS, CARD_OF_DATA = "prepare.json", "options.json", "data_card.md"

Tell = Callable[[int], Any]
"""Receives the bytes that were copied."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A source of the data: name, path in the config, files to copy, options of `prepare`."""

    name: str
    path: str
    sha256: str
    files: list[str]
    options: dict[str, Any] | None
    has_shards: bool


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """Content of a release, read and checked; nothing is written yet."""

    run: RunDir
    record: dict[str, Any]
    config: RunConfig
    checkpoints: dict[Path, Manifest]
    course: Course
    state: TrainState  # of the newest checkpoint
    sources: list[_Source]
    prediction: dict[str, Any] | None
    score: PredictionScore | None

    @property
    def num_bytes(self) -> int:
        """Bytes of checkpoints and shards, which are nearly all."""
        size = 0
        for manifest in self.checkpoints.values():
            size += sum(file.num_bytes for file in manifest.files)
        for source in self.sources:
            size += sum((Path(source.path) / name).stat().st_size for name in source.files)
        return size


def plan_release(
    path: Path,
    *,
    every: int | None = None,
    with_shards: bool = False,
    prediction: Path | None = None,
) -> ReleasePlan:
    """Reads a run that is to be released.

    Args:
        path: The run folder.
        every: Take the checkpoints of steps that are a multiple of this, and the newest. None: all.
        with_shards: Take the shards of the data too.
        prediction: prediction.json of the ladder, if any.

    Raises:
        LockedError: A process owns the run.
        ConfigError: There is no run, or it cannot be read.
        CheckpointError: There is no checkpoint, or a manifest is damaged.
        DataError: The ledger is damaged; or the data are others than the run's, or absent though
            their shards are asked for; or the prediction is not of this run.
    """
    run = RunDir(path)
    record = run.read_record()
    refuse_if_owned(run.lease)
    config = load_config(run.config, extensions="ask")
    folders = list_checkpoints(run.checkpoints)
    if not folders:
        text = "there is no checkpoint to release"
        raise CheckpointError(text, where=str(run.checkpoints), fix="train the run first")
    multiples = [one for one in folders if (step_of(one) or 0) % (every or 1) == 0]
    checkpoints = {one: load_manifest(one) for one in dict.fromkeys([*multiples, folders[-1]])}
    newest = checkpoints[folders[-1]]
    state = TrainState.from_json(newest.state, str(folders[-1]))
    course = read_course(run, state.step)
    if len(course.rows) < state.step:
        ends = f"the ledger ends at step {len(course.rows)}"
        text = f"{ends}, the newest checkpoint is of step {state.step}"
        raise DataError(text, where=str(run.audit), fix="restore the file")
    sources = [_plan_source(name, path, with_shards) for name, path in _names(config).items()]
    _check_data(config, sources, state)
    predicted = None if prediction is None else load_prediction(prediction)
    measured = None if predicted is None else score(predicted, path)
    return ReleasePlan(run, record, config, checkpoints, course, state, sources, predicted, measured)


def _names(config: RunConfig) -> dict[str, str]:
    """Returns the path of each source by its name in the release."""
    if config.data.path is not None:
        return {Path(config.data.path).name: config.data.path}
    return {source.name: source.path for source in config.data.mixture}


def _plan_source(name: str, path: str, with_shards: bool) -> _Source:
    folder = Path(path)
    if is_remote(path) or not (with_shards or folder.is_dir()):
        return _Source(name, path, "", [], None, has_shards=False)
    index = load_index(folder)
    files = [CARD_OF_DATA] if (folder / CARD_OF_DATA).is_file() else []
    if with_shards:
        files += [INDEX_NAME, *(["tokenizer.json"] if index.has_tokenizer else [])]
        shards = [shard for split in index.splits.values() for shard in split.shards]
        names = [file.name for shard in shards for file in shard.files]
        files += [name for name in names if name not in index.tars]
    options = None
    if (folder / PREPARE).is_file():
        try:
            options = dict(read_json(folder / PREPARE)["options"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            text = f"cannot be read: {error}"
            raise DataError(text, where=str(folder / PREPARE), fix="restore it") from None
    return _Source(name, path, data_hash(index), files, options, has_shards=with_shards)


def _check_data(config: RunConfig, sources: Sequence[_Source], state: TrainState) -> None:
    """Refuses the recipe of data that the run did not have. Raises: DataError."""
    are_here = all(source.sha256 for source in sources)
    if are_here and open_dataset(config.data).sha256 != state.data_hash:
        raise DataError(
            f"the data are others than those of the run (sha256 {state.data_hash[:12]})",
            where=", ".join(source.path for source in sources),
            fix="restore them, or move them away: then their hash alone is released",
        )


def write_released(plan: ReleasePlan, out: Path, tell: Tell) -> ReleasedRun:
    """Writes a release to a new folder; returns its content.

    Raises:
        ConfigError: The folder holds something.
        CheckpointError: A file of a checkpoint is damaged.
        LockedError: A process has taken the run meanwhile.
        DiskError: No room, or the disk refused; nothing is left.
    """
    with new_folder(out) as folder:
        free = shutil.disk_usage(folder).free
        if plan.num_bytes > free:
            text = f"{plan.num_bytes:,} bytes are to be copied, and {free:,} are free"
            raise DiskError(text, where=str(out), fix="free space, or take fewer checkpoints by --every")
        files = _Files(folder, tell)
        _write_records(plan, files)
        for checkpoint, manifest in plan.checkpoints.items():
            _copy_checkpoint(checkpoint, manifest, files)
        for source in plan.sources:
            for name in source.files:
                files.copy(Path(source.path) / name, f"{DATA}/{source.name}/{name}")
            if source.options is not None:
                files.write(f"{DATA}/{source.name}/{OPTIONS}", json_bytes(source.options))
        if plan.prediction is not None:
            files.write(PREDICTION, json_bytes(plan.prediction))
        hashes = hash_course(plan.course, plan.state.data_hash, plan.state.tokenizer_hash)
        files.write(LEDGER, json_bytes(hashes.to_json()))
        files.write(CARD, write_card(plan.config, plan.course, files.steps, plan.score).encode())
        released = ReleasedRun(
            folder=RunDir(out),
            run=plan.record["id"],
            name=plan.config.run.name,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            steps=files.steps,
            last_step=plan.state.step,
            data=[_source_facts(source) for source in plan.sources],
            data_sha256=plan.state.data_hash,
            tokenizer_sha256=plan.state.tokenizer_hash,
            files=files.facts,
        )
        write_json(RunDir(folder).release, released.to_json())
        refuse_if_owned(plan.run.lease)
    return released


def _source_facts(source: _Source) -> dict[str, Any]:
    path = _shown(source.path)
    return {"name": source.name, "path": path, "sha256": source.sha256, "shards": source.has_shards}


def _shown(path: str) -> str:
    """Returns a path as it is published: of an absolute one, its last name."""
    return Path(path).name if Path(path).is_absolute() else path


class _Files:
    """Files of a release under way, with their sizes and hashes."""

    def __init__(self, folder: Path, tell: Tell) -> None:
        self.folder, self._tell = folder, tell
        self.facts: dict[str, dict[str, Any]] = {}
        self.steps: list[int] = []

    def copy(self, source: Path, name: str) -> Any:
        """Copies a file; returns its record with CRC32s."""
        target = self.folder / name
        if not target.parent.is_dir():
            make_dir(target.parent)
        record, digest = copy_file(source, target)
        self.facts[name] = {"num_bytes": record.num_bytes, "sha256": digest}
        self._tell(record.num_bytes)
        return record

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file."""
        target = self.folder / name
        if not target.parent.is_dir():
            make_dir(target.parent)
        write_file(target, content)
        self.note(name)

    def note(self, name: str) -> None:
        """Notes the hash of a file that is there."""
        size, digest = hash_file(self.folder / name)
        self.facts[name] = {"num_bytes": size, "sha256": digest}


def _copy_checkpoint(checkpoint: Path, manifest: Manifest, files: _Files) -> None:
    name = f"checkpoints/{checkpoint.name}"
    for expected in manifest.files:
        record = files.copy(checkpoint / expected.name, f"{name}/{expected.name}")
        if record != expected:
            text = f"{expected.name} is not as its manifest says"
            raise CheckpointError(text, where=str(checkpoint), fix="move this checkpoint away")
    files.copy(checkpoint / MANIFEST, f"{name}/{MANIFEST}")
    files.steps.append(int(manifest.state["step"]))


def _write_records(plan: ReleasePlan, files: _Files) -> None:
    paths = [_shown(source.path) for source in plan.sources]
    config = with_data_paths(portable(plan.config), paths)
    if config.init.from_ is not None:
        start = config.init.model_copy(update={"from_": _shown(config.init.from_)})
        config = config.model_copy(update={"init": start})
    files.write("config.yaml", dump_config(config).encode())
    record: dict[str, Any] = {name: plan.record[name] for name in _RECORD if name in plan.record}
    starts = plan.record["attempts"]
    record["attempts"] = [{name: one[name] for name in _ATTEMPT if name in one} for one in starts]
    files.write("run.json", json_bytes(record))
    for name in (*ROWS, *FILES):
        if not (plan.run.path / name).is_file():
            continue
        files.copy(plan.run.path / name, name)
        if name in ROWS:
            cut_rows(files.folder / name, plan.state.step)
            files.note(name)
