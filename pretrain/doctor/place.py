"""Number of ranks, and the rank of this process, from the environment of its launcher.

torchrun, accelerate, deepspeed, `pretrain launch`   RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_*
srun, one task a rank                                SLURM_PROCID, SLURM_NTASKS, SLURM_STEP_NODELIST
without a launcher                                   the option --ranks
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pretrain.errors import LaunchError

_PORTS = range(20_000, 32_000)


@dataclass(frozen=True, slots=True)
class JobTopology:
    """Ranks of a job."""

    rank: int = 0  # of this process
    size: int = 0  # ranks of the job; 0: unknown
    local_size: int = 0  # ranks of this host; 0: unknown
    is_one_host: bool = True  # all ranks are on this host
    is_started: bool = False  # a launcher has started this process as a rank


def find_place(environment: Mapping[str, str], ranks: int | None, *, is_quick: bool) -> JobTopology:
    """Returns this process's place; `is_quick`: one process a node checks, which is no rank."""
    num_nodes = _number(environment, "SLURM_STEP_NUM_NODES") or _number(environment, "SLURM_NNODES") or 1
    if "WORLD_SIZE" in environment and not is_quick:
        size = _number(environment, "WORLD_SIZE") or 1
        local = _number(environment, "LOCAL_WORLD_SIZE") or size
        return JobTopology(_number(environment, "RANK"), size, local, local == size, size > 1)
    tasks = _number(environment, "SLURM_NTASKS")
    if "SLURM_PROCID" in environment and tasks > 1 and not is_quick:
        rank = _number(environment, "SLURM_PROCID")
        return JobTopology(rank, tasks, max(1, tasks // num_nodes), num_nodes == 1, True)
    size = ranks or 0
    return JobTopology(0, size, size // num_nodes, num_nodes == 1)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns torchrun's variables for a task of srun; empty if set, or outside of srun."""
    if "RANK" in environment or "SLURM_PROCID" not in environment:
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    # Equal on all tasks of a step, and seldom equal for two steps of a node.
    number = _number(environment, "SLURM_JOB_ID") * 7 + _number(environment, "SLURM_STEP_ID")
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment.get("SLURM_NTASKS", "1"),
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_node(nodes),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_PORTS[number % len(_PORTS)]),
    }


def first_node(nodes: str) -> str:
    """Returns the first name of Slurm's list: `gpu03` of `gpu[03-05],login`. Raises: LaunchError."""
    match = re.match(r"([A-Za-z0-9._-]+)(?:\[(\d+)[^\]]*\])?", nodes)
    if match is None:
        raise LaunchError(
            f"the node list {nodes!r} cannot be read",
            fix="set MASTER_ADDR to the first node's name",
        )
    return match[1] + (match[2] or "")
