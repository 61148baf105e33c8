"""The folder of a released run, and the strict reading of one that a stranger wrote.

    release.json     written last: run, steps, data, and size and SHA-256 of every other file
    ledger.json      hash of each row of the ledger, and the environments of the steps (released_course.py)
    README.md        card
    config.yaml run.json audit.jsonl metrics.jsonl ...   records, as in a run folder
    checkpoints/step-N/   byte for byte
    data/NAME/       data card and options of `prepare`; all shards where asked for
    prediction.json  made before the run, where there is one

It is a run folder to every command that reads one. No start, rollback or evaluation writes in it
(run/lease.py).
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format import seal, unseal
from pretrain.config.data import DataConfig
from pretrain.config.load import load_config
from pretrain.config.run import RunConfig
from pretrain.config.tracking import ProfileConfig, TrackingConfig
from pretrain.config.train import LaunchConfig, ResumeConfig, RunSection, TasksConfig
from pretrain.errors import CheckpointError
from pretrain.kinds.trackers import NO_TRACKERS
from pretrain.run.folder import RunDir
from pretrain.utils.io import CRC_CHUNK_BYTES, FileRecord, write_chunks
from pretrain.utils.jsonl import JsonLines
from pretrain.utils.safe_read import MAX_RECORD_BYTES, check_fields, open_file, read_bounded

SCHEMA = 1
PREDICTION = "prediction.json"
CARD = "README.md"
DATA = "data"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_FIELDS = {
    "schema": int, "run": str, "name": str, "written": str, "steps": list, "last_step": int,
    "data": list, "data_sha256": str, "tokenizer_sha256": str, "files": dict,
}  # fmt: skip
_SOURCE = {"name": str, "sha256": str, "shards": bool}
_FILE = {"num_bytes": int, "sha256": str}


@dataclass(frozen=True, slots=True)
class ReleasedRun:
    """Content of release.json, and the folder that it is in."""

    folder: RunDir
    run: str  # id of the run
    name: str
    written: str  # time, UTC
    steps: list[int]  # of the checkpoints, ascending
    last_step: int  # of the ledger
    # Sources: name, path, sha256, and whether all shards are in the release.
    data: list[dict[str, Any]]
    data_sha256: str
    tokenizer_sha256: str
    files: dict[str, dict[str, Any]]  # size and SHA-256 by path

    def to_json(self) -> dict[str, Any]:
        """Returns plain values in an envelope with a CRC32."""
        content = asdict(self)
        del content["folder"]
        return seal({"schema": SCHEMA} | content)

    def load_config(self, overrides: Iterable[str] = ()) -> RunConfig:
        """Loads the config; modules under `extend` must be imported before. Raises: ConfigError."""
        return load_config(self.folder.config, list(overrides), extensions="ask")

    def damage(self, names: Iterable[str]) -> Iterator[str]:
        """Yields a sentence for each of these files that is not as it was released."""
        for name in names:
            if name not in self.files:
                yield f"{name}: not in the release"
                continue
            try:
                size, digest = hash_file(self.folder.path / name)
            except OSError as error:
                yield f"{name}: {error.strerror}"
                continue
            if (size, digest) != (self.files[name]["num_bytes"], self.files[name]["sha256"]):
                yield f"{name}: SHA-256 {digest[:12]} of {size:,} bytes is not the released one"

    def check(self, names: Iterable[str]) -> None:
        """Checks files against their hashes. Raises: CheckpointError, for the first that differs."""
        if problem := next(self.damage(names), None):
            raise CheckpointError(problem, where=str(self.folder.path), fix="fetch it again")

    def names_below(self, folder: str) -> list[str]:
        """Returns the released files of a folder."""
        return [name for name in self.files if name.startswith(f"{folder}/")]


def open_released(path: Path) -> ReleasedRun:
    """Reads release.json. Raises: CheckpointError: Missing, damaged, or a name leaves the folder."""
    folder = RunDir(path)
    where = str(folder.release)
    try:
        raw = check_fields(unseal(read_bounded(folder.release, MAX_RECORD_BYTES))["content"], _FIELDS)
        if raw.pop("schema") != SCHEMA:
            raise CheckpointError("written in another format", where=where, fix="update pretrain")
        for source in raw["data"]:
            check_fields(source, _SOURCE)
        for file in raw["files"].values():
            check_fields(file, _FILE)
        for name in [*raw["files"], *(source["name"] for source in raw["data"])]:
            if not all(_PART.fullmatch(part) for part in name.split("/")):
                raise ValueError(f"{name[:80]!r} leaves the folder")
        if not all(type(step) is int and step > 0 for step in raw["steps"]):
            raise ValueError("a step is no whole number")
        return ReleasedRun(folder, **raw)
    except FileNotFoundError:
        fix = "check the path; `pretrain release RUN OUT` writes one"
        raise CheckpointError("no released run (no release.json)", where=str(path), fix=fix) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"damaged: {type(error).__name__}: {error}"
        raise CheckpointError(reason, where=where, fix="fetch it again") from None


def portable(config: RunConfig) -> RunConfig:
    """Returns a config without trackers, addresses of uploads, jobs, tasks and folders outside."""
    tracked = config.tracking
    tracking = TrackingConfig(
        **NO_TRACKERS,
        log_every_steps=tracked.log_every_steps,
        norms_every_steps=tracked.norms_every_steps,
        samples=tracked.samples,
        attention=tracked.attention,
    )
    cache = DataConfig.model_fields["cache_dir"].default
    return config.model_copy(
        update={
            "run": RunSection(name=config.run.name),
            "data": config.data.model_copy(update={"cache_dir": cache}),
            "tracking": tracking,
            "train": config.train.model_copy(update={"stop_after": None}),
            "profile": ProfileConfig(),
            "resume": ResumeConfig(),
            "launch": LaunchConfig(),
            "checkpoint": config.checkpoint.model_copy(update={"upload": None}),
            "eval": config.eval.model_copy(update={"tasks": TasksConfig()}),
        }
    )


def with_data_paths(config: RunConfig, paths: list[str]) -> RunConfig:
    """Returns a config whose sources are at other places, in their order."""
    data = config.data
    if data.path is not None:
        update: dict[str, Any] = {"path": paths[0]}
    else:
        pairs = zip(data.mixture, paths, strict=True)
        update = {"mixture": [source.model_copy(update={"path": path}) for source, path in pairs]}
    return config.model_copy(update={"data": data.model_copy(update=update)})


def hash_file(path: Path) -> tuple[int, str]:
    """Returns size and SHA-256 of a file. Raises: OSError."""
    digest = hashlib.sha256()
    size = 0
    with open_file(path) as file:
        while piece := file.read(CRC_CHUNK_BYTES):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()


def copy_file(source: Path, target: Path) -> tuple[FileRecord, str]:
    """Copies a file to a new place; returns its size with CRC32s, and its SHA-256.

    Raises:
        CheckpointError: It cannot be read.
        DiskError: The disk refused the copy.
    """
    digest = hashlib.sha256()

    def pieces() -> Iterator[memoryview]:
        try:
            with open_file(source) as file:
                while piece := file.read(CRC_CHUNK_BYTES):
                    digest.update(piece)
                    yield memoryview(piece)
        except OSError as error:
            text = f"cannot be read: {error.strerror}"
            raise CheckpointError(text, where=str(source), fix="restore it") from None

    record = write_chunks(target, pieces())
    return record, digest.hexdigest()


def cut_rows(path: Path, step: int) -> None:
    """Cuts off the rows of a copy after a step."""
    lines = JsonLines(path)
    lines.rewind(step)
    lines.close()
