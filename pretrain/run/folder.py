"""Paths of a run folder, and its record `run.json`: identity, versions, attempts.

config.yaml    the resolved config                     metrics.jsonl  one row a logging interval
run.json       identity, versions, attempts            audit.jsonl    one row a step
checkpoints/   step-00001000/ ...                      logs/ wandb/
samples.jsonl  generated texts                         attention/     step-00001000.png ...
evaluations.jsonl  one row for each `pretrain evaluate` of the run
lease/         owner of the folder (lease.py)
launch/        spec.json, config.yaml, journal.jsonl of jobs under Slurm (launch/)
"""

import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pretrain import __version__
from pretrain.errors import ConfigError
from pretrain.utils.io import write_json

TRACKED_PACKAGES = ("torch", "deepspeed", "accelerate", "webdataset", "tokenizers", "numpy", "safetensors", "wandb")
_RECORD_KEYS = {"id", "name", "created", "attempts"}
_CHANGING = threading.Lock()
"""Locked while run.json is changed: by the thread that saves, at a commit, and by that of signals, at the end."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths in a run folder."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def record(self) -> Path:
        """Identity and history."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """Metric rows."""
        return self.path / "metrics.jsonl"

    @property
    def audit(self) -> Path:
        """The ledger: one row a step."""
        return self.path / "audit.jsonl"

    @property
    def evaluations(self) -> Path:
        """What `pretrain evaluate` has found of its checkpoints; absent until it has."""
        return self.path / "evaluations.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def lease(self) -> Path:
        """Folder that says who owns the run."""
        return self.path / "lease"

    @property
    def logs(self) -> Path:
        """Folder of the ranks' logs."""
        return self.path / "logs"

    @property
    def launch(self) -> Path:
        """Folder of what Slurm jobs of this run need and tell."""
        return self.path / "launch"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer, copied from the data, so that the run can generate by itself."""
        return self.path / "tokenizer.json"

    @property
    def normalize(self) -> Path:
        """What the text of the data went through before the tokenizer, and what is read later goes through too."""
        return self.path / "normalize.json"

    def has_saved(self) -> bool:
        """Whether there is a checkpoint, a damaged one too."""
        return any(self.checkpoints.glob("step-*"))

    def exists(self) -> bool:
        """Returns whether a run has begun here."""
        return self.record.is_file()

    def read_record(self) -> dict[str, Any]:
        """Returns run.json. Raises: ConfigError where it is absent, not JSON, or not the record of a run."""
        try:
            record = json.loads(self.record.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError("no run here (no run.json)", where=str(self.path), fix="check the path") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"run.json cannot be read: {error}", where=str(self.record), fix="restore it") from None
        if not isinstance(record, dict) or not record.keys() >= _RECORD_KEYS or not record["attempts"]:
            raise ConfigError("not the record of a run", where=str(self.record), fix="restore it")
        return record


def package_versions() -> dict[str, str]:
    """Returns the versions of what a run's results depend on."""
    versions = {"python": sys.version.split()[0], "pretrain": __version__}
    for name in TRACKED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


def slurm_facts(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns what an attempt notes of the Slurm job that it is a start of; nothing outside of one.

    Args:
        environment: Environment of the process.
    """
    job = environment.get("SLURM_JOB_ID")
    if not job:
        return {}
    array, restart = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_RESTART_COUNT", "")
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
    """Appends an attempt to run.json, creating the run where there is none; returns the record.

    Args:
        run: The run folder, owned by the caller.
        name: The run's name.
        facts: What to note of this attempt (world size, engine, resumed step).
    """
    where: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    where |= slurm_facts(os.environ)
    with _CHANGING:
        if run.exists():
            record = run.read_record()
        else:
            record = {"id": secrets.token_hex(4), "name": name, "created": _now(), "attempts": []}
        number = len(record["attempts"]) + 1
        attempt = {"number": number, "started": _now(), "versions": package_versions(), **where, **facts}
        record["attempts"].append(attempt)
        write_json(run.record, record)
    return record


def change_record(run: RunDir, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes run.json by a function of what it says. Any thread may.

    Args:
        run: The run folder, owned by the caller.
        change: Function that changes the record in place.
    """
    with _CHANGING:
        record = run.read_record()
        change(record)
        write_json(run.record, record)


def end_attempt(run: RunDir, outcome: dict[str, Any]) -> None:
    """Notes how the last attempt ended (exit code, reason, step)."""
    add_to_attempt(run, {"ended": _now(), **outcome})


def add_to_attempt(run: RunDir, facts: dict[str, Any], *, once: bool = False) -> None:
    """Adds facts to the last attempt in run.json. Any thread may.

    Args:
        run: The run folder, owned by the caller.
        facts: To add; they replace those of the same names.
        once: Where the attempt has them already, whatever they are, they stay.
    """
    with _CHANGING:
        record = run.read_record()
        attempt = record["attempts"][-1]
        if not (once and facts.keys() <= attempt.keys()):
            attempt |= facts
            write_json(run.record, record)
