"""A process that has imported what takes seconds, and forks: what tests start, but for starting itself, starts there.

    pids = SHARED.start("tests.helpers.warm_jobs:run", [{...}], [(stdout, stderr)])     one fork for each call
    SHARED.wait(pids)                                                                   -> their exit codes
    SHARED.poll(pids)                                                                   -> of those that have ended

All tests of a pytest process share one. A request is a line of JSON, and so is its answer. Forking after the imports is
safe here: they start no thread (checked before each fork), nothing has opened a process group yet, and what a fork does
is done there. A fork dies with the server, and the server ends with the process that asks.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from pretrain.utils.process import die_with
from pretrain_launch.local import STOP_SIGNALS

ROOT = Path(__file__).resolve().parents[2]
SOURCE_PATH = os.pathsep.join([str(ROOT), str(ROOT / "launch")])
"""PYTHONPATH of a process that imports this tree: `pretrain` and `pretrain_launch`."""
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
"""Environment of a server's imports: not that of the test that happens to ask first."""


class ForkServer:
    """The client's side; the process is started by the first request, and ends with this one, from which it reads.

    Args:
        modules: What it imports before it forks any.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._process: subprocess.Popen[str] | None = None

    def start(
        self,
        function: str,
        calls: Sequence[dict[str, Any]],
        outputs: Sequence[tuple[Path, Path]],
        *,
        holds_signals: bool = False,
    ) -> list[int]:
        """Calls a function in a fork for each of `calls`, with the environment that this process has now.

        Args:
            function: `module:function`, which returns the exit code of its fork.
            calls: Keyword arguments of each fork, as JSON.
            outputs: The files that take stdout and stderr of each; may be one.
            holds_signals: Whether stop signals are held back, as in the rank of a launcher, until they can be answered.

        Returns:
            The process ids.
        """
        paths = [[str(path) for path in pair] for pair in outputs]
        started = {"environment": {**os.environ, "OMP_NUM_THREADS": "1"}, "holds_signals": holds_signals}
        return self._ask({"do": "start", "function": function, "calls": list(calls), "outputs": paths} | started)

    def wait(self, pids: list[int]) -> list[int]:
        """Waits for forks; returns their exit codes, negative where a signal has ended one."""
        return self._ask({"do": "wait", "pids": pids})

    def poll(self, pids: list[int]) -> dict[int, int]:
        """Returns the exit codes of the forks that have ended since they were asked for, by process id."""
        return {int(pid): code for pid, code in self._ask({"do": "poll", "pids": pids}).items()}

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _ask(self, request: dict[str, Any]) -> Any:
        process = self._process = self._process or subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fork_server", *self._modules],
            cwd=ROOT,
            env=_ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())
        except BaseException:  # by a timeout too: its answer would be taken for that of the next request
            self._process = None
            process.kill()
            process.communicate()
            raise


SHARED = ForkServer(
    "accelerate.optimizer",
    "deepspeed",
    "deepspeed.comm.mori",  # this and the next two its engine imports when it starts; the last one brings a compiler
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._dynamo",  # accelerate imports it when it is used
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "pretrain.artifact",
    "pretrain.cli.commands",
    "pretrain.preparation.prepare",
    "pretrain.generation.text",
    "pretrain.training.run",
    "pytest",  # what ranks call is in modules of tests
    "rich.console",
    "tests.helpers.ranks",
    "tests.helpers.topologies",
    "tests.helpers.warm_jobs",
)
"""For what trains, generates or evaluates."""


def serve(modules: list[str]) -> None:
    """Forks and tells how forks ended, as asked on stdin."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed looks for others at its import, in vain
    sys.modules["mlflow"] = cast(ModuleType, None)  # DeepSpeed imports it, and it starts a thread
    gc.disable()  # imports leave no garbage
    for module in modules:
        importlib.import_module(module)
    del os.environ["DS_ACCELERATOR"], sys.modules["mlflow"]
    gc.freeze()  # else each fork would copy what it only looks at
    gc.enable()
    answers = {"start": _start, "wait": _wait, "poll": _poll}
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(answers[request.pop("do")](**request)), flush=True)


def _start(
    function: str,
    calls: list[dict[str, Any]],
    outputs: list[tuple[str, str]],
    environment: dict[str, str],
    holds_signals: bool,
) -> list[int]:
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1 and threading.active_count() == 1, "a fork would leave locks of other threads behind"
    server, pids = os.getpid(), []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS if holds_signals else ())
    for call, files in zip(calls, outputs, strict=True):
        pids.append(os.fork())
        if not pids[-1]:
            _run_fork(server, function, call, files, environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pids


def _run_fork(
    server: int, function: str, call: dict[str, Any], files: tuple[str, str], environment: dict[str, str]
) -> None:
    """The life of a fork."""
    code = 70
    try:
        die_with(server)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # not the pipe of requests
        for number, path in enumerate(files, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.environ.clear()
        os.environ.update(environment)
        module, _, name = function.partition(":")
        code = getattr(importlib.import_module(module), name)(**call)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _poll(pids: list[int]) -> dict[int, int]:
    ended = {}
    for pid in pids:
        with suppress(ChildProcessError):  # asked for before
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


if __name__ == "__main__":
    serve(sys.argv[1:])
