"""State of a run and its starts, from its folder, under Slurm or not. Read-only.

    run.json               attempts: entries of rank 0 at their begin and end
    launch/journal.jsonl   submissions, starts and ends of a Slurm job, also if no rank came to life
    lease/                 a heartbeat: a process works on the run
    metrics.jsonl          the last step, its loss and speed
    checkpoints/           the newest committed step

Files may be half written or missing: unreadable facts are unknown.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pretrain.config.yaml_nodes import read_yaml
from pretrain.errors import EXIT_DATA, EXIT_LOCKED, EXIT_OK, EXIT_RESUME_ME, EXIT_USAGE, EXITS_INTERRUPTED, ConfigError
from pretrain.run.folder import RECOVERY, RunDir
from pretrain.run.owner import Owner, live_owner
from pretrain.run.rank_notes import RANKS
from pretrain.utils.safe_read import check_fields, open_file, parse_json, read_json
from pretrain_launch.journal import job_of, jobs_without_work, mark_of_cancel, read_journal
from pretrain_launch.logs import last_lines, newest_log
from pretrain_launch.slurm_tools import SlurmJob, find_jobs, job_end

MAX_DEPTH = 4  # of the search for runs below a folder
_TAIL_BYTES = 1 << 16
_FAILURES = {"FAILED", "NODE_FAIL", "BOOT_FAIL", "TIMEOUT", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE"}
_INTERRUPTED = (EXIT_RESUME_ME, *EXITS_INTERRUPTED)
_ENDING = ("ended", "exit_code", "reason")
_START: dict[str, Any] = {
    **dict.fromkeys(("job", "restart", "nodes", "world_size", "from_step", "started", *_ENDING, RECOVERY, RANKS)),
    "is_refused": False,
    "is_at_work": False,
}


def merge_starts(attempts: list[dict[str, Any]], journal: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns every start of a run once: attempts of rank 0, and starts of a job without a rank.

    A start that `is_refused` changed nothing: its config or data were refused, or another one
    owned the run.
    """
    starts: list[dict[str, Any]] = []
    by_key: dict[tuple[Any, Any], dict[str, Any]] = {}
    for row in journal:
        key = (row.get("job"), row.get("restart"))
        if row.get("event") == "start":
            facts = {name: row.get(name) for name in ("restart", "nodes", "world_size")}
            facts |= {"job": job_of(row), "from_step": row.get("step"), "started": row.get("at")}
            by_key[key] = {**_START, **facts}
            starts.append(by_key[key])
        elif row.get("event") == "end" and key in by_key:
            by_key[key] |= {name: row.get(name) for name in ("exit_code", "reason")}
            by_key[key]["ended"] = row.get("at")
            by_key[key]["is_refused"] = row.get("exit_code") in (EXIT_USAGE, EXIT_DATA, EXIT_LOCKED)
    for attempt in attempts:
        slurm = attempt.get("slurm") or {}
        start = by_key.get((slurm.get("job"), slurm.get("restart")))
        if start is None:
            facts = {"nodes": [attempt.get("host")], "started": attempt.get("started")}
            start = {**_START, **facts}
            starts.append(start)
        # An exit code of the journal is the driver's, which knows that of rank 0.
        names = ("world_size", "from_step", RECOVERY, RANKS, *(_ENDING if start["exit_code"] is None else ()))
        start |= {name: attempt[name] for name in names if attempt.get(name) is not None}
        # Of the lease; any other code is that of training.
        start["is_refused"] = start["exit_code"] == EXIT_LOCKED
    return sorted(starts, key=lambda start: _instant(start["started"]))


def effective(starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the starts that tell how a run is: those that were not refused, where there are any."""
    return [start for start in starts if not start["is_refused"]] or starts


def _instant(text: str | None) -> datetime:
    with contextlib.suppress(TypeError, ValueError):
        return datetime.fromisoformat(text or "").astimezone(UTC)
    return datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run as it is now."""

    path: Path
    name: str
    state: str  # new, queued, running, ending, done, stopped, cancelled, failed, lost (without record)
    step: int  # last step written
    total_steps: int | None
    loss: float | None  # of the last row of metrics
    tokens_per_s: float | None  # of the last row of metrics
    images_per_s: float | None  # of a run over images
    checkpoint_step: int | None  # newest committed checkpoint
    checkpoint_age_s: float | None  # since its commit
    best: dict[str, Any] | None  # best checkpoint by `checkpoint.best`: metric, value and step
    job: str | None  # last Slurm job, `job_task` for an element of an array
    queue: list[SlurmJob]  # jobs that wait or run in Slurm, running ones first
    limit_s: float | None  # time limit of a job, as last submitted
    signal_s: float | None  # before that limit, to ask for a save
    slurm_answers: bool
    restarts: int  # starts beyond the first, without refused ones and recoveries
    recoveries: int  # starts that took the place of one with a lost rank, in the same job
    exit_code: int | None  # of the last start that was not refused; None: it works, or was lost
    reason: str | None  # of that exit
    damage: str | None  # of run.json: the facts are those of the other files
    owner: str | None  # current owner of the run
    starts: list[dict[str, Any]]  # every start, oldest first
    submitted: str | None  # time of the last submission to Slurm
    log: str | None  # newest log that is there, of the Slurm job or of rank 0

    @property
    def is_over(self) -> bool:
        """Whether the run is over: nothing continues without a new command."""
        return self.state not in ("new", "queued", "running", "ending")

    def facts(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return {**asdict(self), "path": str(self.path)}


def is_run(path: Path) -> bool:
    """Returns whether a folder has a run that has begun or was submitted."""
    return (path / "run.json").is_file() or (path / "launch" / "spec.json").is_file()


def find_runs(folder: Path) -> list[Path]:
    """Returns the run folders at and below `folder`, by name, without searching in run folders."""
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

    Files are read after Slurm has answered: they tell the end of a job that it no longer knows.
    """
    while True:
        asked = _jobs_in(folders)
        queue = find_jobs(asked)
        runs = [_read_facts(RunDir(folder), queue) for folder in folders]
        if _jobs_in(folders) <= asked:  # else one was submitted meanwhile
            return runs


def read_run(folder: Path) -> RunFacts:
    """Returns the facts of one run."""
    return read_runs([folder])[0]


def log_line(folder: Path) -> str:
    """Returns when a run without a log will have one, or why it will not; empty without a job of Slurm."""
    facts = read_run(folder)
    if facts.queue:
        job = facts.queue[0]
        return f"job {job.element} is {job.state} ({job.reason}), and makes it as it starts"
    return f"the run is {facts.state}: {facts.reason or f'job {facts.job} is not in the queue'}" if facts.job else ""


def queued_line(folder: Path) -> str:
    """Returns a warning about the jobs of a run that Slurm still knows; empty where there are none."""
    jobs = [job.element for job in read_run(folder).queue]
    if not jobs:
        return ""
    text = f"job {', '.join(jobs)} of this run is in the queue"
    first = f"cancel it first: pretrain launch cancel {folder}"
    then = f"afterwards: pretrain launch resubmit {folder}"
    return f"warning: {text}, and ends (73) if it finds the run in use; {first}; {then}"


def _jobs_in(folders: list[Path]) -> set[str]:
    return {job for folder in folders for job in _jobs_of(read_journal(RunDir(folder)))}


def _jobs_of(journal: list[dict[str, Any]]) -> list[str]:
    """Returns the jobs of a run, each once, in the order of their submissions."""
    begun = [row for row in journal if row.get("event") in ("submit", "start")]
    return list(dict.fromkeys(job for row in begun if (job := job_of(row))))


@dataclass(frozen=True, slots=True)
class _Evidence:
    """Evidence of the state of a run."""

    run: RunDir
    record: dict[str, Any]  # run.json
    damage: str | None  # of it
    journal: list[dict[str, Any]]
    starts: list[dict[str, Any]]  # every one, oldest first
    jobs: list[str]  # of Slurm, in the order of their submissions
    queue: list[SlurmJob]  # those that wait or run, running ones first
    slurm_answers: bool
    owner: Owner | None


def _gather(run: RunDir, queue: dict[str, SlurmJob] | None) -> _Evidence:
    """Reads the files of a run; `queue` is the answer of Slurm, None without one."""
    record: dict[str, Any] = {}
    damage = None
    try:
        if run.exists():
            record = run.read_record()
    except ConfigError as error:
        damage = error.what
    journal = read_journal(run)
    jobs = _jobs_of(journal)
    answer = queue or {}
    queued = sorted((answer[job] for job in jobs if job in answer), key=lambda job: job.is_waiting)
    owner = live_owner(run.lease)
    own_jobs = {str(row.get("job")) for row in journal}
    is_ours = owner is not None and owner.job.partition("@")[0] in own_jobs
    if is_ours and queue is not None and all(job.is_waiting for job in queued):
        owner = None  # its job is over, and has not released the run: it was killed
    starts = merge_starts(record.get("attempts", []), journal)
    return _Evidence(run, record, damage, journal, starts, jobs, queued, queue is not None, owner)


def _mark_work(seen: _Evidence) -> None:
    """Marks the starts at which a process works: the last one of the running job, and of the owner."""
    numbers = [job.element for job in seen.queue[:1] if not job.is_waiting]
    if seen.owner is not None:
        numbers.append(seen.owner.job.partition("@")[0])  # empty for a local process
    for number in numbers:
        open_starts = [start for start in seen.starts if start["exit_code"] is None and (start["job"] or "") == number]
        for start in open_starts[-1:]:
            start["is_at_work"] = True


def _read_facts(run: RunDir, queue: dict[str, SlurmJob] | None) -> RunFacts:
    """Combines the files of a run with the answer of Slurm; None without one."""
    seen = _gather(run, queue)
    _mark_work(seen)
    counted = effective(seen.starts)
    recoveries = sum(start[RECOVERY] is not None for start in counted)
    end = counted[-1] if counted else {}
    state = _state_of_work(seen)
    if state is None:
        state, end = _state_of_end(seen, end)
    spec = _read_json(run.launch / "spec.json")
    metrics = _last_values(run.metrics, "loss", "tokens_per_s", "images_per_s")
    checkpoint_step, checkpoint_age_s = _newest_checkpoint(run)
    submissions = [row.get("at") for row in seen.journal if row["event"] == "submit"]
    jobs = [job.element for job in seen.queue[:1]] or seen.jobs[-1:]
    log = newest_log(run)
    return RunFacts(
        path=run.path,
        name=str(seen.record.get("name") or spec.get("name") or run.path.name),
        state=state,
        step=run.last_step(),
        total_steps=_total_steps(run),
        loss=_number(metrics.get("loss")),
        tokens_per_s=_number(metrics.get("tokens_per_s")),
        images_per_s=_number(metrics.get("images_per_s")),
        checkpoint_step=checkpoint_step,
        checkpoint_age_s=checkpoint_age_s,
        best=_best_checkpoint(run),
        job=next(iter(jobs), None),
        queue=seen.queue,
        limit_s=_number(spec.get("time_s")),
        signal_s=_number(spec.get("signal_s")),
        slurm_answers=seen.slurm_answers,
        restarts=max(0, len(counted) - 1 - recoveries),
        recoveries=recoveries,
        exit_code=end.get("exit_code"),
        reason=end.get("reason"),
        damage=seen.damage,
        owner=str(seen.owner) if seen.owner else None,
        starts=seen.starts,
        submitted=next(reversed(submissions), None),
        log=str(log) if log.is_file() else None,
    )


def _state_of_work(seen: _Evidence) -> str | None:
    """Returns the state of a run that a process works on, or that waits in the queue; None of others."""
    job = next(iter(seen.queue), None)
    if job is not None and job.state == "COMPLETING":
        return "ending"
    if seen.owner is not None or (job is not None and not job.is_waiting):
        return "running"
    return None if job is None else "queued"


def _state_of_end(seen: _Evidence, end: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns state and end of another run by the first evidence that there is.

    `end` is the last start that was not refused, empty without one.
    """
    code = end.get("exit_code")
    if seen.slurm_answers and (early := _end_before_start(seen.run, seen.journal, seen.jobs)) is not None:
        return early
    if code == EXIT_OK and (step := _rolled_back_to(seen.record, end)) is not None:
        return "stopped", {"exit_code": None, "reason": f"rolled back to step {step}"}
    if code == EXIT_OK:
        return "done", end
    if _is_cancelled(seen, end):
        return "cancelled", end
    if not end and not seen.jobs:
        return "new", end
    if not end and not seen.slurm_answers:
        return "queued", end
    if code is None:
        return "lost", end
    if code in _INTERRUPTED:
        return "stopped", end
    return "failed", end


def _is_cancelled(seen: _Evidence, end: dict[str, Any]) -> bool:
    """Returns whether a run was cancelled, by its mark, its last end, or the output of its last job."""
    if mark_of_cancel(seen.run).exists() or str(end.get("reason")).startswith("cancelled"):
        return True
    # With a short KillWait the driver is killed before it has written that it was a cancellation.
    is_cut = end.get("exit_code") in (None, *_INTERRUPTED)
    return is_cut and seen.slurm_answers and any(_was_cancelled(seen.run, job) for job in seen.jobs[-1:])


def _end_before_start(run: RunDir, journal: list[dict[str, Any]], jobs: list[str]) -> tuple[str, dict[str, Any]] | None:
    """Returns state and end of a run whose last job has ended before its driver wrote a start; None if unknown."""
    begun = {job_of(row) for row in journal if row["event"] == "start"} | jobs_without_work(journal)
    if not jobs or jobs[-1] in begun:
        return None
    job = jobs[-1]
    path = run.logs / f"slurm-{job}.out"
    lines = last_lines(path, 20)[0].splitlines() if path.is_file() else []
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    state, why, code = job_end(job) or ("", "", None)
    if state == "CANCELLED":
        return "cancelled", {"exit_code": None, "reason": f"job {job} was cancelled before it began"}
    if state in _FAILURES:
        parts = [f"job {job} ended before the run began: {state}", *([why] if why != "None" else []), said]
        return "failed", {"exit_code": code, "reason": ", ".join(filter(None, parts))}
    if said and not begun and not _was_cancelled(run, job):
        return "lost", {"exit_code": None, "reason": said}
    return None


def _was_cancelled(run: RunDir, job: str) -> bool:
    """Returns whether the output of a job ends with Slurm's word that a user has cancelled it."""
    path = run.logs / f"slurm-{job}.out"
    text = last_lines(path, 20)[0] if path.is_file() else ""
    # Others are "CANCELLED AT ... DUE TO TIME LIMIT", to preemption, to a node's failure.
    return any(f"JOB {job} " in line and "CANCELLED" in line and "DUE TO" not in line for line in text.splitlines())


def _rolled_back_to(record: dict[str, Any], ended: dict[str, Any]) -> int | None:
    """Returns the step to which a run was rolled back after its last start; None if it was not."""
    with contextlib.suppress(LookupError, TypeError, ValueError):
        last = record["rollbacks"][-1]
        if not last["automatic"] and _instant(last["at"]) >= _instant(ended["ended"]):
            return int(last["to"])
    return None


def last_save_s(run: RunDir) -> float | None:
    """Returns the seconds that the run's last save, and upload, took; None if unknown."""
    row = _last_values(run.metrics, "checkpoint_write_s")
    written = _number(row.get("checkpoint_write_s"))
    return None if written is None else written + (_number(row.get("checkpoint_upload_s")) or 0.0)


def _newest_checkpoint(run: RunDir) -> tuple[int, float] | tuple[None, None]:
    """Returns step and age in seconds of the newest committed checkpoint."""
    with contextlib.suppress(OSError):
        if step := run.newest_step():
            written = (run.checkpoints / f"step-{step:08d}" / "manifest.json").stat().st_mtime
            return step, max(0.0, time.time() - written)
    return None, None


def _best_checkpoint(run: RunDir) -> dict[str, Any] | None:
    """Returns the values of best.json if its checkpoint exists."""
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        raw = check_fields(_read_json(run.checkpoints / "best.json"), {"step": int})
        step = raw["step"]
        if (run.checkpoints / f"step-{step:08d}" / "manifest.json").is_file():
            return {"metric": str(raw["metric"]), "value": float(raw["value"]), "step": step}
    return None


def _changed_at(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _total_steps(run: RunDir) -> int | None:
    # A submitted config is newer than the run's, until its ranks begin.
    for path in sorted((run.config, run.launch / "config.yaml"), key=_changed_at, reverse=True):
        with contextlib.suppress(ConfigError, ValueError, KeyError):
            return check_fields(read_yaml(path).values["train"], {"steps": int})["steps"]
    return None


def _read_json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        value = read_json(path)
        return value if isinstance(value, dict) else {}
    return {}


def _last_values(path: Path, *names: str) -> dict[str, Any]:
    """Returns the last value of each name in a file of JSON lines, whose rows may lack some."""
    values: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError), open_file(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for line in reversed(file.read().split(b"\n")[:-1]):
            row = parse_json(line)
            values = {**row, **values} if isinstance(row, dict) else values
            if values.keys() >= set(names):
                break
    return values


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None
