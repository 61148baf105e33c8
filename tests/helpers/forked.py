"""Runs a test function on real ranks over gloo, forked from one process that has imported torch and DeepSpeed.

    with RankServer() as ranks:
        ranks("tests.helpers.topologies:save_layouts", 2, {"layouts": [...]})  ->  [rank 0's result, rank 1's]

The same contract as `tests/helpers/ranks.py`, without the seconds that a process takes to import. Forking after the
imports is safe here: they start no thread (checked before each fork), nothing has run in parallel or opened a process
group yet, and each rank has one thread.
"""

import importlib
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from launch.command import rank_environment
from launch.local import choose_port
from tests.helpers.fork_server import ForkServer


class RankServer(ForkServer):
    """The process that forks; one call at a time."""

    def __init__(self) -> None:
        super().__init__("tests.helpers.forked", DS_ACCELERATOR="cpu")

    def __call__(self, function: str, world_size: int, arguments: dict[str, Any], timeout_s: float = 150) -> list[Any]:
        """Calls `module:function` in `world_size` forks at once, as `function(world, **arguments)`."""
        with tempfile.TemporaryDirectory() as folder:
            request = {"function": function, "arguments": arguments, "folder": folder}
            request |= {"world_size": world_size, "port": choose_port(None), "timeout_s": timeout_s}
            codes = self.ask(request)
            for rank, code in sorted(enumerate(codes), key=lambda item: item[1] != 70):
                output = (Path(folder) / f"{rank}.out").read_text(errors="replace")
                assert code == 0, f"rank {rank} of {function} ended with {code}:\n{output[-6000:]}"
            return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world_size)]


def serve() -> None:
    """Forks the ranks of each request on stdin; answers with their exit codes."""
    import accelerate  # noqa: F401 (what a rank would import first)
    import deepspeed  # noqa: F401

    import pretrain.train.run  # noqa: F401
    import tests.helpers.topologies  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        threads = list(Path("/proc/self/task").iterdir())
        assert len(threads) == 1 and threading.active_count() == 1, "a fork would leave locks of other threads behind"
        children = []
        for rank in range(request["world_size"]):
            child = os.fork()
            if not child:
                _run_rank(rank, request)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


def _run_rank(rank: int, request: dict[str, Any]) -> None:
    """The life of one rank, in its fork."""
    import signal
    import traceback

    from pretrain.dist import read_world

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # not the pipe of requests
    output = os.open(Path(request["folder"]) / f"{rank}.out", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.alarm(int(request["timeout_s"]))  # a rank that waits for a dead one ends the test, not the evening
    os.environ.update(rank_environment(os.environ, rank, request["world_size"], request["port"], threads=1))
    code = 0
    try:
        module, _, name = request["function"].partition(":")
        result = getattr(importlib.import_module(module), name)(read_world(), **request["arguments"])
        (Path(request["folder"]) / f"{rank}.json").write_text(json.dumps(result))
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
