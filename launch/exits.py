"""How the ranks of a start began and ended: a small file each, as torchrun and its like return 1 whatever a rank did.

exits/task-00001.json   {}   of each task of the step, once a signal does not end it any more
exits/rank-00003.json   {"rank": 3, "host": "n2", "code": 65, "said": "..."}   of rank 0, and of those that failed
exits/node-00001.json   of a node on which the launcher failed before any of its ranks could
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.outcome import describe_failure, find_cause, job_code
from pretrain.errors import EXIT_UNAVAILABLE, DiskError
from pretrain.utils.io import make_dir, write_json


@dataclass(frozen=True, slots=True)
class Ending:
    """How a step ended.

    Attributes:
        code: Of the job.
        reason: One line; empty where nothing failed.
        ranks_began: Whether any rank was started, as far as is known.
    """

    code: int
    reason: str
    ranks_began: bool


def note_task(folder: Path, task: int) -> None:
    """Notes that a task of the step holds signals back: one that comes from now on reaches its ranks."""
    _note(_task_path(folder, task), {})


def are_ready(folder: Path, num_tasks: int) -> bool:
    """Returns whether all tasks of a step have noted that."""
    return all(_task_path(folder, task).exists() for task in range(num_tasks))


def _task_path(folder: Path, task: int) -> Path:
    return folder / f"task-{task:05d}.json"


def note_rank(folder: Path, rank: int, host: str, code: int, said: str) -> None:
    """Notes how a rank ended. A disk that refuses costs the reason, not the run."""
    _note(folder / f"rank-{rank:05d}.json", {"rank": rank, "host": host, "code": code, "said": said})


def note_node(folder: Path, number: int, host: str, said: str) -> None:
    """Notes that the launcher of a node failed by itself."""
    _note(folder / f"node-{number:05d}.json", {"host": host, "said": said})


def _note(path: Path, value: Mapping[str, Any]) -> None:
    with contextlib.suppress(DiskError):
        make_dir(path.parent)
        write_json(path, dict(value))


def _read(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """Returns the files of a folder in the order in which they were written, by the clock of the file system."""
    found = []
    for path in folder.glob(pattern) if folder.is_dir() else []:
        with contextlib.suppress(OSError, ValueError):
            found.append((path.stat().st_mtime_ns, path.name, json.loads(path.read_text(encoding="utf-8"))))
    return [value for _, _, value in sorted(found, key=lambda item: item[:2])]


def failed_ranks(folder: Path) -> dict[int, int]:
    """Returns the code of each rank that has noted one, in the order in which they ended."""
    return {int(row["rank"]): int(row["code"]) for row in _read(folder, "rank-*.json")}


def read_ending(folder: Path, step_code: int) -> Ending:
    """Returns how a step ended.

    Args:
        folder: Of its notes.
        step_code: What srun returned: all that is known where nobody could note anything.
    """
    rows = {int(row["rank"]): row for row in _read(folder, "rank-*.json")}
    ended = {rank: int(row["code"]) for rank, row in rows.items()}
    cause = find_cause(ended)
    if cause is not None:
        row = rows[cause[0]]
        said = row["said"] if cause[1] >= 0 else ""
        return Ending(job_code(cause, ended), said or describe_failure(*cause, row["host"]), True)
    if ended and (step_code == 0 or job_code(None, ended)):
        return Ending(job_code(None, ended), "", True)
    for row in _read(folder, "node-*.json"):
        return Ending(EXIT_UNAVAILABLE, f"on {row['host']}: {row['said']}", False)
    return Ending(step_code or 1, f"the ranks ended without a word (srun: exit code {step_code})", True)
