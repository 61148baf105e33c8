"""Standard streams that break without changing how a process ends.

    stderr                               diagnostics: refused writes are discarded
    stdout of `train` and of launchers   progress: refused writes are discarded
    stdout of other commands             the result: a closed pipe raises UnreadError (128 + SIGPIPE,
                                         silent), a device that refuses raises DiskError
    a stream closed before the start     /dev/null

Without this, where a terminal hangs up, a reader ends or a disk is full, the next print raises, or
Python's flush at exit fails and turns the exit code into 120, which a launcher takes for a failure.
"""

import contextlib
import ctypes
import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pretrain.errors import DiskError, UnreadError


class _Descriptor(io.FileIO):
    """The raw file below a stream: a refused write of the result is an error, any other discarded."""

    def __init__(self, number: int, name: str, *, is_result: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.name = f"<{name}>"
        self.is_result = is_result

    def write(self, data: Any, /) -> int:
        """Writes; discarded data count as written, so that none stays for the flush at exit."""
        try:
            return super().write(data)
        except OSError as error:
            if not self.is_result:
                return len(data)
            self.is_result = False  # messages about the error are discarded too
            if isinstance(error, BrokenPipeError):
                raise UnreadError from error
            raise DiskError(
                f"cannot be written: {error.strerror}",
                where="standard output",
                fix="write to another place",
            ) from error


class _Stream(io.TextIOWrapper):
    """A stream that libraries cannot close."""

    def close(self) -> None:
        """Flushes."""
        self.flush()


def guard_streams(*, stdout_is_result: bool = False) -> None:
    """Guards this process's standard streams. Called first in every program; idempotent.

    With `stdout_is_result`, a write that stdout refuses is an error.
    """
    if sys.stdin is None:
        sys.stdin = _open_null("r")
    _guard("stdout", is_result=stdout_is_result)
    _guard("stderr", is_result=False)


def guard_stderr() -> None:
    """Guards stderr alone, unless a caller has replaced it."""
    if sys.stderr is sys.__stderr__:
        _guard("stderr", is_result=False)


def discard_refused_stdout() -> None:
    """Marks stdout as progress: from now on, refused writes are discarded."""
    if isinstance(sys.stdout, _Stream):
        buffer: Any = sys.stdout.buffer
        getattr(buffer, "raw", buffer).is_result = False


def _guard(name: str, *, is_result: bool) -> None:
    stream = getattr(sys, name) or _open_null("w")
    if isinstance(stream, _Stream) or not isinstance(stream, io.TextIOWrapper) or stream.closed:
        return
    with contextlib.suppress(OSError):
        stream.flush()
    descriptor = _Descriptor(stream.fileno(), name, is_result=is_result)
    guarded = _Stream(
        descriptor if stream.write_through else io.BufferedWriter(descriptor),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,  # set by PYTHONUNBUFFERED
    )
    setattr(sys, name, guarded)


def _open_null(mode: str) -> Any:
    """Opens /dev/null at the lowest free descriptor, which the closed stream had."""
    number = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(number, True)
    return open(number, mode, encoding="utf-8", closefd=False)


_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def die_with(parent: int) -> None:
    """Asks the kernel (of Linux only) to kill this process when `parent`, which started it, has ended.

    For the time between fork and exec, where the parent cannot do more for its child.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The kernel sends the signal at the end of the parent, which may be over.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def name_rank(rank: int) -> None:
    """Names this process `rank-N` (on Linux): a fork has no command line of its own."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank-{rank}".encode())


def rank_of_process(pid: int) -> int | None:
    """Returns the rank of a live process, by its first environment or its name; None: it is none."""
    with contextlib.suppress(OSError, ValueError):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        texts = [item[5:] for item in environment if item.startswith(b"RANK=")]
        name = Path(f"/proc/{pid}/comm").read_bytes()
        return int(texts[0] if texts else name.removeprefix(b"rank-"))
    return None


def wait_for_child(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> int:
    """Runs a command in the foreground, in a folder, and returns its exit code.

    `environment` is added to that of this process.
    SIGTERM is passed on. Ctrl-C, which a terminal sends to both, raises KeyboardInterrupt when the
    command has ended; a command that was ended by SIGTERM gives 0.
    """
    environment = {**os.environ, **environment}
    dies_with_us = partial(die_with, os.getpid())
    process = subprocess.Popen(command, cwd=folder, env=environment, preexec_fn=dies_with_us)
    previous = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)  # from `kill -INT`, the command has none
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0 if code == -signal.SIGTERM else code


def usable_cores() -> int:
    """Returns the cores that this process may use; macOS has no affinities."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_program(file: str) -> "subprocess.Popen[bytes]":
    """Starts a file of this package as a program, which reads stdin, writes stdout, and is silent else.

    Its folder is not on the path, as its modules have names of others. It imports what it names.
    """
    command = [sys.executable, "-P", file]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    folders = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, env=environment)
