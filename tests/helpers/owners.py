"""Processes that own a run folder: one that works in it like an attempt, and many that race for it.

with working(run) as attempt:                   # takes the lease, writes rows and commits until it is stopped
    attempt.stop()
race(run, 20, "kept")                           # [1, 0, 0, ...]: number of the lease that each got, 0 for none
"""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import EXIT_LOCKED, DiskError, LockedError
from pretrain.run import lease, owner
from pretrain.run.lease import Lease
from pretrain.utils.io import make_dir, publish_dir, remove_dir
from tests.helpers.waiting import poll_pause, wait_until

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A process that works in a run folder; `first_line` is what it said of its start."""

    process: subprocess.Popen[str]
    first_line: str

    def wait_for_rows(self, run: Path, number: int) -> None:
        """Waits until the process, which is alive, has written `number` rows more."""
        path = run / "rows"
        size = path.stat().st_size if path.exists() else 0
        wait_until(
            lambda: path.exists() and path.stat().st_size >= size + 2 * number,
            f"{number} rows more",
            while_running=self.process,
            say=self.errors,
        )

    def errors(self) -> str:
        """What it has said of its end."""
        return self.process.stderr.read() if self.process.poll() is not None else ""

    def stop(self) -> None:
        """Sends SIGSTOP, and waits until the process has stopped: it may run on for a moment on another core."""
        self.process.send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{self.process.pid}/stat")
        wait_until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T", "it has stopped")


@contextmanager
def working(
    run: Path, machine: str = "", heartbeat_s: float = lease.HEARTBEAT_S, stall_s: float = 0.0, **environment: str
) -> Iterator[Attempt]:
    """Starts `work` in a process of its own; kills it at the end.

    Args:
        run: The run folder.
        machine: As if on another one of that name.
        heartbeat_s: Seconds from heartbeat to heartbeat.
        stall_s: The `STALL_S` of its lease, by the real clock; 0: that of the product, by the `RunClock`.
        environment: Laid over this process's.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.owners", str(run), machine, str(heartbeat_s), str(stall_s)],
        cwd=ROOT,
        env={**{key: value for key, value in os.environ.items() if "SLURM" not in key}, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Attempt(process, process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()


class RunClock:
    """As the module `time`, for all who work in a run folder: it goes on when somebody turns it."""

    def __init__(self, run: Path) -> None:
        self._file = run.with_name("clock")  # a byte is a second

    def monotonic(self) -> float:
        """As `time.monotonic`."""
        return float(self._file.stat().st_size) if self._file.exists() else 0.0

    def sleep(self, seconds: float) -> None:
        """As `time.sleep`."""
        poll_pause()

    def pass_minute(self) -> None:
        """Turns it on."""
        with self._file.open("ab") as file:
            file.write(b"." * 60)


def work(run: Path) -> None:
    """An attempt: rows appended as to the ledger, folders committed as checkpoints are, until stdin ends."""
    mine = Lease(run / "lease")
    for leftover in run.glob(".tmp-*"):
        remove_dir(leftover)
    print(f"owner {mine.number}", flush=True)
    os.set_blocking(0, False)
    count = itertools.count()
    with (run / "rows").open("ab", buffering=0) as rows:
        while sys.stdin.buffer.raw.read(1) != b"":  # None: still open
            for _ in range(5):
                mine.check_after_stall()
                rows.write(b"%d\n" % mine.number)
            temporary = make_dir(run / f".tmp-{mine.number}")
            mine.check()
            with suppress(DiskError):
                publish_dir(temporary, run / f"commit-{mine.number}-{next(count)}")
            poll_pause()
    mine.release()


def race(run: Path, num_processes: int, ending: str) -> list[int]:
    """Forks processes that take the lease of `run` at the same moment; returns the number that each got, or 0.

    The winner holds it until all have tried, and then is `killed`, or has `released` it.
    """
    (go_out, go_in), (result_out, result_in), (end_out, end_in) = (os.pipe() for _ in range(3))
    children = []
    for _ in range(num_processes):
        child = os.fork()
        if not child:
            os.close(go_in)
            os.close(end_in)
            os.read(go_out, 1)  # until the parent closes its end
            mine = None
            with suppress(LockedError):
                mine = Lease(run / "lease")
            os.write(result_in, b"%d\n" % (mine.number if mine else 0))
            os.read(end_out, 1)
            if mine and ending == "released":
                mine.release()
            os.kill(os.getpid(), signal.SIGKILL)
        children.append(child)
    os.close(go_in)
    numbers: list[int] = []
    with os.fdopen(result_out) as results:
        numbers.extend(int(results.readline()) for _ in children)
    os.close(end_in)
    for child in children:
        os.waitpid(child, 0)
    for end in (go_out, result_in, end_out):
        os.close(end)
    return numbers


def race_rounds(folder: Path, rounds: int, num_processes: int) -> list[list[int]]:
    """Races five times for each of many folders: new, left by a dead owner, released. In a process that forks."""
    code = (
        "import json, sys; from pathlib import Path; from tests.helpers.owners import race; "
        "folder, rounds, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]); "
        "print(json.dumps([race(folder / str(n // 5), size, ('killed', 'released')[n % 2]) for n in range(rounds)]))"
    )
    command = [sys.executable, "-c", code, str(folder), str(rounds), str(num_processes)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
    return json.loads(output.stdout)


if __name__ == "__main__":
    if sys.argv[2]:
        name = sys.argv[2]
        owner._machine = lambda: name
    folder, lease.HEARTBEAT_S, stall_s = Path(sys.argv[1]), *map(float, sys.argv[3:])
    if stall_s:
        lease.STALL_S = stall_s
    else:
        lease.time = RunClock(folder)
    try:
        work(folder)
    except LockedError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_LOCKED)
