"""What became of a job, from how its ranks ended: which one is the cause, what to say of it, what run.json keeps."""

import contextlib
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from pretrain.errors import EXIT_HANG, EXIT_OK, EXIT_RESUME_ME, EXIT_UNAVAILABLE, PretrainError
from pretrain.run.folder import RunDir, end_attempt

QUOTED_LINES = 20

_HINTS = {
    signal.SIGKILL: "the kernel's out-of-memory killer does that (see dmesg), or somebody's kill -9",
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
        reason: Of it.
        is_known: Whether what rank 0 has written stays, if it has written something.
    """
    with contextlib.suppress(PretrainError):
        attempt = run.read_record()["attempts"][-1]
        is_ours = (attempt.get("host"), attempt.get("pid")) == (socket.gethostname(), main_pid)
        if is_ours and not (is_known and "ended" in attempt):
            end_attempt(run, {"exit_code": code, "reason": reason})
