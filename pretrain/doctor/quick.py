"""Checks of one host without torch, in well under a second.

    packages -> machine -> network -> file system of the run folder -> data -> wandb

A batch script runs it on every node before the ranks start: `pretrain doctor --quick --json CONFIG`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pretrain.config.data import plan_batch
from pretrain.config.run import RunConfig
from pretrain.doctor.check import Check, Report, this_host
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
from pretrain.doctor.services import check_data, check_interfaces, check_loopback, check_name, check_wandb
from pretrain.doctor.versions import check_packages, check_same, list_hosts, own_versions
from pretrain.errors import EXIT_USAGE, ConfigError
from pretrain.plan.cluster import Cluster, find_gpu
from pretrain.plan.course import checkpoints_at_once
from pretrain.plan.memory import state_bytes
from pretrain.plan.state_memory import host_bytes
from pretrain.plan.work import ParallelLayout, task_of


def look(config: RunConfig | None, place: JobTopology, *, is_quick: bool) -> Report:
    """Looks at this host; about a third of a second.

    Args:
        config: Config of the run. None: only checks that need none.
        place: Ranks of the job and of this host.
        is_quick: Whether to skip servers.
    """
    host, versions = this_host(), own_versions()
    engine = config.engine if config else None
    needs_deepspeed = engine is None or engine.kind == "deepspeed"
    checks = [check_packages(versions, needs_deepspeed)]
    gpus, problem = ([], "") if engine and engine.device == "cpu" else ask_driver()
    checks += check_gpus(engine, gpus, problem, place.local_size)
    if not gpus and (bf16 := check_processor_bf16(engine)) is not None:
        checks.append(bf16)
    checks += [check_cores(place.local_size), check_memory(_host_bytes(config, place), read_memory())]
    checks += [check for check in (check_shared_memory(place.local_size), check_compiler(engine)) if check is not None]
    checks += [check_name(host, place.is_one_host), check_interfaces(place.is_one_host), check_loopback()]
    folder = config.folder if config else Path("runs")
    checks += check_files(folder, _checkpoint_room(config, place), is_shared=not place.is_one_host)
    if config is not None:
        checks += [*_check_batch(config, place), *check_data(config.data, is_quick=is_quick)]
    checks.append(check_wandb(config.tracking if config else None, is_quick=is_quick))
    return Report(host, checks, versions)


def _host_bytes(config: RunConfig | None, place: JobTopology) -> int:
    """Bytes that the ranks of this host keep in its memory; 0 where that is not known."""
    if config is None or not place.size:
        return 0
    try:
        batch = plan_batch(config.batch, place.size)
    except ConfigError:
        return 0
    nodes = max(1, place.size // max(1, place.local_size))
    cluster = Cluster(nodes, place.size // nodes, find_gpu("cpu" if config.engine.device == "cpu" else "h100"))
    layout = ParallelLayout(config.engine, batch.micro, batch.accumulation)
    return place.local_size * host_bytes(task_of(config), layout, cluster)


def _checkpoint_room(config: RunConfig | None, place: JobTopology) -> int:
    """Bytes that checkpoints will take more than they do now."""
    if config is None:
        return 0
    values = task_of(config).values
    size = 4 * values.saved + state_bytes(config.optim.kind, values)
    there = len(list((config.folder / "checkpoints").glob("step-*")))
    return size * max(0, checkpoints_at_once(config.checkpoint, config.train.last_step) - there)


def _check_batch(config: RunConfig, place: JobTopology) -> list[Check]:
    if not place.size:
        return []
    try:
        batch = plan_batch(config.batch, place.size)
    except ConfigError as error:
        return [Check("batch", "fail", error.what, error.fix, EXIT_USAGE)]
    text = f"{batch.rows} rows over {place.size} ranks: {batch.accumulation} x {batch.micro} each"
    return [Check("batch", "pass", text)]


# The whole examination: every host by itself, then all ranks together.
#
# alone                     this host; then ranks are started here, which meet and end
# a rank of torchrun, srun  one process of each host looks at it; then all meet, and every rank knows all


_RANKS = 2


def examine(config: RunConfig | None, place: JobTopology) -> tuple[Report, bool]:
    """Looks at everything.

    Returns:
        What was found, the same on every rank, and whether this process is the one that tells it.

    Raises:
        LaunchError: This rank cannot meet the others.
    """
    from pretrain.doctor.rank_checks import meet, start_ranks

    engine = config.engine if config else None
    folder = config.folder if config else Path("runs")
    if not place.is_started:
        size = place.size or _default_ranks(config)
        # The batch is looked at where the user has said how many ranks there will be.
        report = look(config, replace(place, local_size=size), is_quick=False)
        return replace(report, checks=[*report.checks, *start_ranks(size, engine, folder)]), True
    from pretrain import dist

    world = dist.read_world()
    mine = look(config, place, is_quick=False) if world.local_rank == 0 else None
    checks, reports = meet(world, engine, folder, mine)
    hosts = ", ".join(dict.fromkeys(report.host for report in reports))
    return Report(hosts, [*merge_reports(reports), *checks], reports[0].versions), world.is_main


def _default_ranks(config: RunConfig | None) -> int:
    """As many as there are GPUs; else two, where the config lets two run."""
    if config is not None and config.engine.kind == "single":
        return 1
    if config is None or config.engine.device != "cpu":
        gpus, _ = ask_driver()
        if gpus:
            return len(gpus)
    return _RANKS


def merge_reports(reports: Sequence[Report]) -> list[Check]:
    """Returns the checks of several hosts as one list: what passes everywhere once, the rest with the hosts' names."""
    merged: list[Check] = []
    for name in dict.fromkeys(check.name for report in reports for check in report.checks):
        found = [(report.host, check) for report in reports for check in report.checks if check.name == name]
        bad: dict[Check, list[str]] = {}
        for host, check in found:
            if check.status != "pass" and host not in bad.setdefault(check, []):
                bad[check].append(host)
        if not bad:
            same = len({check.detail for _, check in found}) == 1
            host, first = found[0]
            more = "" if same else f"{host}: "
            merged.append(
                replace(first, detail=more + first.detail + ("" if same else f"; {len(found) - 1} more pass"))
            )
        merged += [replace(check, detail=f"{list_hosts(hosts)}: {check.detail}") for check, hosts in bad.items()]
    return merged


def compare_reports(reports: Sequence[Report]) -> list[Check]:
    """Returns what the quick looks at several hosts say together, their versions compared."""
    return [*merge_reports(reports), check_same([(report.host, report.versions) for report in reports])]
