"""Exit code and cause of a job, from the exit codes of its ranks; their record in run.json."""

import contextlib
import json
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import EXIT_HANG, EXIT_OK, EXIT_RESUME_ME, EXIT_UNAVAILABLE, DiskError, PretrainError
from pretrain.run.folder import RunDir, end_attempt
from pretrain.utils.io import make_dir, write_json

QUOTED_LINES = 20

_HINTS = {
    signal.SIGKILL: "the kernel's out-of-memory killer does that (see dmesg), or a user's kill -9",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGBUS: "a file that is mapped was cut, or /dev/shm or the disk is full",
    signal.SIGILL: "a package was built for another processor",
}


def find_cause(ended: Mapping[int, int]) -> tuple[int, int] | None:
    """Returns rank and code of the rank that the job failed of; None where none failed.

    Args:
        ended: The code of each rank that has ended, negative if by a signal; in the order in which they did.

    One that a signal ended comes first, then one that a second stop signal did, then other errors; those that only
    noticed that another was gone (76) come last. Of equals the first.
    """
    failed = [(rank, code) for rank, code in ended.items() if code not in (EXIT_OK, EXIT_RESUME_ME)]
    cause = min(failed, key=lambda item: (item[1] >= 0, item[1] <= 128, item[1] == EXIT_HANG), default=None)
    if cause is not None and cause[1] in (EXIT_HANG, EXIT_UNAVAILABLE) and EXIT_RESUME_ME in ended.values():
        return None  # one was asked to stop before it had anything to save, and the others lost it, or never met it
    return cause


def job_code(cause: tuple[int, int] | None, ended: Mapping[int, int]) -> int:
    """Returns the job's exit code."""
    if cause is None:
        return EXIT_RESUME_ME if EXIT_RESUME_ME in ended.values() else EXIT_OK
    return 128 - cause[1] if cause[1] < 0 else cause[1]


def describe_failure(rank: int, code: int, host: str | None = None) -> str:
    """Returns one line: which rank ended, where (None: here), how, and what that mostly means."""
    place = f"rank {rank} on {host or socket.gethostname()}"
    if code >= 0:
        return f"{place} failed with exit code {code}"
    hint = _HINTS.get(signal.Signals(-code))
    return f"{place} was killed by {signal.Signals(-code).name} (exit code {128 - code}){f': {hint}' if hint else ''}"


def read_end(output: Path) -> list[str]:
    """Returns the last lines that a rank printed."""
    with contextlib.suppress(OSError):
        return output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-QUOTED_LINES:]
    return []


def reason_of(cause: tuple[int, int], output: Path) -> str:
    """Returns the reason in one line: what the rank said, where it ended by itself and said something."""
    return (last_error(output) if cause[1] >= 0 else "") or describe_failure(*cause)


def last_error(output: Path) -> str:
    """Returns the last error that a rank printed, without the word; empty where there is none."""
    # A stack that follows an error is indented.
    said = [line[7:] for line in read_end(output) if line.startswith("error: ") and not line[7:8].isspace()]
    return said[-1] if said else ""


def note_outcome(run: RunDir, main_pid: int, code: int, reason: str, *, is_known: bool) -> None:
    """Writes into run.json how the attempt ended, where rank 0 could not, or knew only that another rank was gone.

    Args:
        run: The run folder.
        main_pid: Rank 0's process: an attempt of another process is left alone.
        code: The job's exit code.
        reason: Cause in one line.
        is_known: Whether what rank 0 has written stays, if it has written something.
    """
    with contextlib.suppress(PretrainError):
        attempt = run.read_record()["attempts"][-1]
        is_ours = (attempt.get("host"), attempt.get("pid")) == (socket.gethostname(), main_pid)
        if is_ours and not (is_known and "ended" in attempt):
            end_attempt(run, {"exit_code": code, "reason": reason})


# How the ranks of a start began and ended: a small file each, as torchrun and its like return 1
# whatever a rank did.
#
# exits/task-00001.json   {}   of each task of the step, once a signal does not end it any more
# exits/rank-00003.json   {"rank": 3, "host": "n2", "code": 65, "said": "..."}   of rank 0, and of those that failed
# exits/node-00001.json   of a node on which the launcher failed before any of its ranks could


@dataclass(frozen=True, slots=True)
class StepExit:
    """Outcome of a step.

    Attributes:
        code: Exit code of the job.
        reason: Cause in one line; empty if nothing failed.
        ranks_began: Whether any rank is known to have started.
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


def read_ending(folder: Path, step_code: int) -> StepExit:
    """Returns how a step ended.

    Args:
        folder: Folder of the notes.
        step_code: Exit code of srun, used if there are no notes.
    """
    rows = {int(row["rank"]): row for row in _read(folder, "rank-*.json")}
    ended = {rank: int(row["code"]) for rank, row in rows.items()}
    cause = find_cause(ended)
    if cause is not None:
        row = rows[cause[0]]
        said = row["said"] if cause[1] >= 0 else ""
        return StepExit(job_code(cause, ended), said or describe_failure(*cause, row["host"]), True)
    if ended and (step_code == 0 or job_code(None, ended)):
        return StepExit(job_code(None, ended), "", True)
    for row in _read(folder, "node-*.json"):
        return StepExit(EXIT_UNAVAILABLE, f"on {row['host']}: {row['said']}", False)
    return StepExit(step_code or 1, f"the ranks ended without a word (srun: exit code {step_code})", True)
