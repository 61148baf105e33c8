"""Processes that the doctor starts on this machine: ranks for one task, and `pretrain` commands.

run_ranks("module:task", 2, {...})  ->  twice `spawn module:task {...} OUTPUT`  ->  JSON in OUTPUT
run_command(["train", ...], log)    ->  exit code, stdout, first error
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pretrain import dist
from pretrain.errors import EXIT_OK, LaunchError, PretrainError
from pretrain.utils.log import redact
from pretrain.utils.net import reserved_port
from pretrain.utils.process import guard_streams
from pretrain.utils.safe_read import parse_json

WITHIN_S = 1800.0


@dataclass(frozen=True, slots=True)
class Trial:
    """Exit code of a command, its stdout, and the first error that it printed if it failed."""

    exit_code: int
    output: str
    error: str


def run_command(arguments: Sequence[str], log: Path, within_s: float = WITHIN_S) -> Trial:
    """Runs `pretrain ARGUMENTS`, with stderr in `log`. Raises: subprocess.TimeoutExpired."""
    return end_of(start_command(arguments, log, os.environ), log, within_s)


def start_command(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts `pretrain ARGUMENTS`, with stderr in `log`, stdout in a pipe, and without wandb."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # With these variables a rank would look for torchrun's agent.
    rest = {name: value for name, value in environment.items() if not name.startswith("TORCHELASTIC_")}
    return _start(["pretrain", *arguments], log, {**rest, "WANDB_MODE": "disabled"}, subprocess.PIPE)


def end_of(process: subprocess.Popen[bytes], log: Path, within_s: float = WITHIN_S) -> Trial:
    """Waits for a command, then kills it. Raises: subprocess.TimeoutExpired."""
    try:
        output, _ = process.communicate(timeout=within_s)
    finally:
        process.kill()
        process.wait()
    error = _first_error(log) if process.returncode else ""
    return Trial(process.returncode, output.decode(errors="replace"), error)


def run_ranks(task: str, num_ranks: int, arguments: dict[str, Any], within_s: float) -> Any:
    """Runs a function of (world, arguments), "module:name", on ranks; returns the answer of rank 0.

    Raises: LaunchError: Rank 0 gave no answer in time; quotes the first error of a rank.
    """
    with tempfile.TemporaryDirectory() as place, reserved_port(None) as port:
        output = Path(place) / "answer.json"
        logs = [Path(place) / f"{rank}.log" for rank in range(num_ranks)]
        command = ["pretrain.doctor.spawn", task, json.dumps(arguments), str(output)]
        shared = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1"}
        processes = []
        for rank, log in enumerate(logs):
            numbers = {**shared, "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            environment |= {name: str(value) for name, value in numbers.items()}
            processes.append(_start(command, log, environment, subprocess.DEVNULL))
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
            return parse_json(output.read_text(encoding="utf-8"))
        raise LaunchError(_first_error(*logs) or f"{num_ranks} ranks did not end within {within_s:.0f} s")


def _start(command: Sequence[str], log: Path, environment: Mapping[str, str], stdout: int) -> subprocess.Popen[bytes]:
    """Starts `python -m COMMAND` with stderr in `log`."""
    with log.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stream,
        )


def _first_error(*logs: Path) -> str:
    """Returns the first error in the logs, else the last line of the first log that has one."""
    texts = [log.read_text(encoding="utf-8", errors="replace").strip().splitlines() for log in logs]
    lines = [line.strip() for text in texts for line in text]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    errors += [text[-1].strip() for text in texts if text]
    return redact(errors[0]) if errors else ""


def main() -> None:
    """Runs the task as one rank."""
    guard_streams()
    task, arguments, output = sys.argv[1], parse_json(sys.argv[2]), Path(sys.argv[3])
    world = dist.read_world()
    code = EXIT_OK
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
