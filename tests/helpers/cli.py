"""Runs the command line: as a fresh process, or forked from one that has imported torch already.

    run_cli("config", "a.yaml")                    a process of its own, as a user starts it
    with WarmCli() as cli: cli("train", "a.yaml")  the same code in a fork, without the seconds that torch takes

In both, what the command printed and its exit code come back. One that hangs ends its test by a timeout.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.fork_server import ROOT, ForkServer


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """The lines that are errors, quoted ones too, without the word."""
        lines = (line.strip() for line in self.stderr.splitlines())
        return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]


def run_cli(*arguments: str, cwd: Path, timeout_s: float = 600, **environment: str) -> Result:
    """Runs `pretrain ARGUMENTS` in a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "pretrain", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return Result(done.returncode, done.stdout, done.stderr)


class WarmCli(ForkServer):
    """A process that imports torch and the trainer once and forks a child for each command."""

    def __init__(self) -> None:
        super().__init__("tests.helpers.cli")

    def __call__(self, *arguments: str, cwd: Path, **environment: str) -> Result:
        """Runs `pretrain ARGUMENTS` in a fork."""
        with tempfile.TemporaryDirectory() as folder:
            request = {"arguments": arguments, "cwd": str(cwd), "environment": environment, "output": folder}
            code = self.ask(request)
            stdout, stderr = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
        return Result(code, stdout, stderr)


def serve() -> None:
    """Forks a child for each request on stdin; answers with its exit code."""
    import accelerate.optimizer  # noqa: F401 (what a child would import first)
    import torch._dynamo  # noqa: F401 (what accelerate imports when it is used)
    import transformers.models.auto.modeling_auto
    import transformers.models.auto.tokenization_auto  # noqa: F401

    import pretrain.artifact
    import pretrain.cli.commands
    import pretrain.generate.text
    import pretrain.train.run  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            _run_child(request)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run_child(request: dict) -> None:
    from pretrain.cli import run

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # not the pipe of requests
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(request["output"]) / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    os.chdir(request["cwd"])
    os.environ.update(request["environment"])
    code = run(request["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
