"""The examination of hosts: each by itself, without torch, then all ranks together.

    look      packages -> machine -> network -> file system of the run folder -> data -> wandb
    examine   alone: look, then start ranks here, which meet and end
              a rank of torchrun or srun: one process a host looks; then all meet

A batch script runs `look` on every node: `pretrain doctor --quick --json CONFIG`, under a second.
"""

import socket
from dataclasses import replace
from pathlib import Path

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.run import RunConfig
from pretrain.doctor.check import Check, Report, merge_reports
from pretrain.doctor.filesystem import check_files
from pretrain.doctor.machine import (
    ask_driver,
    check_compiler,
    check_cores,
    check_gpus,
    check_memory,
    check_processor_bf16,
    check_shared_memory,
    read_memory,
)
from pretrain.doctor.place import JobTopology
from pretrain.doctor.services import (
    check_data,
    check_interfaces,
    check_loopback,
    check_name,
    check_tracker_packages,
    check_wandb,
)
from pretrain.doctor.versions import check_packages, own_versions
from pretrain.errors import EXIT_USAGE, ConfigError
from pretrain.plan.cluster import Cluster
from pretrain.plan.course import checkpoints_at_once
from pretrain.plan.gpus import find_gpu
from pretrain.plan.memory import host_bytes, kept_bytes
from pretrain.plan.task import ParallelLayout, task_of


def look(config: RunConfig | None, place: JobTopology, *, is_quick: bool) -> Report:
    """Checks this host, in about a third of a second; `is_quick` skips servers."""
    host = socket.gethostname()
    versions = own_versions()
    engine = config.engine if config else PLAIN_ENGINE
    folder = config.folder if config else Path("runs")
    gpus, problem = ([], "") if engine.device == "cpu" else ask_driver()
    needed, batch_checks = _plan_ranks(config, place)
    checks = [
        check_packages(versions, config is None or not engine.on(place.size or 1).is_replicated),
        *check_gpus(engine, gpus, problem, place.local_size),
        None if gpus else check_processor_bf16(engine),
        check_cores(place.local_size),
        check_memory(needed, read_memory()),
        check_shared_memory(place.local_size),
        check_compiler(engine),
        check_name(host, place.is_one_host),
        check_interfaces(place.is_one_host),
        check_loopback(),
        *check_files(folder, _checkpoint_room(config), is_shared=not place.is_one_host),
        *batch_checks,
        *(check_data(config.data, is_quick=is_quick) if config else ()),
        check_wandb(config.tracking.wandb if config else "auto", is_quick=is_quick),
        check_tracker_packages(config.tracking) if config else None,
    ]
    return Report(host, [check for check in checks if check is not None], versions)


def _checkpoint_room(config: RunConfig | None) -> int:
    """Returns bytes that checkpoints will take beyond the ones of today."""
    if config is None:
        return 0
    task = task_of(config)
    size = 4 * task.values.saved + kept_bytes(task)
    num_today = len(list((config.folder / "checkpoints").glob("step-*")))
    return size * max(0, checkpoints_at_once(config.checkpoint, config.train.last_step) - num_today)


def _plan_ranks(config: RunConfig | None, place: JobTopology) -> tuple[int, list[Check]]:
    """Returns bytes that the ranks of this host keep in its memory, and the check of the batch."""
    if config is None or not place.size:
        return 0, []
    try:
        batch = config.plan_ranks(place.size)
    except ConfigError as error:
        return 0, [Check("batch", "fail", error.what, error.fix, EXIT_USAGE)]
    num_nodes = max(1, place.size // max(1, place.local_size))
    gpu = find_gpu("cpu" if config.engine.device == "cpu" else "h100")
    layout = ParallelLayout(config.engine, batch.micro, batch.accumulation)
    cluster = Cluster(num_nodes, place.size // num_nodes, gpu)
    needed = place.local_size * host_bytes(task_of(config), layout, cluster)
    text = f"{batch.rows} rows over {place.size} ranks: {batch.accumulation} x {batch.micro} each"
    return needed, [Check("batch", "pass", text)]


def examine(config: RunConfig | None, place: JobTopology) -> tuple[Report, bool]:
    """Returns the report of all checks, on every rank, and whether this process prints it."""
    from pretrain import dist
    from pretrain.doctor.rank_checks import meet, start_ranks

    engine = config.engine if config else PLAIN_ENGINE
    folder = config.folder if config else Path("runs")
    if not place.is_started:
        size = place.size
        if not size:
            gpus = [] if engine.device == "cpu" else ask_driver()[0]
            size = 1 if config and engine.kind == "single" else len(gpus) or 2
        # The batch is checked only if the user has given the number of ranks.
        report = look(config, replace(place, local_size=size), is_quick=False)
        return replace(report, checks=[*report.checks, *start_ranks(size, engine, folder)]), True
    world = dist.read_world()
    mine = look(config, place, is_quick=False) if world.local_rank == 0 else None
    checks, reports = meet(world, engine, folder, mine)
    hosts = ", ".join(dict.fromkeys(report.host for report in reports))
    return Report(hosts, [*merge_reports(reports), *checks], reports[0].versions), world.is_main
