"""Appends the results of `pretrain evaluate` to `evaluations.jsonl` of the run folder.

Evaluations may end at the same time, on several machines: each appends one line by one write,
behind a lock where the file system has locks. Only `pretrain report` reads the rows, so a failure
to append is a warning.
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from pretrain.artifact.source import ModelSource
from pretrain.errors import DiskError
from pretrain.run.folder import RunDir, package_versions
from pretrain.utils.io import append_line, json_bytes
from pretrain.utils.log import redact

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint of a run that is measured, by the name of its folder."""

    run: RunDir
    checkpoint: str
    step: int
    sha256: str  # of the manifest: a step repeated after a rollback has other weights


def find_subject(source: ModelSource) -> Subject | None:
    """Returns the checkpoint of a run; None for any other model."""
    if source.run is None or source.checkpoint is None:
        return None
    manifest = source.checkpoint.manifest
    digest = hashlib.sha256(json_bytes(manifest.to_json())).hexdigest()
    return Subject(source.run, source.name, int(manifest.state["step"]), digest)


@dataclass(frozen=True, slots=True)
class Data:
    """Identity of evaluation data: a source, a task, or `source` and `reference` of a test set."""

    name: str
    path: str | None  # folder, address or file
    sha256: str  # of shards and tokenizer, of a file's lines, or of a task's documents


def hash_lines(lines: list[str]) -> str:
    """Returns the sha256 of lines with their line feeds: the file's, if it is plain UTF-8."""
    text = "".join(f"{line}\n" for line in lines)
    return hashlib.sha256(text.encode("utf-8", errors="replace")).hexdigest()


def keep_evaluation(subject: Subject, data: list[Data], settings: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Appends a row to the run's file; logs a warning where that fails.

    `settings` are those of the command line, `result` the facts of `pretrain evaluate --json`.
    """
    if subject.run.release.is_file():
        log.warning("%s: the result is not kept: a released run is not changed", subject.run.path)
        return
    versions = package_versions()
    row = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": subject.step,
        "checkpoint": subject.checkpoint,
        "manifest": subject.sha256,
        "data": [asdict(one) for one in data],
        "settings": settings,
        "versions": {name: versions[name] for name in ("pretrain", "torch")},
        "result": result,
    }
    line = json.dumps(_plain(row), separators=(",", ":"), allow_nan=False).encode()
    try:
        append_line(subject.run.evaluations, line)
    except DiskError as error:
        log.warning("the result could not be kept: %s", error)


def _plain(value: Any) -> Any:
    """Returns plain values: no secrets, null for a number that is not finite."""
    if isinstance(value, Mapping):
        # A confusion matrix grows with the square of the labels.
        return {redact(str(key)): _plain(item) for key, item in value.items() if key != "confusion"}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else redact(str(value))
