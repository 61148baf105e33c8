"""Runs a test function on real ranks over gloo, and brings back what each returned.

    run_in_ranks("tests.integration.engine_workers:losses_of", 2, {"steps": 20})  ->  [rank 0's result, rank 1's]

The function is called as `function(world, **arguments)`; arguments and result are JSON. Ranks have one thread each and
meet at a free port. They are forks of one process, which all tests of a pytest process share and which has imported
torch and DeepSpeed: that takes seconds. Forking after the imports is safe here: they start no thread (checked before
each fork), nothing has opened a process group yet, and what a rank does is done in the fork.
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
from pretrain.port import reserved_port
from tests.helpers.fork_server import ForkServer


def run_in_ranks(
    function: str, world_size: int, arguments: dict[str, Any], timeout_s: float = 600, *, fresh: bool = False
) -> list[Any]:
    """Calls `module:function` in `world_size` processes at once.

    Args:
        function: What each rank calls.
        world_size: How many ranks.
        arguments: Of each call.
        timeout_s: After it a rank ends, whatever it does.
        fresh: The ranks import everything themselves.
    """
    if fresh:
        with RankServer(imports=False) as server:
            return server(function, world_size, arguments, timeout_s)
    return _shared(function, world_size, arguments, timeout_s)


class RankServer(ForkServer):
    """The process that forks; one call at a time.

    Args:
        imports: Whether it imports what ranks need before it forks any.
    """

    def __init__(self, *, imports: bool = True) -> None:
        imported = {"DS_ACCELERATOR": "cpu"} if imports else {}  # it is looked for at the import, in vain
        super().__init__("tests.helpers.ranks", IMPORTS=str(int(imports)), **imported)

    def __call__(self, function: str, world_size: int, arguments: dict[str, Any], timeout_s: float) -> list[Any]:
        """Calls `module:function` in `world_size` forks at once."""
        with tempfile.TemporaryDirectory() as folder, reserved_port(None) as port:
            request = {"function": function, "arguments": arguments, "folder": folder}
            request |= {"world_size": world_size, "port": port, "timeout_s": timeout_s}
            codes = self.ask(request)
            for rank, code in sorted(enumerate(codes), key=lambda item: item[1] != 70):
                output = (Path(folder) / f"{rank}.out").read_text(errors="replace")
                assert code == 0, f"rank {rank} of {function} ended with {code}:\n{output[-6000:]}"
            return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world_size)]


_shared = RankServer()
"""Ends with this process, from which it reads."""


def serve() -> None:
    """Forks the ranks of each request on stdin; answers with their exit codes."""
    if os.environ["IMPORTS"] == "1":
        import accelerate.optimizer  # noqa: F401 (what a rank would import first)
        import deepspeed  # noqa: F401
        import torch._dynamo  # noqa: F401 (what accelerate imports when it is used)

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
