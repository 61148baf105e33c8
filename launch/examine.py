"""The doctor's quick look at every node of a job, before its ranks are started: seconds, where a job waited for days.

    srun, once a node: pretrain doctor CONFIG --quick --json  ->  a file each  ->  launch/doctor.jsonl
    ->  pretrain doctor --compare

It runs in processes of its own: `launch` imports none of it. A file each, because srun cuts a line of more than 1 KiB
into pieces, and those of several nodes come mixed.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.spec import LaunchSpec
from pretrain.utils.io import write_file

LIMIT_S = 120.0
TRIED_OUT = {"hostname", "interfaces", "loopback"}
"""Checks whose failure keeps nobody from training: the rendezvous finds an address by trying."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What keeps a job from training.

    Attributes:
        code: Exit code.
        reason: One line: node, check, what was found.
    """

    code: int
    reason: str


def examine_nodes(spec: LaunchSpec, step: Sequence[str], world_size: int) -> Finding | None:
    """Lets the doctor look at every node; returns what keeps the job from training, if anything does.

    Args:
        spec: The job.
        step: srun, up to the program that is to run once a node.
        world_size: Ranks of all nodes.

    A doctor that does not answer in time keeps nobody from training.
    """
    doctor = [spec.python, "-m", "pretrain", "doctor"]
    outputs = [spec.folder.launch / f"doctor-{task}.out" for task in range(world_size // spec.ranks_per_node)]
    own_files = (f"--output={spec.folder.launch}/doctor-%t.out", "--open-mode=truncate", "--error=all")
    ended = _run([*step, *own_files, *doctor, str(spec.config), "--quick", "--json", f"--ranks={world_size}"])
    looked = "".join(_take(path) for path in outputs)
    if ended is None:
        return None
    write_file(spec.folder.launch / "doctor.jsonl", looked.encode())
    found = first_failure(looked)
    if found is not None:
        return found
    compared = _run([*doctor, "--compare", str(spec.folder.launch / "doctor.jsonl"), "--json"])
    return first_failure(compared or "")


def first_failure(output: str) -> Finding | None:
    """Returns the first check that fails in reports of `doctor --json`, a line each; other lines are skipped."""
    for line in output.splitlines():
        try:
            report = json.loads(line)
            failed = [check for check in report["checks"] if check["status"] == "fail"]
            for check in (check for check in failed if check["name"] not in TRIED_OUT):
                fix = f"; {check['fix']}" if check.get("fix") else ""
                reason = f"{report['host']}: {check['name']}: {check['detail']}{fix}"
                return Finding(int(check["exit_code"]), reason)
        except (ValueError, TypeError, LookupError):
            continue
    return None


def _take(path: Path) -> str:
    """Returns what is in a file, and removes it; a node that has said nothing has none."""
    with contextlib.suppress(OSError):
        said = path.read_text(encoding="utf-8", errors="replace")
        path.unlink()
        return said
    return ""


def _run(command: Sequence[str]) -> str | None:
    """Returns what a command prints; None where it does not end in time."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, env=os.environ,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    return done.stdout
