"""State of runs and their starts, from run folders and Slurm."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pretrain.errors import EXIT_OK, EXIT_RESUME_ME
from pretrain.run.folder import RunDir
from pretrain.run.owner import LEASE_S, Owner, find_owner, highest_number, is_alive, path_of, this_process
from pretrain_launch.journal import mark_of_cancel, newest_step, read_journal
from pretrain_launch.slurm_tools import SlurmJob, find_jobs

_EMPTY = dict.fromkeys(
    ("job", "restart", "nodes", "world_size", "from_step", "started", "ended", "exit_code", "reason")
)
"""Fields of a start."""


def merge_starts(attempts: list[dict[str, Any]], journal: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns every start of a run once: attempts that rank 0 noted, and starts of a job in which none came to life."""
    starts: list[dict[str, Any]] = []
    by_key: dict[tuple[Any, Any], dict[str, Any]] = {}
    for row in journal:
        key = (row.get("job"), row.get("restart"))
        if row.get("event") == "start":
            starts.append(_start_of_row(row))
            by_key[key] = starts[-1]
        elif row.get("event") == "end" and key in by_key:
            by_key[key] |= {"ended": row.get("at"), "exit_code": row.get("exit_code"), "reason": row.get("reason")}
    for attempt in attempts:
        slurm = attempt.get("slurm") or {}
        start = by_key.get((slurm.get("job"), slurm.get("restart")))
        if start is None:
            start = {**_EMPTY, "nodes": [attempt.get("host")], "started": attempt.get("started")}
            starts.append(start)
        names = ["world_size", "from_step"]
        if start["exit_code"] is None:  # else the driver has said what rank 0 said, and what it made of it
            names += ["ended", "exit_code", "reason"]
        start |= {name: attempt[name] for name in names if attempt.get(name) is not None}
    return sorted(starts, key=lambda start: _instant(start["started"]))


def _start_of_row(row: dict[str, Any]) -> dict[str, Any]:
    known = {"job": job_of(row), "restart": row.get("restart"), "nodes": row.get("nodes"), "started": row.get("at")}
    return {**_EMPTY, **known, "world_size": row.get("world_size"), "from_step": row.get("step")}


def job_of(row: dict[str, Any]) -> str:
    """Returns the id of a journal row's job, `job_task` for an element of an array; empty where there is none."""
    return str(row.get("array") or row.get("job") or "")


def _instant(text: str | None) -> datetime:
    with contextlib.suppress(TypeError, ValueError):
        return datetime.fromisoformat(text).astimezone(UTC)  # type: ignore[arg-type]
    return datetime.fromtimestamp(0, UTC)


# State of a run from its folder, under Slurm or not. Read-only.
#
#     run.json               attempts: what rank 0 wrote when it began and ended
#     launch/journal.jsonl   submissions, starts and ends of a Slurm job, also where no rank came to life
#     lease/                 a heartbeat: somebody works here now
#     metrics.jsonl          the last step, its loss and speed
#     checkpoints/           the newest committed step
#
# Files may be half written or missing: what cannot be read is unknown.


MAX_DEPTH = 4

"""Depth of the search for runs below a folder."""

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run as it is now.

    Attributes:
        path: The run folder.
        name: Name of the run.
        state: new, queued, running, ending, done, stopped, cancelled, failed, or lost (ended without a record).
        step: Last step written.
        total_steps: Steps of the run.
        loss: Loss in the last row of metrics.
        tokens_per_s: Speed in the last row of metrics.
        checkpoint_step: Step of the newest committed checkpoint.
        checkpoint_age_s: Seconds since its commit.
        best: Best checkpoint by `checkpoint.best`: metric, value and step.
        job: Id of the last Slurm job, `job_task` for an element of an array.
        queue: Jobs of the run that wait or run in Slurm, running ones first.
        slurm_answers: Whether Slurm answered.
        restarts: Starts beyond the first.
        exit_code: Exit code of the last start that ended.
        reason: Reason of that exit.
        owner: Current owner of the run.
        starts: Every start, oldest first.
    """

    path: Path
    name: str
    state: str
    step: int
    total_steps: int | None
    loss: float | None
    tokens_per_s: float | None
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    best: dict[str, Any] | None
    job: str | None
    queue: list[SlurmJob]
    slurm_answers: bool
    restarts: int
    exit_code: int | None
    reason: str | None
    owner: str | None
    starts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether the run is over: nothing continues without a new command."""
        return self.state not in ("new", "queued", "running", "ending")

    def facts(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"path": str(self.path), "queue": [job.facts() for job in self.queue]}


def is_run(path: Path) -> bool:
    """Returns whether a folder is that of a run that has begun or was submitted."""
    return (path / "run.json").is_file() or (path / "launch" / "spec.json").is_file()


def find_runs(folder: Path) -> list[Path]:
    """Returns the run folders at and below `folder`, by name; what lies in a run folder is not looked at."""
    return sorted(_walk(folder, MAX_DEPTH))


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        with contextlib.suppress(OSError):
            for child in folder.iterdir():
                if child.is_dir() and not child.is_symlink():
                    yield from _walk(child, depth - 1)


def read_runs(folders: list[Path]) -> list[RunFacts]:
    """Returns the facts of runs, with one question to Slurm for all of them.

    Files are read after Slurm has answered: of a job that it knows no more, they tell the end by then.
    """
    jobs = {job for folder in folders for job in _jobs_in(read_journal(RunDir(folder)))}
    while True:
        asked, queue = jobs, find_jobs(jobs)
        read = [_RunFiles(RunDir(folder)) for folder in folders]
        jobs = {job for run in read for job in run.jobs}
        if jobs <= asked:  # else one was submitted meanwhile
            return [run.facts(queue) for run in read]


def read_run(folder: Path) -> RunFacts:
    """Returns the facts of one run."""
    return read_runs([folder])[0]


def _jobs_in(journal: list[dict[str, Any]]) -> list[str]:
    """Returns the jobs of a run, each once, in the order of their submissions."""
    begun = [row for row in journal if row.get("event") in ("submit", "start")]
    return list(dict.fromkeys(job for row in begun if (job := job_of(row))))


class _RunFiles:
    """Contents of the files of a run."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.record = _read_json(run.record)
        self.journal = read_journal(run)
        self.spec = _read_json(run.launch / "spec.json")
        self.starts = merge_starts(self.record.get("attempts", []), self.journal)
        self.jobs = _jobs_in(self.journal)

    def facts(self, queue: dict[str, SlurmJob] | None) -> RunFacts:
        """Puts it together with what Slurm says; None where it says nothing."""
        queued = sorted((queue[job] for job in self.jobs if queue and job in queue), key=lambda job: job.is_waiting)
        job = queued[0] if queued else None
        owner = live_owner(self.run)
        is_ours = owner is not None and owner.job.partition("@")[0] in {str(row.get("job")) for row in self.journal}
        if is_ours and queue is not None and all(other.is_waiting for other in queued):
            owner = None  # its job is over, and has not released the run: it was killed
        last_job = (job.element if job else None) or (self.jobs[-1] if self.jobs else None)
        ended = next((start for start in reversed(self.starts) if start["exit_code"] is not None), None)
        metrics = _last_values(self.run.metrics, "step", "loss", "tokens_per_s")
        checkpoint = _newest_checkpoint(self.run)
        steps = [
            metrics.get("step"),
            _last_values(self.run.audit, "step").get("step"),
            checkpoint[0] if checkpoint else None,
        ]
        return RunFacts(
            path=self.run.path,
            name=str(self.record.get("name") or self.spec.get("name") or self.run.path.name),
            state=self._state(job, owner, is_known=queue is not None),
            step=max((step for step in steps if isinstance(step, int)), default=0),
            total_steps=_total_steps(self.run),
            loss=_number(metrics.get("loss")),
            tokens_per_s=_number(metrics.get("tokens_per_s")),
            checkpoint_step=checkpoint[0] if checkpoint else None,
            checkpoint_age_s=checkpoint[1] if checkpoint else None,
            best=_best_checkpoint(self.run),
            job=last_job,
            queue=queued,
            slurm_answers=queue is not None,
            restarts=max(0, len(self.starts) - 1),
            exit_code=ended["exit_code"] if ended else None,
            reason=ended["reason"] if ended else None,
            owner=str(owner) if owner else None,
            starts=self.starts,
        )

    def _state(self, job: SlurmJob | None, owner: Owner | None, *, is_known: bool) -> str:
        last = self.starts[-1] if self.starts else None
        if job is not None and not job.is_waiting:
            return "ending" if job.state == "COMPLETING" else "running"
        if owner is not None:
            return "running"
        if job is not None:
            return "queued"
        if last is not None and last["exit_code"] == EXIT_OK:
            return "done"
        if mark_of_cancel(self.run).exists() or str(last and last["reason"]).startswith("cancelled"):
            return "cancelled"
        if last is None:
            return "queued" if self.jobs and not is_known else "lost" if self.jobs else "new"
        if last["exit_code"] is None:
            return "lost"
        return "stopped" if last["exit_code"] == EXIT_RESUME_ME else "failed"


def last_save_s(run: RunDir) -> float | None:
    """Returns how long the run's last save took to be written; None where none is known of."""
    return _number(_last_values(run.metrics, "checkpoint_write_s").get("checkpoint_write_s"))


def live_owner(run: RunDir) -> Owner | None:
    """Returns the process that works on a run, None where none has given a sign of life for a minute."""
    with contextlib.suppress(OSError):
        number = highest_number(run.lease)
        found = find_owner(path_of(run.lease, number)) if number else None
        if found and found.owner and not found.owner.released:
            is_young = time.time() - found.heartbeat_ns / 1e9 < LEASE_S
            if is_young and not (found.owner.machine == this_process().machine and not is_alive(found.owner)):
                return found.owner
    return None


def _newest_checkpoint(run: RunDir) -> tuple[int, float] | None:
    """Returns step and age in seconds of the newest committed checkpoint."""
    with contextlib.suppress(OSError):
        if step := newest_step(run):
            written = (run.checkpoints / f"step-{step:08d}" / "manifest.json").stat().st_mtime
            return step, max(0.0, time.time() - written)
    return None


def _best_checkpoint(run: RunDir) -> dict[str, Any] | None:
    """Returns what best.json says, where its checkpoint is there."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        raw = _read_json(run.checkpoints / "best.json")
        best = {"metric": str(raw["metric"]), "value": float(raw["value"]), "step": int(raw["step"])}
        if (run.checkpoints / f"step-{best['step']:08d}" / "manifest.json").is_file():
            return best
    return None


def _total_steps(run: RunDir) -> int | None:
    import yaml

    for path in (run.config, run.launch / "config.yaml"):
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError, TypeError, KeyError):
            return int(yaml.safe_load(path.read_text(encoding="utf-8"))["train"]["steps"])
    return None


def _read_json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    return {}


def _last_values(path: Path, *names: str) -> dict[str, Any]:
    """Returns the last value of each name in the whole rows of a file of JSON lines; not every row has all."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for line in reversed(file.read().split(b"\n")[:-1]):
            row = json.loads(line)
            found = {**row, **found} if isinstance(row, dict) else found
            if found.keys() >= set(names):
                break
    return found


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
