"""Small trial runs of a config: a few steps of two micro-batches, fewer layers if all do not fit.

Widths, heads, lengths, micro-batch, objective, optimizer, precision and data stay the same.
"""

import json
import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.config.run import RunConfig
from pretrain.doctor.machine import ask_driver, read_memory
from pretrain.doctor.place import JobTopology
from pretrain.kinds.trackers import NO_TRACKERS
from pretrain.plan.cluster import Cluster
from pretrain.plan.gpus import GPUS, name_of_device
from pretrain.plan.memory import memory_limit, rank_memory
from pretrain.plan.task import ParallelLayout, task_of

_SHARE = 0.6  # of the memory that the predicted use of a small run may reach
_ACCUMULATION = 2


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """A trial: its config and ranks."""

    config: str  # path or name
    overrides: list[str]  # of the command line
    loaded: RunConfig
    cluster: Cluster
    folder: Path  # of all runs of the trial
    place: JobTopology  # of this process in a job; outside of one, the ranks are started here


def ask(
    config: str, overrides: list[str], loaded: RunConfig, ranks: int | None, folder: Path | None, place: JobTopology
) -> TrialOptions:
    """Returns the options of a trial on ranks of this machine, or of this process's job.

    `ranks` of None: one per GPU, else two; one with engine.kind=single. `folder` of None: a new
    one next to the run, the same for all ranks of a job.
    """
    gpus = [] if loaded.engine.device == "cpu" else ask_driver()[0]
    num_nodes = 1
    local = ranks or (1 if loaded.engine.kind == "single" else len(gpus) or 2)
    token = secrets.token_hex(6)
    if place.is_started:
        local = place.local_size
        num_nodes = place.size // local
        # Of a step: a second selftest in an allocation must not go on with the runs of the first.
        job = ".".join(os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        token = f"{job}-{os.environ['MASTER_PORT']}"
    # A GPU of an unknown name still reports its memory.
    name = name_of_device(gpus[0].name) if gpus else "cpu"
    memory = gpus[0].memory_bytes if gpus else read_memory()[0] / local
    gpu = replace(GPUS[name or "h100"], memory_gib=memory / 2**30)
    answer_folder = loaded.folder.parent / f".doctor-{token}"
    return TrialOptions(config, overrides, loaded, Cluster(num_nodes, local, gpu), folder or answer_folder, place)


def fewer_layers(config: RunConfig, cluster: Cluster, zero_stage: int) -> dict[str, int]:
    """Returns layers of each stack with which a ZeRO stage fits: all, a half, a quarter, ..."""
    stacks = {name: getattr(config.model, name) for name in config.stacks}
    layers = {name: int(stack.layers) for name, stack in stacks.items()}
    plain = {"zero_stage": zero_stage, "offload_optimizer": "none", "offload_params": "none"}
    layout = ParallelLayout(config.engine.model_copy(update=plain), config.batch.micro, _ACCUMULATION)
    while True:
        update = {name: stack.model_copy(update={"layers": layers[name]}) for name, stack in stacks.items()}
        small = config.model_copy(update={"model": config.model.model_copy(update=update)})
        needed = rank_memory(task_of(small), layout, cluster).total
        if needed <= _SHARE * memory_limit(cluster) or max(layers.values()) == 1:
            return layers
        layers = {name: max(1, count // 2) for name, count in layers.items()}


def small_overrides(
    config: RunConfig, cluster: Cluster, folder: Path, name: str, steps: int, zero_stage: int
) -> list[str]:
    """Returns the overrides of a small run, without `engine.zero_stage`."""
    layers = fewer_layers(config, cluster, zero_stage)
    tokens = config.batch.seq_len * config.batch.micro * cluster.size * _ACCUMULATION
    full = {stack: int(getattr(config.model, stack).layers) for stack in config.stacks}
    return [
        f"run.dir={folder}",
        f"run.name={name}",
        f"batch.global_tokens={tokens}",
        *config.even_steps(),
        f"train.stop_after={min(steps, config.train.steps)}",
        "eval.every_steps=0",
        "checkpoint.every_steps=0",
        "tracking.log_every_steps=1",
        *(f"tracking.{key}={json.dumps(value)}" for key, value in NO_TRACKERS.items()),
        *(f"model.{stack}.layers={count}" for stack, count in layers.items() if count != full[stack]),
    ]
