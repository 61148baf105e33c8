"""Paths of a run folder, and its record `run.json`: identity, versions, attempts.

Besides the paths of `RunDir`: samples.jsonl (generated texts), attention/step-00001000.png ...,
wandb/.
"""

import os
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pretrain import __version__
from pretrain.errors import EXIT_OK, CheckpointError, ConfigError, DataError
from pretrain.utils.io import write_json
from pretrain.utils.jsonl import each_row, last_row
from pretrain.utils.safe_read import MAX_INT, check_fields, read_json

TRACKED_PACKAGES = ("torch", "deepspeed", "accelerate", "webdataset", "tokenizers", "numpy", "safetensors", "wandb")
_CHECKPOINT = re.compile(r"step-([0-9]{8,})")
_RECORD_KEYS = ("id", "name", "created", "attempts")
# Types of the fields that readers use.
_RECORD = {"id": str, "name": str, "created": str, "attempts": list, "rollbacks": list, "skips": list}
_ATTEMPT = {
    "number": int, "started": str, "ended": str, "exit_code": int, "reason": str, "host": str, "pid": int,
    "world_size": int, "from_step": int, "committed_step": int, "versions": dict, "slurm": dict, "recovery": dict,
    "numerics": dict, "ranks": list, "self_check": dict,
}  # fmt: skip
_RECOVERY = {"number": int, "lost": str, "seconds": float}
_ROLLBACK = {"to": int, "automatic": bool, "set_aside": list}
_SLURM = {"job": str, "array": str, "restart": int, "nodes": str, "num_nodes": int}
_RESTORE = "restore it, or remove it: the run continues at its last checkpoint, without a record of its starts"
COMMITTED = "committed_step"
"""Key of an attempt: its newest commit."""
RECOVERY = "recovery"
"""Key of an attempt that took the place of one with a lost rank, in the same job."""
SAVED = "checkpoint_step"
"""Key of the metrics row of a save."""
_CHANGING = threading.Lock()
"""Locked while run.json is changed: at a commit, and at the end of the run, by two threads."""


class RunDir:
    """Paths in a run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        """The resolved config."""
        self.record = path / "run.json"
        """Identity, versions, attempts."""
        self.metrics = path / "metrics.jsonl"
        """One row a logging interval."""
        self.audit = path / "audit.jsonl"
        """The ledger: one row a step."""
        self.evaluations = path / "evaluations.jsonl"
        """One row for each `pretrain evaluate` of the run; absent before the first."""
        self.checkpoints = path / "checkpoints"
        """Folder of checkpoints, step-00001000/ and so on."""
        self.reference = path / "reference.safetensors"
        """Log-probabilities of answers by the model that a run of preferences began with."""
        self.lease = path / "lease"
        """Folder of the owners of the run (lease.py)."""
        self.logs = path / "logs"
        """Folder of the ranks' logs."""
        self.launch = path / "launch"
        """Folder of the Slurm jobs of this run: spec.json, config.yaml, journal.jsonl."""
        self.tokenizer = path / "tokenizer.json"
        """The tokenizer, copied from the data, so that the run can generate without them."""
        self.normalize = path / "normalize.json"
        """Normalisation of the data and the template of its turns, which are applied to later texts too."""
        self.release = path / "release.json"
        """Content of a released run, which is not changed; absent in any other (pretrain/release)."""
        self.attempt: int | None = None
        """Number of the attempt of this process; None: it has begun none."""

    def has_saved(self) -> bool:
        """Returns whether there is a checkpoint, a damaged one too."""
        return any(self.checkpoints.glob("step-*"))

    def newest_step(self) -> int:
        """Returns the step of the newest committed checkpoint, unverified; 0 without one."""
        matches = [_CHECKPOINT.fullmatch(path.parent.name) for path in self.checkpoints.glob("*/manifest.json")]
        return max((int(match[1]) for match in matches if match), default=0)

    def last_step(self) -> int:
        """Returns the last step with a row or a commit; 0 without one. A full disk takes one and not the other."""
        steps = [self.newest_step()]
        for file in (self.audit, self.metrics):
            with suppress(OSError):
                steps.append((last_row(file) or {}).get("step", 0))
        return max(step for step in steps if step <= MAX_INT)

    def is_complete(self, last_step: int) -> bool:
        """Returns whether the last attempt ended with everything done, and its checkpoint is there."""
        attempts = self.read_record()["attempts"] if self.exists() else []
        is_done = bool(attempts) and attempts[-1].get("exit_code") == EXIT_OK
        return is_done and self.newest_step() >= last_step

    def exists(self) -> bool:
        """Returns whether a run has begun here."""
        return self.record.is_file()

    def read_record(self) -> dict[str, Any]:
        """Returns run.json. Raises: ConfigError, where it is absent or not the record of a run."""
        try:
            record = check_fields(read_json(self.record), _RECORD)
            for rollback in record.get("rollbacks") or []:
                check_fields(rollback, _ROLLBACK)
            for attempt in record.get("attempts") or []:
                check_fields(check_fields(attempt, _ATTEMPT).get("slurm") or {}, _SLURM)
                check_fields(attempt.get(RECOVERY) or {}, _RECOVERY)
        except FileNotFoundError:
            inside = next(iter(sorted(self.path.glob("*/run.json"))), None)
            fix = f"name a run in it, such as {inside.parent}" if inside else "check the path"
            raise ConfigError("no run here (no run.json)", where=str(self.path), fix=fix) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"run.json cannot be read: {error}", where=str(self.record), fix=_RESTORE) from None
        if not all(map(record.get, _RECORD_KEYS)):
            raise ConfigError("not the record of a run", where=str(self.record), fix=_RESTORE)
        return record


def package_versions() -> dict[str, str]:
    """Returns the versions of Python, pretrain and the packages that affect results."""
    versions = {"python": sys.version.split()[0], "pretrain": __version__}
    for name in TRACKED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


def slurm_facts(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the facts of an attempt on its Slurm job, under `slurm`; none outside of one."""
    job = environment.get("SLURM_JOB_ID")
    if not job:
        return {}
    array = environment.get("SLURM_ARRAY_JOB_ID")
    restart = environment.get("SLURM_RESTART_COUNT", "")
    num_nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_JOB_NUM_NODES", "")
    return {
        "slurm": {
            "job": job,
            "array": f"{array}_{environment.get('SLURM_ARRAY_TASK_ID', '')}" if array else None,
            "restart": int(restart) if restart.isdecimal() else 0,
            "nodes": environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""),
            "num_nodes": int(num_nodes) if num_nodes.isdecimal() else 1,
        }
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def begin_attempt(run: RunDir, name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Appends an attempt to run.json, and creates the run where there is none; returns the record.

    The caller owns the run folder, as for every change of run.json. `facts`: world size, engine,
    resumed step and the like.
    """
    where = {"host": socket.gethostname(), "pid": os.getpid()} | slurm_facts(os.environ)
    with _CHANGING:
        if run.exists():
            record = run.read_record()
        else:
            record = {"id": secrets.token_hex(4), "name": name, "created": _now(), "attempts": []}
        number = len(record["attempts"]) + 1
        attempt = {"number": number, "started": _now(), "versions": package_versions()} | where | facts
        record["attempts"].append(attempt)
        write_json(run.record, record)
        run.attempt = number
    return record


def change_record(run: RunDir, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes run.json by a function that changes the record in place. Any thread may."""
    with _CHANGING:
        record = run.read_record()
        change(record)
        write_json(run.record, record)


def end_attempt(run: RunDir, outcome: dict[str, Any]) -> None:
    """Adds the end of the last attempt to run.json (exit code, reason, step)."""
    change_record(run, lambda record: record["attempts"][-1].update(ended=_now(), **outcome))


def check_new(folder: RunDir) -> None:
    """Refuses step 0 in a folder with evidence of a checkpoint, or of a run without its record.

    Commits of an attempt are noted in run.json. Where that file is missing, rows in the
    ledger or the metrics show that the run is not new; where it lacks the note, as on a full disk,
    a row of a later attempt or of a save does.

    Raises:
        CheckpointError: There is evidence; names the file.
        ConfigError: run.json is damaged.
    """
    sign = _find_sign(folder)
    if sign is not None:
        raise CheckpointError(
            f"there is no checkpoint, but {sign}: a run never starts over by itself",
            where=str(folder.checkpoints),
            fix="restore the checkpoints, or start over under another run.name",
        )


def _find_sign(folder: RunDir) -> str | None:
    """Returns the evidence of a commit, or of an old run whose record is missing; else None."""
    if not folder.exists():
        for file in (folder.audit, folder.metrics):
            if file.is_file() and file.stat().st_size:
                return f"{file.name} has rows, and run.json is missing"
        return None
    for attempt in folder.read_record()["attempts"]:
        for key in (COMMITTED, "from_step"):
            if attempt.get(key):
                return f"run.json tells of one of step {attempt[key]}"
    try:
        before = 1
        for row in each_row(folder.audit):
            attempt = int(row["attempt"])
            # A later attempt that did not begin at step 1 began at a checkpoint.
            if attempt > before and row["step"] > 1:
                return f"audit.jsonl tells of an attempt that began at one of step {row['step'] - 1}"
            before = max(before, attempt)
        for metrics in each_row(folder.metrics):
            if metrics.get(SAVED):
                return f"metrics.jsonl tells of one of step {metrics[SAVED]}"
    except DataError as error:
        return f"the records are damaged ({error.where}: {error.what})"
    except (LookupError, TypeError, ValueError):
        return f"the records are damaged ({folder.audit}: a row without an attempt)"
    return None
