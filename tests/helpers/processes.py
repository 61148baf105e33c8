"""Processes, seen from outside."""

from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended, and that nobody has waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # gone before the file was opened, or before it was read
        return False
