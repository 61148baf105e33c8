"""Runs a test function on real ranks over gloo, and brings back what each returned.

    run_in_ranks("tests.integration.engine_workers:losses_of", 2, {"steps": 20})  ->  [rank 0's result, rank 1's]

The function is called as `function(world, **arguments)`; arguments and result are JSON. Every process gets one thread
and a free port, and is killed at the timeout.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from launch.command import rank_environment
from launch.local import choose_port

ROOT = Path(__file__).resolve().parents[2]


def run_in_ranks(function: str, world_size: int, arguments: dict[str, Any], timeout_s: float = 150) -> list[Any]:
    """Calls `module:function` in `world_size` processes at once."""
    port = choose_port(None)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(world_size)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.ranks", function, json.dumps(arguments), str(file)],
                cwd=ROOT,
                env=rank_environment(os.environ, rank, world_size, port, threads=1),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank, file in enumerate(files)
        ]
        try:
            outputs = [process.communicate(timeout=timeout_s)[0].decode(errors="replace") for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
            assert process.returncode == 0, f"rank {rank} of {function} failed:\n{output[-6000:]}"
        return [json.loads(file.read_text()) for file in files]


def main() -> None:
    """The process of one rank."""
    from pretrain.dist import leave, read_world

    module, _, name = sys.argv[1].partition(":")
    result = getattr(importlib.import_module(module), name)(read_world(), **json.loads(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(result))
    leave(0)


if __name__ == "__main__":
    main()
