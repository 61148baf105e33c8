"""Journal of the Slurm jobs of a run, `launch/journal.jsonl`: submissions, starts and ends.

    {"event": "submit", "chain": .., "job": "123", "array": null, "at": ..}
    {"event": "start", "chain": .., "job": "123", "array": null, "restart": 2, "nodes": [..],
     "world_size": 2, "step": 40, "at": ..}
    {"event": "end", "chain": .., "job": "123", "restart": 2, "exit_code": 75, "reason": ..,
     "step": 80, "decision": "requeue", "failed_node": "n2", "at": ..}

A start without an end was killed with its node. `step`: of the newest checkpoint then, or 0.
`decision`: requeue (the job itself), next (the next job of the same chain continues), end.
`failed_node`: where a rank was killed, if one was.
"""

import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pretrain.run.folder import RunDir
from pretrain.utils.io import append_line, make_dir
from pretrain.utils.safe_read import MAX_RECORD_BYTES, check_fields, parse_json, read_bounded

_FIELDS = {
    "event": str, "chain": str, "job": str, "array": str, "restart": int, "nodes": list, "world_size": int,
    "step": int, "at": str, "exit_code": int, "reason": str, "decision": str,
    "failed_node": str,
}  # fmt: skip

MAX_NODE_FAILURES = 2
"""Failures of a chain on a node, after which its jobs, and those of a resubmission, do without that node."""


def journal_path(run: RunDir) -> Path:
    """Returns the file."""
    return run.launch / "journal.jsonl"


def mark_of_cancel(run: RunDir) -> Path:
    """Returns the file that exists from a cancellation to the next submission."""
    return run.launch / "cancelled"


def read_journal(run: RunDir) -> list[dict[str, Any]]:
    """Returns the rows, oldest first, without lines that a crash has torn."""
    try:
        text = read_bounded(journal_path(run), MAX_RECORD_BYTES).decode(errors="replace")
    except OSError:
        return []
    rows = []
    for line in text.splitlines():
        try:
            row = check_fields(parse_json(line), _FIELDS)
        except ValueError:
            continue
        if row.get("event") in ("submit", "start", "end"):
            rows.append(row)
    return rows


def append_row(run: RunDir, row: dict[str, Any]) -> None:
    """Adds a row, durably, with the time. Raises: DiskError."""
    make_dir(run.launch)
    row = {**row, "at": datetime.now(UTC).isoformat(timespec="seconds")}
    append_line(journal_path(run), json.dumps(row).encode())


def count_idle_restarts(rows: list[dict[str, Any]], chain: str, step: int) -> int:
    """Returns the restarts in a row, the last start included, since the checkpoint of `step`."""
    starts = [row for row in rows if row["event"] == "start" and row.get("chain") == chain]
    steps = [int(row["step"]) for row in starts]
    ends = [*steps, step][1:]
    idle = 0
    for before, after in zip(reversed(steps), reversed(ends), strict=True):
        if after > before:
            return idle
        idle += 1
    return max(0, idle - 1)


def last_end(rows: list[dict[str, Any]], chain: str) -> dict[str, Any] | None:
    """Returns the newest row of an end in a chain."""
    ends = [row for row in rows if row["event"] == "end" and row.get("chain") == chain]
    return ends[-1] if ends else None


def find_failing_nodes(rows: list[dict[str, Any]], chain: str) -> list[str]:
    """Returns the nodes on which a rank of a chain was killed `MAX_NODE_FAILURES` times."""
    failed = Counter(row.get("failed_node") for row in rows if row.get("chain") == chain)
    return sorted(node for node, count in failed.items() if node and count >= MAX_NODE_FAILURES)


def job_of(row: dict[str, Any]) -> str:
    """Returns the id of a row's job, `job_task` for an element of an array."""
    return str(row.get("array") or row.get("job") or "")


def jobs_without_work(rows: list[dict[str, Any]]) -> set[str]:
    """Returns the jobs of chains that ended before these jobs began: all that they do is say so."""
    ended = {row.get("chain") for row in rows if row["event"] == "end" and row.get("decision") == "end"}
    submitted = {job_of(row) for row in rows if row["event"] == "submit" and row.get("chain") in ended}
    return submitted - {job_of(row) for row in rows if row["event"] == "start"}
