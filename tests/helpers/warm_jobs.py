"""Starts the command line in forks of a process that has imported torch: one, or the ranks of a run, to be signalled.

    job = start_warm("train", "a.yaml", cwd=folder, output=folder / "said", ranks=2)
    job.send(signal.SIGTERM); job.end()                                              -> the exit code

What a launcher does beside starting ranks (supervision, quoting) is not here: `pretrain_launch.exits` judges the codes.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pretrain.errors import EXIT_RESUME_ME
from pretrain.utils.net import reserved_port
from pretrain_launch.exits import find_cause, job_code
from pretrain_launch.local import STOPPED_GRACE_S, rank_environment
from tests.helpers.fork_server import SHARED, ForkServer
from tests.helpers.waiting import stopwatch, wait_until


@dataclass
class WarmJob:
    """A process, or the ranks of a run: their ids, and where they print."""

    server: ForkServer
    pids: list[int]
    files: list[tuple[Path, Path]]
    """What takes stdout and stderr of each."""
    kept: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """What to undo at the end."""
    ended: dict[int, int] = field(default_factory=dict)
    """Code of each rank that has ended."""
    _since_stop: Callable[[], float] | None = field(default=None, init=False)

    def send(self, number: int, ranks: list[int] | None = None) -> None:
        """Sends a signal to the ranks that still run; None: to all. Numbers of others may be given again."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.ended and (ranks is None or rank in ranks):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def is_running(self) -> bool:
        """Whether a rank runs yet."""
        ranks = {pid: rank for rank, pid in enumerate(self.pids) if rank not in self.ended}
        self.ended |= {ranks[pid]: code for pid, code in self.server.poll(list(ranks)).items()}
        return len(self.ended) < len(self.pids)

    def end(self) -> int:
        """Waits for all ranks; returns the exit code that a launcher would."""
        try:
            wait_until(
                self._has_ended, f"the processes {self.pids} end", say=lambda: self.output()[-8000:], pause_s=0.02
            )
        finally:
            self.send(signal.SIGKILL)
            self.kept.close()
        return job_code(find_cause(self.ended), self.ended)

    def _has_ended(self) -> bool:
        if not self.is_running():
            return True
        if EXIT_RESUME_ME in self.ended.values():  # a launcher stops the others then
            self._since_stop = self._since_stop or stopwatch()
            if self._since_stop() > STOPPED_GRACE_S:
                self.send(signal.SIGTERM)
                self._since_stop = lambda: 0.0
        return False

    def output(self) -> str:
        """What all of them have printed."""
        return "".join(path.read_text(errors="replace") for pair in self.files for path in pair)


def start_warm(
    *arguments: str,
    cwd: Path,
    output: Path,
    ranks: int | None = None,
    server: ForkServer = SHARED,
    without: Sequence[str] = (),
    stdin: Path | str = os.devnull,
    **environment: str,
) -> WarmJob:
    """Starts `pretrain ARGUMENTS`.

    Args:
        arguments: Of the command line.
        cwd: Where.
        output: A folder that takes what is printed.
        ranks: How many ranks; None: a process that is none.
        server: Which process forks.
        without: Modules that the command must not import.
        stdin: What it reads: a terminal, or a pipe that has a name.
        environment: Laid over the environment; PYTHONPATH too, as if Python had been started with it.
    """
    output.mkdir(exist_ok=True)
    job, count = WarmJob(server, [], []), len(list(output.iterdir()))
    places: list[dict[str, int]] = [{}]
    if ranks is not None:
        port = job.kept.enter_context(reserved_port(None))
        places = [{"rank": rank, "world_size": ranks, "port": port} for rank in range(ranks)]
    for number in range(len(places)):
        job.files.append((output / f"{count}-{number}.out", output / f"{count}-{number}.err"))
        for path in job.files[-1]:
            path.touch()
    common = {"arguments": arguments, "cwd": str(cwd), "environment": environment, "without": without}
    common["stdin"] = str(stdin)
    calls = [{**common, "place": place} for place in places]
    job.pids = server.start("tests.helpers.warm_jobs:run", calls, job.files, holds_signals=ranks is not None)
    return job


def run(
    arguments: list[str],
    cwd: str,
    environment: dict[str, str],
    without: list[str],
    stdin: str,
    place: dict[str, int],
) -> int:
    """Is the process, in its fork."""
    from pretrain import cli

    os.dup2(os.open(stdin, os.O_RDONLY | os.O_NOCTTY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  the one of the server has its buffer
    os.chdir(cwd)
    sys.path[:0] = [item for item in environment.get("PYTHONPATH", "").split(os.pathsep) if item]
    os.environ.update(environment)
    if place:
        os.environ.update(rank_environment(os.environ, **place, threads=1))
    code = cli.run(arguments)
    assert not (imported := set(without) & set(sys.modules)), f"imported: {imported}"
    return code
