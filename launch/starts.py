"""The starts of a run, from what rank 0 noted (run.json) and what the driver of a Slurm job did (journal.jsonl)."""

import contextlib
from datetime import UTC, datetime
from typing import Any

_EMPTY = dict.fromkeys(
    ("job", "restart", "nodes", "world_size", "from_step", "started", "ended", "exit_code", "reason")
)
"""What is known of a start."""


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
