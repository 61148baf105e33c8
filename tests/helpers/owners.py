"""Processes that own a run folder: one that works in it like an attempt, and many that race for it.

with working(run) as attempt:                   # takes the lease, writes rows and commits until it is stopped
    attempt.stop()
race(run, 20, "kept")                           # [1, 0, 0, ...]: number of the lease that each got, 0 for none
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import EXIT_LOCKED, DiskError, LockedError
from pretrain.io import make_dir, publish_dir, remove_dir
from pretrain.lease import Lease, lease, owner

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
        while not path.exists() or path.stat().st_size < size + 2 * number:
            assert self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.002)

    def stop(self) -> None:
        """Sends SIGSTOP, and waits until the process has stopped: it may run on for a moment on another core."""
        self.process.send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{self.process.pid}/stat")
        while status.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)


@contextmanager
def working(
    run: Path, machine: str = "", heartbeat_s: float = lease.HEARTBEAT_S, **environment: str
) -> Iterator[Attempt]:
    """Starts `work` in a process of its own, as if on another `machine` where one is named; kills it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.owners", str(run), machine, str(heartbeat_s)],
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


def work(run: Path) -> None:
    """An attempt: rows appended as to the ledger, folders committed as checkpoints are, until stdin ends."""
    mine = Lease(run / "lease")
    for leftover in run.glob(".tmp-*"):
        remove_dir(leftover)
    print(f"owner {mine.number}", flush=True)
    os.set_blocking(0, False)
    with (run / "rows").open("ab", buffering=0) as rows:
        while sys.stdin.buffer.raw.read(1) != b"":  # None: still open
            for _ in range(5):
                mine.check_after_stall()
                rows.write(b"%d\n" % mine.number)
            temporary = make_dir(run / f".tmp-{mine.number}")
            mine.check()
            with suppress(DiskError):
                publish_dir(temporary, run / f"commit-{mine.number}-{time.monotonic_ns()}")
            time.sleep(0.002)
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
    lease.STALL_S, lease.HEARTBEAT_S = 0.1, float(sys.argv[3])
    try:
        work(Path(sys.argv[1]))
    except LockedError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_LOCKED)
