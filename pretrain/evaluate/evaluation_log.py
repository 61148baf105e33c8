"""Appends the results of `pretrain evaluate` to `evaluations.jsonl` of the run folder, one row each.

    model opened -> Subject (run, checkpoint, identity)  ...measured...  -> keep_evaluation -> one line at the end

Several evaluations may end at once, on several machines: each appends one line by one write, behind a lock where the
file system has locks. A row is history: `pretrain report` shows it, nothing else reads it. So what cannot be kept is
a warning, and the evaluation has done its work.
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pretrain.artifact.source import ModelSource
from pretrain.checkpoint.format import MANIFEST, load_manifest
from pretrain.errors import DiskError
from pretrain.run.folder import RunDir, package_versions
from pretrain.utils.io import append_line
from pretrain.utils.log import redact

log = logging.getLogger(__name__)

_VERSIONS = ("pretrain", "torch")


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint of a run that is measured.

    Attributes:
        run: Run folder.
        checkpoint: Name of its folder.
        step: Training step.
        sha256: Hash of the manifest: a step repeated after a rollback has other weights.
    """

    run: RunDir
    checkpoint: str
    step: int
    sha256: str


def find_subject(source: ModelSource) -> Subject | None:
    """Returns the checkpoint of a run; None for a model that is no run's.

    To be asked before it is measured: a run that goes on may have removed it after.
    """
    if source.run is None:
        return None
    step = int(load_manifest(source.path).state["step"])
    return Subject(
        source.run, source.path.name, step, hashlib.sha256((source.path / MANIFEST).read_bytes()).hexdigest()
    )


@dataclass(frozen=True, slots=True)
class Data:
    """What was read.

    Attributes:
        name: Name of a source or a task, or `source` and `reference`.
        path: Folder, address or file; None: it has none.
        sha256: Hash of shards and tokenizer, of the lines of a file, or of the documents of a task.
    """

    name: str
    path: str | None
    sha256: str


def hash_lines(lines: list[str]) -> str:
    """Returns the sha256 of lines with their line feeds: that of the file, where it is plain UTF-8."""
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace")).hexdigest()


def keep_evaluation(subject: Subject, data: list[Data], settings: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Adds a row to the run's file; where that cannot be, says so in a warning and returns.

    Args:
        subject: What was measured.
        data: On what.
        settings: Settings of the command line.
        result: Facts, as `pretrain evaluate --json` prints them. The confusion matrix is left out: it grows with the
            square of the labels.
    """
    versions = package_versions()
    row = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": subject.step,
        "checkpoint": subject.checkpoint,
        "manifest": subject.sha256,
        "data": [{"name": one.name, "path": one.path, "sha256": one.sha256} for one in data],
        "settings": settings,
        "versions": {name: versions[name] for name in _VERSIONS},
        "result": result,
    }
    try:
        append_line(subject.run.evaluations, json.dumps(_plain(row), separators=(",", ":"), allow_nan=False).encode())
    except DiskError as error:
        log.warning("the result could not be kept: %s", error)


def _plain(value: Any) -> Any:
    """Returns plain values: no secrets, null for what is not finite."""
    if isinstance(value, Mapping):
        return {redact(str(key)): _plain(item) for key, item in value.items() if key != "confusion"}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else redact(str(value))
