"""One start of a Slurm job, as the driver finds it in its environment, and what the controller says of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.slurm_tools import host_names
from launch.spec import LaunchSpec
from pretrain.errors import ConfigError, LaunchError, PretrainError
from pretrain.run.folder import end_attempt, slurm_facts


@dataclass(frozen=True, slots=True)
class Start:
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
        """What Slurm's commands call it, and nothing else."""
        return self.array or self.job


def read_start(environment: Mapping[str, str]) -> Start:
    """Reads what Slurm has set for a batch script. Raises: LaunchError, where it has not."""
    facts = slurm_facts(environment).get("slurm")
    if facts is None or not environment.get("SLURM_JOB_NODELIST") or not environment.get("SLURMD_NODENAME"):
        raise LaunchError("this is no job of Slurm's", where="launch.job", fix="submit it with `pretrain launch slurm`")
    here = environment["SLURMD_NODENAME"]
    nodes = host_names(environment["SLURM_JOB_NODELIST"])
    return Start(facts["job"], facts["array"], facts["restart"], (here, *(node for node in nodes if node != here)))


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
        nodes: Of the step.
        tasks: Of each node.
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


def note_attempt(spec: LaunchSpec, start: Start, code: int, reason: str) -> str:
    """Writes into run.json how this start ended, where rank 0 could not, or knew less; returns the reason to go by.

    Args:
        spec: The job.
        start: This one: an attempt of another start is left alone.
        code: Of the job.
        reason: Of it, as far as the launcher knows; empty: rank 0 knows better.
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
