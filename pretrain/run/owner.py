"""Processes that own a run folder, and whether one still does.

An owner is gone when it meets one of these:

    released    it has released the folder
    dead        it ran on this machine, and no process has its id and start time
    requeued    it was an earlier start of our own Slurm job, which Slurm ends before a requeue
    silent      its heartbeat, the mtime of its file, does not change, and is older than
                `LEASE_S` by the clock of the file system

The clock of another machine is never compared with ours.
"""

import errno
import json
import os
import re
import secrets
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pretrain.errors import LockedError
from pretrain.run.folder import slurm_facts
from pretrain.utils.safe_read import open_file, parse_json

LEASE_S = 60.0
"""How long a process elsewhere may be silent before it counts as dead."""
WATCH_S = 4.0
POLL_S = 0.1
_FILE_NAME = re.compile(r"([0-9]{8,})\.json")


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that owns a run folder, or did."""

    number: int  # fencing number of the lease
    token: str  # random and unique
    host: str
    machine: str  # boot of the kernel and process namespace, within which process ids are unique
    pid: int
    process_start: str  # time of its start, as that machine writes it; empty where unknown
    job: str  # Slurm job id, with the cluster's name; empty without Slurm
    array: str  # `job_task` of a job array; empty without one
    restart: int  # number of restarts of the job by Slurm
    since: str  # time at which it took the lease, by its own clock: for people
    released: bool = False  # it has given the folder up

    def __str__(self) -> str:
        restart = f", restart {self.restart}" if self.restart else ""
        job = f" (Slurm job {self.array or self.job}{restart})" if self.job else ""
        return f"process {self.pid} on {self.host}{job} since {self.since}"

    def to_json(self) -> bytes:
        """Returns the content of its file."""
        return json.dumps(asdict(self), indent=2).encode() + b"\n"


class OwnerRecord(NamedTuple):
    """Owner in a file, if it can be read, and its last heartbeat, in ns."""

    owner: Owner | None
    heartbeat_ns: int


def path_of(folder: Path, number: int) -> Path:
    """Returns the file of an owner."""
    return folder / f"{number:08d}.json"


def number_of(name: str) -> int | None:
    """Returns the number in the name of an owner's file; None for any other name."""
    match = _FILE_NAME.fullmatch(name)
    return int(match[1]) if match else None


def highest_number(folder: Path) -> int:
    """Returns the number of the newest owner, 0 where there has been none. Raises: OSError."""
    try:
        return max((number_of(path.name) or 0 for path in folder.iterdir()), default=0)
    except FileNotFoundError:
        return 0


def find_owner(path: Path) -> OwnerRecord | None:
    """Reads the file of an owner; None where there is none. Raises: OSError.

    The file is opened before its time is read: a client of NFS then asks the server.
    """
    try:
        with open_file(path) as file:
            heartbeat_ns = os.fstat(file.fileno()).st_mtime_ns
            content = file.read()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise
    try:
        raw = parse_json(content)
    except ValueError:
        raw = None  # unfinished or torn, where there are no hard links
    return OwnerRecord(owner_of(raw), heartbeat_ns)


def owner_of(raw: Any) -> Owner | None:
    """Returns the owner that a JSON value is; None for any other value."""
    try:
        owner = Owner(**raw)
    except TypeError:
        return None
    is_sound = all(type(getattr(owner, field.name)) is field.type for field in fields(owner))
    return owner if is_sound else None


def this_process() -> Owner:
    """Returns this process as an owner to be, with a new token."""
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    slurm = slurm_facts(os.environ).get("slurm", {"job": "", "array": None, "restart": 0})
    return Owner(
        number=0,
        token=secrets.token_hex(16),
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        process_start=_process_start(os.getpid()) or "",
        job=f"{slurm['job']}@{cluster}" if slurm["job"] and cluster else slurm["job"],
        array=slurm["array"] or "",
        restart=slurm["restart"],
        since=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _process_start(pid: int) -> str | None:
    """Returns the start of a local process; empty where unknown, None where it is dead."""
    is_hidden = False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        is_hidden = True  # another user's: alive, and perhaps not in our /proc
    if not Path("/proc/self/stat").exists():  # macOS
        command = ["ps", "-o", "lstart=", "-p", str(pid)]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "" if is_hidden else None
    state, *rest = text.rpartition(")")[2].split()  # the fields after the name
    return None if state in "ZX" else rest[18]  # in ticks since boot


def is_alive(owner: Owner) -> bool:
    """Returns whether the process of a local owner lives, and not another with its id."""
    start = _process_start(owner.pid)
    return start is not None and (start == owner.process_start or not (start and owner.process_start))


def live_owner(folder: Path) -> Owner | None:
    """Returns the owner of `folder` that lives; None without a heartbeat for a minute. Reads only."""
    with suppress(OSError):
        number = highest_number(folder)
        record = find_owner(path_of(folder, number)) if number else None
        if record and record.owner and not record.owner.released:
            is_young = time.time() - record.heartbeat_ns / 1e9 < LEASE_S
            is_here = record.owner.machine == this_process().machine
            if is_young and (is_alive(record.owner) or not is_here):
                return record.owner
    return None


def refuse_if_held(folder: Path, number: int, us: Owner) -> str:
    """Returns why owner `number` of `folder` is gone; empty where it has, or may have, released it.

    Raises:
        LockedError: The owner seems alive after `WATCH_S`; the message names it.
    """
    record = find_owner(path_of(folder, number))
    if record is None:
        return ""
    owner = record.owner
    if owner is not None:
        if owner.released:
            return ""
        if gone := why_gone(owner, us):
            return gone
        if owner.machine == us.machine:
            raise _locked(folder, owner)
    return _watch(folder, number, record, us)


def why_gone(owner: Owner, us: Owner) -> str:
    """Returns why an owner is gone by what Slurm and this machine know; empty where it may live."""
    if owner.job and owner.job == us.job and owner.restart < us.restart:
        return f"{owner} was an earlier start of this Slurm job"
    if owner.machine == us.machine and not is_alive(owner):
        return f"{owner} is dead"
    return ""


def _watch(folder: Path, number: int, found: OwnerRecord, us: Owner) -> str:
    """Waits for a heartbeat of an owner elsewhere. Returns and raises as `refuse_if_held`."""
    deadline = time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        now = find_owner(path_of(folder, number))
        if now is None or now.owner != found.owner:
            return refuse_if_held(folder, number, us)  # released, succeeded, or written to its end
        if now.heartbeat_ns != found.heartbeat_ns:
            raise _locked(folder, now.owner)
    silent_s = (_file_system_time_ns(folder) - found.heartbeat_ns) / 1e9
    if silent_s < LEASE_S:
        raise _locked(folder, found.owner, silent_s)
    return f"{found.owner or 'its owner'} has given no sign of life for {silent_s:.0f} s"


def _file_system_time_ns(folder: Path) -> int:
    """Returns the time by the clock that writes mtimes in `folder`."""
    probe = folder / f".probe-{secrets.token_hex(8)}"
    try:
        with probe.open("xb") as file:
            file.write(b"?")
            file.flush()
            return os.fstat(file.fileno()).st_mtime_ns
    finally:
        probe.unlink(missing_ok=True)


def _locked(folder: Path, owner: Owner | None, silent_s: float | None = None) -> LockedError:
    problem = f"in use by {owner or 'another process, which is starting'}"
    fix = "wait for it, stop it, or use another folder (run.name=...)"
    if silent_s is not None:
        problem += f", silent for {max(silent_s, 0):.0f} s"
        fix = f"if it is dead, start again in {min(LEASE_S, LEASE_S - silent_s):.0f} s; else {fix}"
    return LockedError(problem, where=str(folder.parent), fix=fix)
