"""Exit code and cause of a job, from the exit codes of its ranks, and the record of both.

Ranks of a Slurm step leave small files, as torchrun and its like return 1 for any failure:

exits/ready-00003.json  of each rank, once there is a process that keeps a signal for it: {}
exits/rank-00003.json   of rank 0, and of failed ranks: {"rank", "host", "code", "said"}
exits/node-00001.json   of a node whose launcher failed before its ranks started: {"host", "said"}
"""

import contextlib
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pretrain.errors import (
    EXIT_HANG,
    EXIT_OK,
    EXIT_RESUME_ME,
    EXIT_UNAVAILABLE,
    EXITS_INTERRUPTED,
    DiskError,
    PretrainError,
)
from pretrain.run.folder import RunDir, end_attempt
from pretrain.utils.io import make_dir, write_json
from pretrain.utils.safe_read import parse_json

QUOTED_LINES = 20
SEARCHED_LINES = 200  # for an error, which the stacks of all threads may follow

_HINTS = {
    signal.SIGKILL: "the kernel's out-of-memory killer does that (see dmesg), or a user's kill -9",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGBUS: "a file that is mapped was cut, or /dev/shm or the disk is full",
    signal.SIGILL: "a package was built for another processor",
}


def find_cause(ended: Mapping[int, int]) -> tuple[int, int] | None:
    """Returns rank and code of the rank that caused the failure of a job; None without a failure.

    Args:
        ended: Code of each rank that has ended, negative for a signal; in the order of ends.
    """
    # Those of signals first, then of second stop signals, then errors, then lost peers (76). NCCL
    # aborts ranks that have lost one: an abort is the cause where it came before the errors.
    failed = [(rank, code) for rank, code in ended.items() if code not in (EXIT_OK, EXIT_RESUME_ME)]
    cause = min(failed, key=_precedence, default=None)
    if cause is not None and cause[1] in (EXIT_HANG, EXIT_UNAVAILABLE) and EXIT_RESUME_ME in ended.values():
        return None  # a rank was stopped before it could save, and the others lost it
    return cause


def _precedence(ended: tuple[int, int]) -> tuple[bool, bool, bool]:
    code = ended[1]
    return code >= 0 or code == -signal.SIGABRT, code <= 128, code == EXIT_HANG


def job_code(cause: tuple[int, int] | None, ended: Mapping[int, int]) -> int:
    """Returns the job's exit code."""
    if cause is None:
        return EXIT_RESUME_ME if EXIT_RESUME_ME in ended.values() else EXIT_OK
    return shell_code(cause[1])


def shell_code(code: int) -> int:
    """Returns the exit code of a process as a shell has it: 128 and the number of a signal."""
    return 128 - code if code < 0 else code


def describe_failure(rank: int, code: int, host: str | None = None) -> str:
    """Returns one line: rank, host (None: this one), exit code or signal, and its usual meaning."""
    place = f"rank {rank} on {host or socket.gethostname()}"
    if code in EXITS_INTERRUPTED:
        return f"interrupted by a second {signal.Signals(code - 128).name}, without a save"
    if code >= 0:
        return f"{place} failed with exit code {code}"
    number = signal.Signals(-code)
    hint = f": {_HINTS[number]}" if number in _HINTS else ""
    return f"{place} was killed by {number.name} (exit code {128 - code}){hint}"


def read_end(output: Path, most: int = QUOTED_LINES) -> list[str]:
    """Returns the last lines that a rank printed."""
    with contextlib.suppress(OSError):
        return output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-most:]
    return []


def reason_of(cause: tuple[int, int], output: Path) -> str:
    """Returns the last error of a rank that ended by itself, else its exit code in words."""
    return (last_error(output) if cause[1] >= 0 else "") or describe_failure(*cause)


def last_error(output: Path) -> str:
    """Returns the last error that a rank printed, without the word; empty without one."""
    # A stack that follows an error is indented.
    lines = read_end(output, SEARCHED_LINES)
    said = [line[7:] for line in lines if line.startswith("error: ") and not line[7:8].isspace()]
    return said[-1].removesuffix(", at:") if said else ""


def note_outcome(run: RunDir, main_pid: int, code: int, reason: str, *, is_known: bool) -> None:
    """Writes the end of the attempt of process `main_pid`, rank 0, into run.json.

    With `is_known`, an entry of rank 0 stays; else it only knew that another rank was gone.
    """
    with contextlib.suppress(PretrainError):
        attempt = run.read_record()["attempts"][-1]
        is_ours = (attempt.get("host"), attempt.get("pid")) == (socket.gethostname(), main_pid)
        if is_ours and not (is_known and "ended" in attempt):
            end_attempt(run, {"exit_code": code, "reason": reason})


@dataclass(frozen=True, slots=True)
class StepExit:
    """Outcome of a step."""

    code: int  # of the job
    reason: str  # one line; empty if nothing failed
    ranks_began: bool  # any rank is known to have started
    host: str = ""  # where a rank was killed; empty if none was


def note_exit(folder: Path, kind: Literal["ready", "rank", "node"], number: int, **facts: Any) -> None:
    """Writes a file of a rank or node, if the disk lets it."""
    with contextlib.suppress(DiskError):
        make_dir(folder)
        write_json(folder / f"{kind}-{number:05d}.json", facts)


def are_ready(folder: Path, num_ranks: int) -> bool:
    """Returns whether a signal to the step would reach every rank, and end no other process."""
    return all((folder / f"ready-{rank:05d}.json").exists() for rank in range(num_ranks))


def _read(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """Returns the files of a folder in the order of their writes."""
    ends = []
    for path in folder.glob(pattern) if folder.is_dir() else []:
        with contextlib.suppress(OSError, ValueError):
            value = parse_json(path.read_text(encoding="utf-8"))
            ends.append((path.stat().st_mtime_ns, path.name, value))
    return [value for _, _, value in sorted(ends, key=lambda item: item[:2])]


def noted_ranks(folder: Path) -> dict[int, int]:
    """Returns the code of each rank that has written one, in the order of their ends."""
    return {int(row["rank"]): int(row["code"]) for row in _read(folder, "rank-*.json")}


def read_ending(folder: Path, step_code: int, output: Path | None = None) -> StepExit:
    """Returns the outcome of a step from its files; without files from the exit code of srun.

    `output` is the log of the job, where rank 0 prints its error.
    """
    rows = {int(row["rank"]): row for row in _read(folder, "rank-*.json")}
    ended = {rank: int(row["code"]) for rank, row in rows.items()}
    cause = find_cause(ended)
    code = job_code(cause, ended)
    if cause is not None:
        row = rows[cause[0]]
        said = row["said"] if cause[1] >= 0 else ""
        if output is not None and cause[0] == 0 and cause[1] > 0:
            said = last_error(output)
        killed_on = row["host"] if cause[1] < 0 else ""
        return StepExit(code, said or describe_failure(*cause, row["host"]), True, killed_on)
    if ended and (step_code == 0 or code):
        return StepExit(code, "", True)
    for row in _read(folder, "node-*.json"):
        return StepExit(EXIT_UNAVAILABLE, f"on {row['host']}: {row['said']}", False)
    reason = f"the ranks ended without a word (srun: exit code {step_code})"
    return StepExit(step_code or 1, reason, True)
