"""Runs a test function on real ranks over gloo, and brings back what each returned.

    run_in_ranks("tests.integration.engine_workers:losses_of", 2, {"steps": 20})  ->  [rank 0's result, rank 1's]

The function is called as `function(world, **arguments)`; arguments and result are JSON. Ranks have one thread each and
meet at a free port. They are forks of one process that has imported torch and DeepSpeed (`fork_server.py`).
"""

import faulthandler
import importlib
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

from pretrain.utils.net import reserved_port
from pretrain_launch.local import rank_environment
from tests.helpers.fork_server import SHARED, ForkServer
from tests.helpers.waiting import LIMIT_S


def run_in_ranks(
    function: str,
    world_size: int,
    arguments: dict[str, Any],
    *,
    timeout: int | None = LIMIT_S,
    fresh: bool = False,
) -> list[Any]:
    """Calls `module:function` in `world_size` processes at once.

    Args:
        function: What each rank calls.
        world_size: How many ranks.
        arguments: Of each call.
        timeout: After it a rank ends, whatever it does: one that waits for a dead one ends its test, not the evening.
            None: never, for what may take longer than any event does.
        fresh: The ranks import everything themselves.
    """
    server = ForkServer() if fresh else SHARED
    with tempfile.TemporaryDirectory() as name, reserved_port(None) as port:
        folder = Path(name)
        common = {"function": function, "arguments": arguments, "folder": name, "timeout": timeout}
        calls = [{**common, "rank": rank, "world_size": world_size, "port": port} for rank in range(world_size)]
        files = [folder / f"{rank}.out" for rank in range(world_size)]
        codes = server.wait(server.start("tests.helpers.ranks:run_rank", calls, [(file, file) for file in files]))
        if fresh:
            server.close()
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        said = [f"rank {rank}, {code}:\n{files[rank].read_text(errors='replace')[-6000:]}" for rank, code in failed]
        assert not failed, "\n".join([f"the ranks of {function} ended with {codes}", *said])
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def run_rank(
    rank: int,
    world_size: int,
    port: int,
    function: str,
    arguments: dict[str, Any],
    folder: str,
    timeout: int | None,
) -> int:
    """Is a rank, in its fork."""
    from pretrain.dist import read_world

    signal.alarm(timeout or 0)
    faulthandler.enable(2)
    os.environ.update(rank_environment(os.environ, rank, world_size, port, threads=1))
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(read_world(), **arguments)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    return 0
