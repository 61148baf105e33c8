"""What kills must not leave behind: temporary files, in run folder and TMPDIR, shared memory, and a lease."""

import os
from contextlib import suppress
from pathlib import Path

from pretrain.drill.folder import DrillFolder
from pretrain.run.folder import RunDir
from pretrain.run.owner import find_owner, highest_number, path_of

SHARED_MEMORY = Path("/dev/shm")
CACHES = ("torchinductor_", "triton", "torch_extensions")
"""Beginnings of names in TMPDIR that compilers keep for the next start."""
_TEMPORARY = (".tmp-", ".trash-")


def find_temporary(folder: DrillFolder, run: RunDir) -> list[str]:
    """Returns the temporary files and folders of a run that has ended, and what is in its TMPDIR."""
    inside = [path for path in run.path.rglob("*") if path.name.startswith(_TEMPORARY) or ".tmp-" in path.name]
    outside = folder.temporary.iterdir() if folder.temporary.is_dir() else []
    return [str(path) for path in (*inside, *(path for path in outside if not path.name.startswith(CACHES)))]


def find_leases(run: RunDir) -> list[str]:
    """Returns what is in the lease folder of a run that has ended, besides the lease that its last owner gave back."""
    if not run.lease.is_dir():
        return []
    last = path_of(run.lease, highest_number(run.lease))
    found = find_owner(last)
    is_given_back = found is not None and found.owner is not None and found.owner.released
    return sorted(str(path) for path in run.lease.iterdir() if path != last or not is_given_back)


def list_shared_memory() -> set[str]:
    """Returns the names in /dev/shm that are this user's."""
    found = set()
    with suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    found.add(entry.name)
    return found


def find_shared_memory(before: set[str]) -> list[str]:
    """Returns what is in /dev/shm and was not `before`, unless a live process uses it: that is somebody else's.

    So is what is gone when all processes have been asked: those who used it have ended meanwhile.
    """
    new = {str(SHARED_MEMORY / name) for name in list_shared_memory() - before}
    unused = new - _in_use(new) if new else set()
    return sorted(unused & {str(SHARED_MEMORY / name) for name in list_shared_memory()})


def _in_use(names: set[str]) -> set[str]:
    """Returns those that a live process has open or mapped."""
    used: set[str] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                maps = (process / "maps").read_text(errors="replace")
                used |= {name for name in names if name in maps}
            with suppress(OSError):
                for link in (process / "fd").iterdir():
                    with suppress(OSError):  # closed just now: our own, among others
                        used |= names & {str(link.readlink())}
    return used
