"""The whole examination: every host by itself, then all ranks together.

alone                     this host; then ranks are started here, which meet and end
a rank of torchrun, srun  one process of each host looks at it; then all meet, and every rank knows all
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pretrain.config.run import RunConfig
from pretrain.doctor.check import Check, Report
from pretrain.doctor.machine import ask_driver
from pretrain.doctor.place import Place
from pretrain.doctor.quick import look
from pretrain.doctor.versions import check_same, list_hosts

_RANKS = 2


def examine(config: RunConfig | None, place: Place) -> tuple[Report, bool]:
    """Looks at everything.

    Returns:
        What was found, the same on every rank, and whether this process is the one that tells it.

    Raises:
        LaunchError: This rank cannot meet the others.
    """
    from pretrain.doctor.ranks import meet, start_ranks

    engine = config.engine if config else None
    folder = Path(config.run.dir) / config.run.name if config else Path("runs")
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
