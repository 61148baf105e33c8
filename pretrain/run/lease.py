"""Lease of a run folder: one live attempt at a time, on any node and file system.

    lease/00000003.json   third owner: host, process, Slurm job, random token; mtime is the heartbeat

    Lease(folder)   highest number n is free (owner.py)  ->  file n + 1, exclusively  ->  heartbeats
    check           before a commit: ours is still the highest and has our token, or LockedError
    release         our file is marked, so that the next owner need not wait for the lease to expire

The number is a fencing token: it only grows. The highest file is never removed, and each follows
one that was found free, so that exactly one of any number of racing processes gets the folder. File
locks are not used: on some file systems a lock of one node is invisible to another. A process can
be stopped between `check` and the operation that it guards, and no lease prevents that; therefore a
new owner first removes the unfinished checkpoints of earlier ones.
"""

import logging
import os
import shlex
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pretrain.errors import EXIT_LOCKED, ConfigError, DiskError, LockedError
from pretrain.run.folder import RunDir
from pretrain.run.owner import (
    POLL_S,
    Owner,
    OwnerRecord,
    find_owner,
    highest_number,
    number_of,
    path_of,
    refuse_if_held,
    this_process,
)
from pretrain.utils.io import disk_error, fsync_dir, make_dir, write_chunks, write_file

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
STALL_S = 3.0
"""A process that has not read its lease for so long may have been stopped meanwhile."""


def _end_process(error: LockedError) -> None:
    """Ends this process, which may write nothing more; its main thread may be anywhere."""
    log.error("%s", error)
    logging.shutdown()
    os._exit(EXIT_LOCKED)


class Lease:
    """Ownership of a run folder by this process, renewed by a thread until it is released.

    It calls `on_lost` when another process has taken over: by default this one ends, with 73.

    Raises (on creation):
        LockedError: Another live process owns the folder; names its host, process, job and start.
            Within 5 seconds.
        ConfigError: It is that of a released run, which is not changed.
        DiskError: The folder cannot be written to.
    """

    def __init__(self, folder: Path, on_lost: Callable[[LockedError], None] = _end_process) -> None:
        _refuse_released(RunDir(folder.parent))
        self._folder, self._on_lost = make_dir(folder), on_lost
        try:
            self._owner = _take(folder)
        except OSError as error:
            raise disk_error("claim it", folder, error) from error
        self._path = path_of(folder, self._owner.number)
        self._seen_at = time.monotonic()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    @property
    def number(self) -> int:
        """Fencing number: higher than every earlier owner's."""
        return self._owner.number

    def check(self) -> None:
        """Makes sure that the folder is still ours, before a commit. About a millisecond.

        Raises:
            LockedError: Another process has taken over, and is named; or the lease was removed by
                hand.
            DiskError: The folder cannot be read.
        """
        begun = time.monotonic()  # before the read: this process may be stopped after it
        try:
            highest = _find_highest(self._folder)
        except OSError as error:
            raise disk_error("read it", self._folder, error) from error
        owner = highest.owner if highest else None
        if owner is None or owner.token != self._owner.token:
            new = f"was taken over by {owner or 'another process'}" if highest else "was removed"
            run = str(self._folder.parent)
            raise LockedError(
                f"the lease of this attempt ({self._owner}) {new}",
                where=run,
                fix="leave the run to its owner",
            )
        self._seen_at = begun

    def check_after_stall(self) -> None:
        """Checks the lease if that is `STALL_S` ago, as after a SIGSTOP. Raises: as `check`."""
        if time.monotonic() - self._seen_at > STALL_S:
            self.check()

    def is_held(self) -> bool:
        """Returns whether the folder is known to be still ours."""
        try:
            self.check()
        except (LockedError, DiskError):
            return False
        return True

    def _renew(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            try:
                self.check()
                # Without a time: a server sets its own, so that no clock is compared with another
                # machine's.
                os.utime(self._path)
            except LockedError as error:
                if not self._released.is_set():
                    self._on_lost(error)
                return
            except (DiskError, OSError) as error:  # a server is away; `check` guards commits
                log.debug("no heartbeat: %s", error)

    def release(self) -> None:
        """Gives the folder up, if it is still ours. Idempotent."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join(timeout=HEARTBEAT_S)
        if self.is_held():
            with suppress(DiskError):  # the next owner finds this process dead, or waits
                write_file(self._path, replace(self._owner, released=True).to_json())


def refuse_if_owned(folder: Path) -> None:
    """Raises as `Lease` would, before anything that takes seconds; takes and writes nothing.

    The run's `lease` folder need not be there.
    """
    _refuse_released(RunDir(folder.parent))
    try:
        highest = highest_number(folder)
        if highest:
            refuse_if_held(folder, highest, this_process())
    except OSError as error:
        raise disk_error("read it", folder, error) from error


def _refuse_released(run: RunDir) -> None:
    if run.release.is_file():
        raise ConfigError(
            "a released run is not changed",
            where=str(run.path),
            fix=f"continue it in a folder of its own: pretrain continue {shlex.quote(str(run.path))}",
        )


def _find_highest(folder: Path) -> OwnerRecord | None:
    """Returns the owner of the highest number; None without any file. Raises: OSError."""
    while highest := highest_number(folder):
        record = find_owner(path_of(folder, highest))
        if record is not None:
            return record
        time.sleep(POLL_S)  # a new owner has removed this file meanwhile: find its own
    return None


def _take(folder: Path) -> Owner:
    """Becomes the owner of `folder`. Raises: LockedError, DiskError."""
    while True:
        highest = highest_number(folder)
        owner = replace(this_process(), number=highest + 1)
        reason = refuse_if_held(folder, highest, owner) if highest else ""
        if not _create(folder, owner):
            continue  # another process was faster: see whether it lives
        if highest_number(folder) == owner.number:
            break
        # This process was stopped, while others came, went, and removed the file in its way.
        path_of(folder, owner.number).unlink(missing_ok=True)
    if reason:
        log.warning("%s taken over: %s", folder.parent, reason)
    for path in folder.iterdir():
        if (number_of(path.name) or 0) < owner.number:  # 0: leftovers of racers and the dead
            with suppress(OSError):
                path.unlink()
    return owner


def _create(folder: Path, owner: Owner) -> bool:
    """Makes the file of an owner, whole, unless there is one of its number; returns whether it did."""
    content = owner.to_json()
    path = path_of(folder, owner.number)
    temporary = folder / f".tmp-{owner.token}"
    write_chunks(temporary, [memoryview(content)])
    try:
        os.link(temporary, path)  # exclusive on NFS too; the file has its content from the start
    except FileExistsError:
        # A client of NFS repeats a request whose answer was lost: two links are our own file.
        with suppress(OSError):
            return temporary.stat().st_nlink == 2
        return False
    except FileNotFoundError:
        return False  # the winner has tidied up
    except OSError:
        return _create_without_links(path, content)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    fsync_dir(folder)
    return True


def _create_without_links(path: Path, content: bytes) -> bool:
    """Does the same without hard links. A process killed in here leaves a file without an owner."""
    try:
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True
