"""Starts ranks of this machine for one task of the doctor, and brings rank 0's answer back.

run_ranks("module:task", 2, {...})  ->  python -m pretrain.doctor.spawn module:task {...} OUTPUT, twice
                                    ->  JSON in OUTPUT
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pretrain import dist
from pretrain.errors import EXIT_OK, LaunchError, PretrainError
from pretrain.utils.net import reserved_port
from pretrain.utils.process import guard_streams


def run_ranks(task: str, num_ranks: int, arguments: dict[str, Any], within_s: float) -> Any:
    """Runs `task` on so many ranks; returns what rank 0 has to say.

    Args:
        task: Function of (world, arguments), as "module:name".
        num_ranks: Processes.
        arguments: JSON values, for each of them.
        within_s: They are killed after it.

    Raises:
        LaunchError: They did not come to an end; the first error of one is quoted.
    """
    with tempfile.TemporaryDirectory() as place, reserved_port(None) as port:
        output = Path(place) / "answer.json"
        logs = [Path(place) / f"{rank}.log" for rank in range(num_ranks)]
        command = [sys.executable, "-m", "pretrain.doctor.spawn", task, json.dumps(arguments), str(output)]
        processes = [_start(command, rank, num_ranks, port, log) for rank, log in enumerate(logs)]
        deadline = time.monotonic() + within_s
        try:
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if output.is_file():
            return json.loads(output.read_text(encoding="utf-8"))
        ends = [log.read_text(encoding="utf-8", errors="replace").strip().splitlines() for log in logs]
        said = [line.partition("error: ")[2] for end in ends for line in end if line.startswith("error: ")]
        said += [end[-1] for end in ends if end]
        raise LaunchError(said[0] if said else f"{num_ranks} ranks did not end within {within_s:.0f} s")


def _start(command: list[str], rank: int, size: int, port: int, log: Path) -> subprocess.Popen[bytes]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "MASTER_ADDR": "127.0.0.1"}
    environment |= {name: str(value) for name, value in numbers.items()}
    with log.open("wb") as stream:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
        )


def main() -> None:
    """The process of a rank."""
    guard_streams()
    task, arguments, output = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    world, code = dist.read_world(), EXIT_OK
    try:
        answer = resolve_name(task)(world, arguments)
        if world.is_main:
            part = output.with_suffix(".part")
            part.write_text(json.dumps(answer), encoding="utf-8")
            part.replace(output)
    except PretrainError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    dist.leave(code)


if __name__ == "__main__":
    main()
