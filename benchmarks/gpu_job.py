"""The ranks of a job of the arm `ranks`: over NCCL on one GPU, or over gloo on a CPU.

job = Job(folder, ranks=2, on_gpu=True)    the ranks import, and wait: several jobs may do so at once
job.begin(tasks)                           they run the tasks of `gpu_rank.py` one after another
job.send(signal.SIGKILL, rank=1)
job.wait(limit_s)                          the rows of the tasks that have ended
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.common import ROOT
from pretrain.errors import EXIT_OK, EXIT_RESUME_ME
from pretrain.utils.net import reserved_port
from pretrain_launch.local import rank_environment

POLL_S = 0.02
LAST_LINES = 12
"""Lines that are quoted of a rank that failed."""
LAST_WORDS_S = 40.0
"""Time that the other ranks of a failed one have to end by themselves, the wait for a missed heartbeat included."""

ONE_GPU = {
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_MAX_CTAS": "2",
    "NCCL_DEBUG": "WARN",
}
"""Variables with which several ranks use one GPU over NCCL. For tests alone: a job of GPUs of its own sets none.

NCCL refuses two ranks of the same host and bus id ("Duplicate GPU detected"). The host is a hash of NCCL_HOSTID, where
that is set, so that with a value a rank each is a node with one GPU, which LOCAL_RANK and LOCAL_WORLD_SIZE say too.
Between nodes NCCL has sockets, here on loopback; what needs the same host, NVLink or a real network is off. Channels
are few, as the ranks share the multiprocessors, and a kernel of one rank must not keep that of another waiting.
"""


def environment_of(rank: int, ranks: int, port: int, *, on_gpu: bool) -> dict[str, str]:
    """Returns the environment of a rank of a job."""
    variables = rank_environment(os.environ, rank, ranks, port, threads=1)
    return variables | ONE_GPU | {"NCCL_HOSTID": f"rank-{rank}"} if on_gpu else variables


class Job:
    """Processes of `gpu_rank.py` in a folder of their own, killed at the end of the context."""

    def __init__(self, folder: Path, ranks: int, *, on_gpu: bool) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._kept = contextlib.ExitStack()
        port = self._kept.enter_context(reserved_port(None))
        self._begun = 0.0
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(ranks):
            with self.log_of(rank).open("w") as log:
                command = [sys.executable, "-m", "benchmarks.gpu_rank", str(folder), "cuda" if on_gpu else "cpu"]
                environment = environment_of(rank, ranks, port, on_gpu=on_gpu)
                started = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            self.processes.append(started)

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.processes)

    def log_of(self, rank: int) -> Path:
        """The file with the output of a rank."""
        return self.folder / f"rank-{rank}.log"

    def begin(self, tasks: list[dict[str, Any]]) -> None:
        """Lets the ranks run tasks once all have imported, which this waits for."""
        self.wait_for(lambda: len(list(self.folder.glob("ready-*"))) == self.ranks)
        part = self.folder / "part.json"
        part.write_text(json.dumps(tasks))
        part.rename(self.folder / "tasks.json")
        self._begun = time.monotonic()

    def wait_for(self, condition: Callable[[], bool], limit_s: float = 600.0) -> None:
        """Waits until a condition is true. Raises: RuntimeError: The job failed before, or the time is over."""
        ends = time.monotonic() + limit_s
        while not condition():
            if any(code not in (None, EXIT_OK) for code in self.codes()):
                raise RuntimeError(f"ranks ended with {self.codes()}: {self.last_lines(0)}")
            if time.monotonic() > ends:
                raise RuntimeError(f"waited for {limit_s:.0f} s: {self.last_lines(0)}")
            time.sleep(POLL_S)

    def codes(self) -> list[int | None]:
        """Returns the exit code of each rank; None: it runs."""
        return [process.poll() for process in self.processes]

    def send(self, number: signal.Signals, rank: int) -> None:
        """Sends a signal to a rank."""
        self.processes[rank].send_signal(number)

    def wait_for_rank(self, rank: int, limit_s: float) -> tuple[int | None, float]:
        """Waits for the end of a rank; returns its code, None after the limit, and the seconds."""
        begun = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(limit_s)
        return self.processes[rank].poll(), time.monotonic() - begun

    def wait_for_row(self, count: int, limit_s: float) -> list[dict[str, Any]]:
        """Waits for more rows than `count`, the end of the job, or the limit; returns the rows so far."""
        ends = time.monotonic() + limit_s
        while len(rows := self.rows()) <= count and None in (codes := self.codes()) and time.monotonic() < ends:
            if any(code not in (None, EXIT_OK, EXIT_RESUME_ME) for code in codes):
                ends = min(ends, time.monotonic() + LAST_WORDS_S)
            time.sleep(POLL_S)
        return self.rows() if len(rows) <= count else rows

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows that rank 0 has written."""
        path = self.folder / "done.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def last_lines(self, rank: int) -> str:
        """Returns the last lines of a rank's output."""
        return "\n".join(self.log_of(rank).read_text(errors="replace").splitlines()[-LAST_LINES:])

    def errors(self) -> Iterator[str]:
        """Yields the error lines of rank 0: `pretrain` prints each condition of a user as one."""
        for line in self.log_of(0).read_text(errors="replace").splitlines():
            if line.startswith("error: "):
                yield line.removeprefix("error: ")

    def close(self) -> None:
        """Kills the ranks that still run, stopped ones too."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._kept.close()


class Pool:
    """Jobs by name that import while another one runs; each has a folder of its own."""

    def __init__(self, folder: Path, *, on_gpu: bool) -> None:
        self._folder, self._on_gpu = folder, on_gpu
        self._number = 0
        self._idle: dict[str, Job] = {}

    def prepare(self, name: str, ranks: int) -> None:
        """Starts a job for the next `take` of its name."""
        if name not in self._idle:
            self._idle[name] = self._start(name, ranks)

    def take(self, name: str, ranks: int) -> Job:
        """Returns a job that has run nothing yet; the caller closes it."""
        return self._idle.pop(name, None) or self._start(name, ranks)

    def _start(self, name: str, ranks: int) -> Job:
        self._number += 1
        return Job(self._folder / f"{self._number:02d}-{name}", ranks, on_gpu=self._on_gpu)

    def close(self) -> None:
        """Ends the jobs that were not taken."""
        for job in self._idle.values():
            job.close()
