"""What `pretrain evaluate` finds of a run's checkpoint is kept in the run folder: `evaluations.jsonl`, a row each.

    model opened -> Subject (run, checkpoint, identity)  ...measured...  -> keep_evaluation -> one line at the end

Several evaluations may end at once, on several machines: each appends one line by one write, behind a lock where the
file system has locks. A row is history: `pretrain report` shows it, nothing else reads it. So what cannot be kept is
a warning, and the evaluation has done its work.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pretrain.artifact.what import What
from pretrain.checkpoint.layout import MANIFEST, load_manifest
from pretrain.io import fsync_dir
from pretrain.log import redact
from pretrain.rundir import RunDir, package_versions

log = logging.getLogger(__name__)

LOCK_WAIT_S = 5.0
"""Longer than any append takes; then one that hangs elsewhere is not waited for."""
_VERSIONS = ("pretrain", "torch")


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint of a run that is measured.

    Attributes:
        run: Its run.
        checkpoint: Name of its folder.
        step: Of the run.
        sha256: Of its manifest: a step that was done again after a rollback has other weights.
    """

    run: RunDir
    checkpoint: str
    step: int
    sha256: str


def find_subject(what: What) -> Subject | None:
    """Returns the checkpoint of a run; None for a model that is no run's.

    To be asked before it is measured: a run that goes on may have removed it after.
    """
    if what.run is None:
        return None
    step = int(load_manifest(what.path).state["step"])
    return Subject(what.run, what.path.name, step, hashlib.sha256((what.path / MANIFEST).read_bytes()).hexdigest())


@dataclass(frozen=True, slots=True)
class Data:
    """What was read.

    Attributes:
        name: Of a source, a task, or `source` and `reference`.
        path: Folder, address or file; None: it has none.
        sha256: Of shards and tokenizer; of the lines of a file; of a task's documents.
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
        settings: Of the command line.
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
    except OSError as error:
        reason = error.strerror or str(error)
        log.warning("%s: the result could not be kept: %s", subject.run.evaluations, reason)


def _plain(value: Any) -> Any:
    """Returns plain values: no secrets, null for what is not finite."""
    if isinstance(value, Mapping):
        return {redact(str(key)): _plain(item) for key, item in value.items() if key != "confusion"}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else redact(str(value))


def append_line(path: Path, line: bytes) -> None:
    """Appends a line, durably, beside others that do so too; a line that a crash has torn is ended first.

    Raises:
        OSError: The disk refused; the file is as it was.
    """
    is_new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        has_lock = _lock(descriptor)
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        content = (b"\n" if is_torn else b"") + line + b"\n"
        if os.write(descriptor, content) != len(content):
            if has_lock:
                os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)  # with its lock
    if is_new:
        fsync_dir(path.parent)


def _lock(descriptor: int) -> bool:
    """Waits a little for the lock of a file; returns whether it is held. Without, a write at the end must do."""
    end = time.monotonic() + LOCK_WAIT_S
    while True:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
