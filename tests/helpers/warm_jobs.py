"""Starts `pretrain train` as ranks that are forked from one process that has imported torch, to be signalled.

    with WarmJobs() as jobs:
        job = jobs.start(config, "train.steps=40", ranks=2)     -> a WarmJob: pids, send(signal), end() -> codes
        job.send(signal.SIGTERM); job.end()

What a launcher does beside starting them (supervision, quoting) is not here: `launch/outcome.py` judges the codes.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from launch.command import rank_environment
from launch.local import STOP_SIGNALS, STOPPED_GRACE_S
from launch.outcome import find_cause, job_code
from pretrain.errors import EXIT_RESUME_ME
from pretrain.port import reserved_port
from tests.helpers.fork_server import ForkServer


@dataclass
class WarmJob:
    """The ranks of one job."""

    server: "WarmJobs"
    pids: list[int]
    folder: Path
    ended: dict[int, int] = field(default_factory=dict)

    def send(self, number: int, ranks: list[int] | None = None) -> None:
        """Sends a signal to the ranks that still run; None: to all. Numbers of others may be given again."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.ended and (ranks is None or rank in ranks):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def is_running(self) -> bool:
        """Whether a rank runs yet."""
        self.ended |= {int(rank): code for rank, code in self.server.ask({"poll": self.pids}).items()}
        return len(self.ended) < len(self.pids)

    def end(self, timeout_s: float = 600) -> int:
        """Waits for all ranks; returns the exit code that a launcher would."""
        deadline, stopped_at = time.monotonic() + timeout_s, 0.0
        while self.is_running():
            if EXIT_RESUME_ME in self.ended.values():  # a launcher stops the others then
                stopped_at = stopped_at or time.monotonic()
                if time.monotonic() > stopped_at + STOPPED_GRACE_S:
                    self.send(signal.SIGTERM, [rank for rank in range(len(self.pids)) if rank not in self.ended])
                    stopped_at = deadline
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                raise AssertionError(f"ranks {self.pids} do not end:\n{self.output()}")
            time.sleep(0.02)
        return job_code(find_cause(self.ended), self.ended)

    def output(self) -> str:
        """What the ranks have printed."""
        return "".join(path.read_text(errors="replace")[-4000:] for path in sorted(self.folder.iterdir()))


class WarmJobs(ForkServer):
    """The process that forks."""

    def __init__(self) -> None:
        super().__init__("tests.helpers.warm_jobs")
        self._kept = contextlib.ExitStack()
        self._folder = Path(self._kept.enter_context(tempfile.TemporaryDirectory()))
        self._count = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._kept.close()

    def start(self, config: Path, *overrides: str, ranks: int, modules: Path | None = None, **env: str) -> WarmJob:
        """Starts the ranks of a job.

        Args:
            config: Of the run.
            overrides: `a.b=c`.
            ranks: How many.
            modules: Folder of what `extend` names.
            env: Laid over the environment.
        """
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        port = self._kept.enter_context(reserved_port(None))
        request = {"ranks": ranks, "port": port, "arguments": ["train", str(config), *overrides]}
        pids = self.ask(request | {"folder": str(folder), "modules": str(modules or ""), "env": env})
        return WarmJob(self, [pids[str(rank)] for rank in range(ranks)], folder)


def serve() -> None:
    """Forks ranks and tells how they ended, as asked on stdin."""
    import accelerate.optimizer  # noqa: F401 (what a rank would import first)
    import torch._dynamo  # noqa: F401 (what accelerate imports when it is used)

    import pretrain.cli.commands
    import pretrain.train.run  # noqa: F401

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # as a launcher does: held back until a rank can answer
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            print(json.dumps(_poll(request["poll"])), flush=True)
            continue
        pids = {}
        for rank in range(request["ranks"]):
            pids[rank] = os.fork()
            if not pids[rank]:
                _run_rank(rank, request)
        print(json.dumps(pids), flush=True)


def _poll(pids: list[int]) -> dict[int, int]:
    """Returns the exit code of each rank that has ended since the last time."""
    ended = {}
    for rank, pid in enumerate(pids):
        with contextlib.suppress(ChildProcessError):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended[rank] = os.waitstatus_to_exitcode(status)
    return ended


def _run_rank(rank: int, request: dict) -> None:
    """The life of one rank, in its fork."""
    from pretrain.cli import run

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # not the pipe of requests
    output = os.open(Path(request["folder"]) / str(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(
        rank_environment(os.environ, rank, request["ranks"], request["port"], threads=1), **request["env"]
    )
    if request["modules"]:
        sys.path.insert(0, request["modules"])
    code = run(request["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
