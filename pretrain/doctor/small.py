"""Small trial runs of a config: fewer layers if they do not fit, two micro-batches a step, a few steps.

Everything else stays that of the config: widths, heads, lengths, micro-batch, objective, optimizer, precision, data.
"""

import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.config.run import RunConfig
from pretrain.doctor.machine import ask_driver, read_memory
from pretrain.doctor.place import JobTopology
from pretrain.plan.cluster import Cluster
from pretrain.plan.gpus import GPUS, name_of_device
from pretrain.plan.state_memory import memory_limit, rank_memory
from pretrain.plan.work import ParallelLayout, task_of

_SHARE = 0.6
"""Share of the memory that the predicted use of a small run may reach, so that it does not run out."""
ACCUMULATION = 2


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """A trial: its config and ranks.

    Attributes:
        config: Path or name of the config.
        overrides: Overrides of the command line.
        loaded: The resolved config.
        cluster: Nodes, ranks and their device.
        folder: Folder of all runs of the trial.
        place: Rank of this process in a job; outside of one, the ranks are started here.
    """

    config: str
    overrides: list[str]
    loaded: RunConfig
    cluster: Cluster
    folder: Path
    place: JobTopology


def ask(
    config: str, overrides: list[str], loaded: RunConfig, ranks: int | None, folder: Path | None, place: JobTopology
) -> TrialOptions:
    """Returns the options of a trial: on ranks of this machine, or of the job that this process belongs to.

    Args:
        config: Path or name of the config.
        overrides: Overrides of the command line.
        loaded: The resolved config.
        ranks: Ranks to start. None: one per GPU, else two; one with engine.kind=single.
        folder: Output folder. None: a new one beside the run, the same for all ranks of a job.
        place: Rank of this process in a job.
    """
    gpus = [] if loaded.engine.device == "cpu" else ask_driver()[0]
    found = name_of_device(gpus[0].name) if gpus else "cpu"
    gpu = GPUS[found or "h100"]
    if gpus:  # a GPU of an unknown name still reports its memory
        gpu = replace(gpu, memory_gib=gpus[0].memory_bytes / 2**30)
    local, nodes = ranks or (1 if loaded.engine.kind == "single" else len(gpus) or 2), 1
    token = secrets.token_hex(6)
    if place.is_started:
        local, nodes = place.local_size, place.size // place.local_size
        token = f"{os.environ.get('SLURM_JOB_ID', 'job')}-{os.environ['MASTER_PORT']}"
    if not gpus and (total := read_memory()[0]):
        gpu = replace(gpu, memory_gib=total / local / 2**30)
    own = loaded.folder.parent / f".doctor-{token}"
    return TrialOptions(config, overrides, loaded, Cluster(nodes, local, gpu), folder or own, place)


def fewer_layers(config: RunConfig, cluster: Cluster, zero_stage: int) -> dict[str, int]:
    """Returns the layers of each stack with which a ZeRO stage fits comfortably: all of them, or a half, a quarter, ...

    Args:
        config: Config of the run.
        cluster: Nodes, ranks and their memory.
        zero_stage: Lowest ZeRO stage of the trial.
    """
    stacks = {name: getattr(config.model, name) for name in config.stacks}
    layers = {name: int(stack.layers) for name, stack in stacks.items()}
    engine = config.engine.model_copy(
        update={"zero_stage": zero_stage, "offload_optimizer": "none", "offload_params": "none"}
    )
    while True:
        update = {name: stack.model_copy(update={"layers": layers[name]}) for name, stack in stacks.items()}
        small = config.model_copy(update={"model": config.model.model_copy(update=update)})
        needed = rank_memory(task_of(small), ParallelLayout(engine, config.batch.micro, ACCUMULATION), cluster).total
        if needed <= _SHARE * memory_limit(cluster) or max(layers.values()) == 1:
            return layers
        layers = {name: max(1, count // 2) for name, count in layers.items()}


def small_overrides(
    config: RunConfig, cluster: Cluster, folder: Path, name: str, steps: int, zero_stage: int
) -> list[str]:
    """Returns the overrides of a small run, without `engine.zero_stage`."""
    layers = fewer_layers(config, cluster, zero_stage)
    tokens = config.batch.seq_len * config.batch.micro * cluster.size * ACCUMULATION
    full = {stack: int(getattr(config.model, stack).layers) for stack in config.stacks}
    return [
        f"run.dir={folder}",
        f"run.name={name}",
        f"batch.global_tokens={tokens}",
        f"train.stop_after={min(steps, config.train.steps)}",
        "eval.every_steps=0",
        "checkpoint.every_steps=0",
        "tracking.log_every_steps=1",
        "tracking.wandb=off",
        *(f"model.{stack}.layers={count}" for stack, count in layers.items() if count != full[stack]),
    ]
