"""Errors a user can act on, and the exit code of each.

An error of this family is printed as one line (problem, place, remedy) and ends the
process with its exit code; no traceback, unless `--debug` is given. Every other exception is a bug
of ours: traceback and exit code 70.

| code | the process ended because | does a restart help? |
|---|---|---|
| 0 | the run, or the command, is done | there is nothing to do |
| 64 | of a bad config or command line, or Slurm refuses the job that it asks for | no: correct it |
| 65 | of bad data: text, shards, a tokenizer, or nothing to learn from | no: correct it |
| 66 | a checkpoint is missing, damaged, or not of this model | no |
| 69 | ranks cannot be started or reach each other, a package is missing, or memory is too small | no |
| 70 | of a bug of ours | no |
| 73 | another live process owns the folder, or a job of the run is in the queue | once that one has ended |
| 74 | the disk refused a write: full, over quota, read-only | once there is room |
| 75 | it was asked to stop, and has saved all that there was | yes: the same command continues |
| 76 | a rank hangs, is frozen or is gone | yes |
| 77 | the numbers went wrong: non-finite steps, spikes, ranks that differ | no: see what it says (docs/guard.md) |
| 128 + n | signal n ended it | yes |
| 141 | the reader of its result has gone (`pretrain generate | head`), as SIGPIPE would end it | no need |
"""

import errno
import signal

EXIT_OK = 0
EXIT_USAGE = 64
EXIT_DATA = 65
EXIT_CHECKPOINT = 66
EXIT_UNAVAILABLE = 69
EXIT_BUG = 70
EXIT_LOCKED = 73
EXIT_DISK = 74
EXIT_RESUME_ME = 75
EXIT_HANG = 76
EXIT_DIVERGED = 77
EXIT_UNREAD = 128 + signal.SIGPIPE
EXITS_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Codes of a rank that a second stop signal has ended."""


def install_fix(extra: str = "") -> str:
    """Returns the remedy for a missing package: an install from the clone, as no release exists."""
    target = f"'.[{extra}]'" if extra else "."
    return f"run in the clone of pretrain: python -m pip install -e {target}"


_DISK_FIXES = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space, or raise the quota",
    errno.EROFS: "mount it for writing, or use another folder",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "fix permissions"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST), "check the path"),
}


def disk_fix(error: OSError) -> str:
    """Returns the remedy for what a file system refused."""
    return _DISK_FIXES.get(error.errno or 0, "see to the file system")


class PretrainError(Exception):
    """A condition that the user can fix.

    Args:
        what: The problem, one clause, with the offending value.
        where: File, `file:line:column`, key, shard or rank; empty where `what` says it.
        fix: Remedy, imperative.
    """

    exit_code = EXIT_BUG

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(self.line())

    def line(self) -> str:
        """Returns the message as a user sees it: `where: what; fix`."""
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.fix}" if self.fix else text


class ConfigError(PretrainError):
    """A bad config or command line, or a job that Slurm refuses (exit code 64)."""

    exit_code = EXIT_USAGE


class DataError(PretrainError):
    """Input text, shards or a tokenizer that cannot be used (exit code 65)."""

    exit_code = EXIT_DATA


class CheckpointError(PretrainError):
    """A checkpoint that is missing, damaged, or not of this model (exit code 66)."""

    exit_code = EXIT_CHECKPOINT


class LaunchError(PretrainError):
    """Ranks that cannot start or reach each other, or a missing dependency (exit code 69)."""

    exit_code = EXIT_UNAVAILABLE


class OutOfMemoryError(PretrainError):
    """A GPU, or a machine, whose memory is too small (exit code 69)."""

    exit_code = EXIT_UNAVAILABLE

    @staticmethod
    def of(error: Exception) -> "OutOfMemoryError | None":
        """Returns our class for an error of Python, numpy or torch; None: it is another error."""
        text = str(error).partition("\n")[0].rpartition("Allocator: ")[2]
        is_told = "allocate memory" in text or "out of memory" in text  # by torch
        if not (isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and is_told)):
            return None
        return OutOfMemoryError(
            f"memory is too small: {text or 'Python has none left'}",
            fix="use a smaller model or batch, or another machine",
        )


class LockedError(PretrainError):
    """A folder that another live process owns (exit code 73)."""

    exit_code = EXIT_LOCKED


class DiskError(PretrainError):
    """A write that the disk refused: full, over quota, read-only (exit code 74)."""

    exit_code = EXIT_DISK


class HangError(PretrainError):
    """A rank that hangs, is frozen or is gone; the run can be resumed (exit code 76)."""

    exit_code = EXIT_HANG


class DivergedError(PretrainError):
    """A run whose numbers went wrong: bad steps, spikes, ranks that differ (exit code 77)."""

    exit_code = EXIT_DIVERGED


class UnreadError(PretrainError):
    """The reader of a result has gone, as in `| head` (exit code 128 + SIGPIPE). Has no message."""

    exit_code = EXIT_UNREAD

    def __init__(self) -> None:
        super().__init__("")
