"""Journal of the Slurm jobs of a run: `launch/journal.jsonl`, a row when one is submitted, starts or ends.

    {"event": "submit", "chain": .., "job": "123", "array": null, "at": ..}
    {"event": "start", "chain": .., "job": "123", "array": null, "restart": 2, "nodes": [..], "world_size": 2, "step": 40, "at": ..}
    {"event": "end", "chain": .., "job": "123", "restart": 2, "exit_code": 75, "reason": .., "step": 80, "decision": "requeue", "at": ..}

A start without an end was killed with its node. `step` is that of the newest checkpoint then, by the names of folders;
0 where there is none. `decision`: requeue (the job goes back into the queue), next (the next job of the same chain
continues), end.
"""  # noqa: E501 (rows as they are)

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pretrain.run.folder import RunDir
from pretrain.utils.io import append_line, make_dir

_CHECKPOINT = re.compile(r"step-(\d{8,})")


def journal_path(run: RunDir) -> Path:
    """Returns the file."""
    return run.launch / "journal.jsonl"


def mark_of_cancel(run: RunDir) -> Path:
    """Returns the file whose presence says that the user has cancelled the run's jobs, and submitted none since."""
    return run.launch / "cancelled"


def newest_step(run: RunDir) -> int:
    """Returns the step of the newest committed checkpoint, unverified; 0 where there is none."""
    if not run.checkpoints.is_dir():
        return 0
    matches = [(path, _CHECKPOINT.fullmatch(path.name)) for path in run.checkpoints.iterdir()]
    return max((int(match[1]) for path, match in matches if match and (path / "manifest.json").is_file()), default=0)


def read_journal(run: RunDir) -> list[dict[str, Any]]:
    """Returns the rows, oldest first; a line that a crash has torn is left out."""
    try:
        text = journal_path(run).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("event") in ("submit", "start", "end"):
            rows.append(row)
    return rows


def append_row(run: RunDir, row: dict[str, Any]) -> None:
    """Adds a row, durably, with the time. Raises: DiskError."""
    make_dir(run.launch)
    row = {**row, "at": datetime.now(UTC).isoformat(timespec="seconds")}
    append_line(journal_path(run), json.dumps(row).encode())


def count_idle_restarts(rows: list[dict[str, Any]], chain: str, step: int) -> int:
    """Returns how many restarts in a row, the last start included, have made no checkpoint.

    Args:
        rows: Rows of the journal.
        chain: Chain to count: a new submission starts from zero.
        step: Step of the newest checkpoint now.

    The first start of a chain is no restart.
    """
    steps = [int(row["step"]) for row in rows if row["event"] == "start" and row.get("chain") == chain]
    ends, idle = [*steps, step][1:], 0
    for before, after in zip(reversed(steps), reversed(ends), strict=True):
        if after > before:
            return idle
        idle += 1
    return max(0, idle - 1)


def last_end(rows: list[dict[str, Any]], chain: str) -> dict[str, Any] | None:
    """Returns the newest row of an end in a chain."""
    return next((row for row in reversed(rows) if row["event"] == "end" and row.get("chain") == chain), None)
