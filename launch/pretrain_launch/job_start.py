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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import ConfigError, LaunchError, PretrainError
from pretrain.run.folder import end_attempt, slurm_facts
from pretrain.utils.io import write_file
from pretrain_launch.slurm_tools import host_names
from pretrain_launch.spec import LaunchSpec

LIMIT_S = 120.0

TRIED_OUT = {"hostname", "interfaces", "loopback"}

"""Checks whose failure does not prevent training: the rendezvous finds an address by trying."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that prevents a job from training.

    Attributes:
        code: Exit code.
        reason: One line: node, check, what was found.
    """

    code: int
    reason: str


def examine_nodes(spec: LaunchSpec, step: Sequence[str], world_size: int) -> Finding | None:
    """Lets the doctor look at every node; returns the first problem that prevents training.

    Args:
        spec: The job.
        step: Arguments of srun, up to the program that runs once per node.
        world_size: Ranks of all nodes.

    A doctor that times out does not prevent training.
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


# One start of a Slurm job, as the driver finds it in its environment, and what the controller says
# of it.


@dataclass(frozen=True, slots=True)
class JobStart:
    """A start of a job.

    Attributes:
        job: Number of the job; each element of an array has one.
        array: `job_task` of an element of an array. Its job's number may be that of the whole array.
        restart: How often Slurm has restarted it.
        nodes: That it has, this one first.
    """

    job: str
    array: str | None
    restart: int
    nodes: tuple[str, ...]

    @property
    def handle(self) -> str:
        """Id of the job for Slurm's commands."""
        return self.array or self.job


def read_start(environment: Mapping[str, str]) -> JobStart:
    """Reads what Slurm has set for a batch script. Raises: LaunchError, where it has not."""
    facts = slurm_facts(environment).get("slurm")
    if facts is None or not environment.get("SLURM_JOB_NODELIST") or not environment.get("SLURMD_NODENAME"):
        fix = "submit it with `pretrain launch slurm`"
        raise LaunchError("not a Slurm job", where="pretrain_launch.job", fix=fix)
    here = environment["SLURMD_NODENAME"]
    nodes = host_names(environment["SLURM_JOB_NODELIST"])
    return JobStart(facts["job"], facts["array"], facts["restart"], (here, *(node for node in nodes if node != here)))


def find_spec(target: Path, environment: Mapping[str, str]) -> Path:
    """Returns the spec of this job: `target`, or of the specs that it lists that of this element of an array.

    Raises:
        ConfigError: There is no such element.
    """
    task = environment.get("SLURM_ARRAY_TASK_ID")
    if task is None:
        return target
    try:
        return Path(json.loads(target.read_text(encoding="utf-8"))["specs"][int(task)])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(f"lists no element {task}", where=str(target), fix="submit the array again") from None


def choose_nodes(spec: LaunchSpec, nodes: Sequence[str]) -> tuple[str, ...]:
    """Returns the nodes to train on: as many of those that there are as divide the batch.

    Raises:
        ConfigError: No such number; names those that would do.
    """
    counts = [count for count in spec.node_counts if count <= len(nodes)]
    if not counts:
        valid = ", ".join(str(count) for count in spec.node_counts)
        raise ConfigError(
            f"{len(nodes)} nodes of {spec.ranks_per_node} ranks do not divide the batch",
            where="rendezvous",
            fix=f"it can be trained on {valid} nodes",
        )
    return tuple(nodes[: max(counts)])


def was_cancelled(job: Mapping[str, str] | None, restart: int) -> bool:
    """Returns whether the user has ended the job, by what `scontrol show job` says of one that still runs its script.

    A job that ends is COMPLETING, whatever ends it: one that Slurm requeues has its count of restarts raised already,
    one at its time limit says so.
    """
    if job is None or is_requeued(job, restart):
        return False
    state, reason = job.get("JobState", ""), job.get("Reason", "")
    return state == "CANCELLED" or (state == "COMPLETING" and reason != "TimeLimit")


def is_requeued(job: Mapping[str, str] | None, restart: int) -> bool:
    """Returns whether Slurm is putting the job back into the queue by itself."""
    count = (job or {}).get("Restarts", "")
    return (count.isdecimal() and int(count) > restart) or (job or {}).get("JobState") in ("PENDING", "REQUEUED")


def step_command(spec: LaunchSpec, nodes: Sequence[str], tasks: int) -> list[str]:
    """Returns srun up to the program of a step. Pure.

    Args:
        spec: The job.
        nodes: Nodes of the step.
        tasks: Tasks per node.
    """
    site = spec.site
    options = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes) * tasks}", f"--ntasks-per-node={tasks}"]
    options += [f"--nodelist={','.join(nodes)}", "--export=ALL", "--cpu-bind=none", "--quiet"]
    if site.cpus_per_node:
        options.append(f"--cpus-per-task={max(1, site.cpus_per_node // tasks)}")
    if site.container:
        options.append(f"--container-image={site.container.image}")
        if site.container.mounts:
            options.append(f"--container-mounts={','.join(site.container.mounts)}")
        options.append(f"--container-workdir={spec.cwd}")
    return ["srun", *options, *site.srun]


def note_attempt(spec: LaunchSpec, start: JobStart, code: int, reason: str) -> str:
    """Writes into run.json how this start ended, where rank 0 could not, or knew less; returns the reason to go by.

    Args:
        spec: The job.
        start: This start; attempts of other starts are left alone.
        code: Exit code of the job.
        reason: Cause known to the launcher; empty: rank 0 knows better.
    """
    try:
        attempt = spec.folder.read_record()["attempts"][-1]
        mine = attempt.get("slurm") or {}
        if (mine.get("job"), mine.get("restart")) != (start.job, start.restart):
            return reason
        if "ended" in attempt and attempt.get("exit_code") == code:
            return str(attempt.get("reason") or reason)
        end_attempt(spec.folder, {"exit_code": code, "reason": reason or f"exit code {code}"})
    except PretrainError:
        pass
    return reason
