"""File system of a run folder: the operations that leases, ledgers and checkpoints rely on.

They are tried in a scratch folder `.doctor-<token>` next to the run folder, removed at the end.
"""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from pretrain.doctor.check import Check
from pretrain.errors import EXIT_DISK, DiskError
from pretrain.utils.io import write_file

WRITTEN_WITHIN_S = 30.0
VISIBLE_WITHIN_S = 5.0
SLOW_FSYNC_S = 0.5
SKEW_S = 5.0
_FIX = "set run.dir to a file system that keeps what is written, and that every node sees"


def nearest_folder(folder: Path) -> Path:
    """Returns the folder itself, or its nearest ancestor that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def check_files(folder: Path, needed_bytes: int, *, is_shared: bool) -> list[Check]:
    """Tries the file system of a run folder, existing or not; checkpoints of 0 bytes: unknown."""
    where = nearest_folder(folder)
    probe = where / f".doctor-{secrets.token_hex(6)}"
    try:
        probe.mkdir()
    except OSError as error:
        return [_failed("run folder", f"{where}: cannot be written: {error.strerror}")]
    checks = []
    try:
        for name, try_it in _TRIALS:
            try:
                checks.append(try_it(probe))
            except (OSError, DiskError) as error:
                checks.append(_failed(name, f"refused: {error}"))
        checks += [_check_room(probe, needed_bytes), _check_kind(where, is_shared)]
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    return checks


def _failed(name: str, detail: str, fix: str = _FIX) -> Check:
    return Check(name, "fail", detail, fix, EXIT_DISK)


def try_rename(probe: Path) -> Check:
    """Renames a file over another, and a folder to a new name, as commits of checkpoints do."""
    old = probe / "old"
    new = probe / "new"
    write_file(old, b"old")
    write_file(new, b"new")
    new.replace(old)
    (probe / "tmp").mkdir()
    (probe / "tmp").rename(probe / "step")
    if old.read_bytes() != b"new" or not (probe / "step").is_dir():
        return _failed("atomic rename", "a renamed file or folder is not at its new name")
    if new.exists() or (probe / "tmp").exists():
        return _failed("atomic rename", "a renamed file or folder is still at its old name")
    return Check("atomic rename", "pass", "a file over another, and a folder")


def try_link(probe: Path) -> Check:
    """Makes a hard link twice, as leases do: the second must fail."""
    first = probe / "first"
    link = probe / "link"
    write_file(first, b"owner")
    try:
        os.link(first, link)
    except OSError as error:
        # NFS 2 lacks exclusive creation as well.
        text = f"none here ({error.strerror}): leases fall back on exclusive creation"
        fix = "prefer a file system with hard links for runs that may race"
        return Check("exclusive link", "warn", text, fix)
    if first.stat().st_nlink != 2:
        return _failed("exclusive link", "a link is made, and its file does not count it")
    try:
        os.link(first, link)
    except FileExistsError:
        return Check("exclusive link", "pass", "a name is taken once")
    text = "a name that is taken can be taken again: two jobs may own one run"
    return _failed("exclusive link", text)


def try_fsync(probe: Path) -> Check:
    """Writes and syncs a small file and its folder three times; the slowest counts."""
    slowest = 0.0
    for number in range(3):
        begun = time.monotonic()
        write_file(probe / f"sync-{number}", b"x" * 4096)
        slowest = max(slowest, time.monotonic() - begun)
    if slowest > SLOW_FSYNC_S:
        fix = "raise checkpoint.every_steps, or set run.dir to another file system"
        return Check("fsync", "warn", f"a small file takes {slowest:.1f} s", fix)
    return Check("fsync", "pass", f"file and folder, {slowest * 1e3:.0f} ms")


_WRITER = """
import os, sys
open(sys.argv[1] + ".new", "w").write("here")
os.rename(sys.argv[1] + ".new", sys.argv[1])
"""


def try_other_process(probe: Path) -> Check:
    """Lets another process make a file, and waits until this one sees it."""
    name = "another process"
    path = probe / "seen"
    list(probe.iterdir())  # a client that caches the names of a folder has them cached from here on
    command = [sys.executable, "-I", "-S", "-c", _WRITER, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=WRITTEN_WITHIN_S)
    except subprocess.TimeoutExpired:
        return _failed(name, f"it has not written a file within {WRITTEN_WITHIN_S:.0f} s")
    if done.returncode:
        error = done.stderr.decode(errors="replace").strip()
        return _failed(name, f"it cannot write: {error[-200:]}")
    written = time.monotonic()
    while True:
        with suppress(FileNotFoundError):
            if path.read_bytes() == b"here":
                return Check(name, "pass", "its file is seen at once")
        if time.monotonic() - written > VISIBLE_WITHIN_S:
            return _failed(name, f"its file is not seen within {VISIBLE_WITHIN_S:.0f} s")
        time.sleep(0.02)


def try_clock(probe: Path) -> Check:
    """Compares the time that the file system gives to a new file with the clock of this host."""
    path = probe / "clock"
    before = time.time()
    write_file(path, b"?")
    after = time.time()
    written = path.stat().st_mtime
    # A file system may count in whole seconds.
    skew = written - after if written > after else min(0.0, written - before + 1.0)
    if abs(skew) > SKEW_S:
        text = f"the file system's is {skew:+.0f} s from this host's: times in logs will not match"
        fix = "check NTP on this host (leases and checkpoints do not use its clock)"
        return Check("clock", "warn", text, fix)
    return Check("clock", "pass", f"within {SKEW_S:.0f} s of the file system's")


_TRIALS: tuple[tuple[str, Callable[[Path], Check]], ...] = (
    ("atomic rename", try_rename),
    ("exclusive link", try_link),
    ("fsync", try_fsync),
    ("another process", try_other_process),
    ("clock", try_clock),
)


def _check_room(probe: Path, needed: int) -> Check:
    free = shutil.disk_usage(probe).free
    text = f"{free / 2**30:,.1f} GiB free"
    wanted = f"{needed / 2**30:,.1f} GiB"
    if needed > free:
        fix = "free space, lower checkpoint.keep, or set run.dir to a larger file system"
        return _failed("room", f"{text}, and the checkpoints of this run take {wanted}", fix)
    if needed:
        text += f", {wanted} wanted for checkpoints; quotas are not considered"
    return Check("room", "pass", text)


def _check_kind(folder: Path, is_shared: bool) -> Check:
    kind, mount = find_mount(folder)
    text = f"{folder} is on {kind or 'an unknown file system'}{f' ({mount})' if mount else ''}"
    if kind in ("tmpfs", "ramfs"):
        risk = "seen by this node only, as a rule" if is_shared else "gone with a reboot"
        return Check("run folder", "warn", f"{text}: in memory, {risk}", _FIX)
    return Check("run folder", "pass", text)


def find_mount(folder: Path) -> tuple[str, str]:
    """Returns kind and mount point of the file system of a folder; empty if unknown."""
    target = folder.resolve()
    above = [one for one in psutil.disk_partitions(all=True) if target.is_relative_to(one.mountpoint)]
    # Of two file systems at one mount point, the later one hides the earlier one.
    mount = max(reversed(above), key=lambda one: len(one.mountpoint), default=None)
    return (mount.fstype, mount.mountpoint) if mount else ("", "")
