"""Checks before submission: errors that would end a job at once, after days in the queue."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import get_args

from pretrain.config.load import load_config
from pretrain.config.resumption import check_config, check_start, fill_from
from pretrain.config.run import RunConfig
from pretrain.errors import ConfigError
from pretrain.plan.cluster import Cluster, find_calibration
from pretrain.plan.course import parse_time
from pretrain.plan.gpus import find_gpu
from pretrain.plan.params import count_parameters
from pretrain.plan.search import Problem, check_fits
from pretrain.plan.task import known_model
from pretrain.run.folder import RunDir
from pretrain.shards.dataset import check_local
from pretrain.utils.units import clock_time
from pretrain_launch.runs import last_save_s
from pretrain_launch.site import SiteConfig
from pretrain_launch.slurm_tools import partition_limits
from pretrain_launch.spec import LaunchSpec, Mode

MIN_SIGNAL_S = 60
MARGIN_S = 30  # Slurm checks time limits every 30 seconds
SAVES = 3
"""Saves that fit between signal and limit: all jobs may be saving to a shared disk at once."""
SAVE_BYTES_S = 1e9
LIMIT_S = 30 * 86_400
MAX_VARY = 1000
MODES: tuple[str, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """Options of `pretrain launch slurm`."""

    nodes: int
    time: str  # time limit of a job, as written by the user
    gpus_per_node: int | None = None  # None: as many as ranks, none on CPUs
    ranks_per_node: int | None = None  # None: one per GPU; on CPUs one
    mode: Mode = "torchrun"
    singleton: bool = False  # wait for other jobs of the same name


def plan_ranks(config: RunConfig, request: LaunchRequest) -> tuple[int, int]:
    """Returns ranks and GPUs of a node."""
    gpus = request.gpus_per_node
    if gpus is None:
        gpus = 0 if config.engine.device == "cpu" else request.ranks_per_node or 1
    return request.ranks_per_node or max(1, gpus), gpus


def plan_signal(config: RunConfig, site: SiteConfig, save_s: float | None = None) -> int:
    """Returns the seconds before its limit at which a job is asked to save."""
    if site.signal_s is not None:
        return site.signal_s
    if save_s is None:  # no save is known
        save_s = 12 * count_parameters(known_model(config.model)) / SAVE_BYTES_S
    return signal_for(save_s)


def signal_for(save_s: float) -> int:
    """Returns the time of some saves, at least a minute."""
    return min(65_535, max(MIN_SIGNAL_S, round(SAVES * save_s) + MARGIN_S))


def plan_time(text: str, signal_s: int) -> int:
    """Returns a limit in seconds. Raises: ConfigError if it is no time, or leaves none to train."""
    try:
        seconds = parse_time(text)
    except ValueError:
        raise ConfigError(
            f"{text[:40]!r} is no time",
            where="--time",
            fix="write 3d, 12h, 90m or 2-12:00:00",
        ) from None
    if not signal_s + MARGIN_S < seconds <= LIMIT_S:
        raise ConfigError(
            f"{text[:40]!r} is {seconds:.0f} s; a job saves {signal_s} s before its end",
            where="--time",
            fix=f"give at least {(signal_s + MARGIN_S) // 60 + 1}m, and at most {LIMIT_S // 86_400}d",
        )
    return round(seconds)


def node_counts(config: RunConfig, nodes: int, ranks_per_node: int, elastic: bool) -> list[int]:
    """Returns numbers of nodes to train on: with `elastic` all that divide the batch."""
    if not elastic:
        return [nodes]
    counts = []
    for count in range(1, nodes + 1):
        try:
            config.plan_ranks(count * ranks_per_node)
        except ConfigError:
            continue
        counts.append(count)
    return counts


def plan_job(
    config: RunConfig, request: LaunchRequest, site: SiteConfig, run: str, cwd: str, python: str
) -> tuple[LaunchSpec, list[Problem]]:
    """Returns the job of a run in folder `run`, and its problems that `--force` overrides.

    Raises:
        ConfigError: The time limit is no time, or leaves none to train.
    """
    ranks, gpus = plan_ranks(config, request)
    signal_s = plan_signal(config, site, last_save_s(RunDir(Path(run))))
    counts = node_counts(config, request.nodes, ranks, config.launch.elastic)
    spec = LaunchSpec(
        name=config.run.name,
        run=run,
        cwd=cwd,
        python=site.python or python,
        mode=request.mode,
        nodes=request.nodes,
        node_counts=counts or [request.nodes],
        ranks_per_node=ranks,
        gpus_per_node=gpus,
        time_s=plan_time(request.time, signal_s),
        signal_s=signal_s,
        elastic=config.launch.elastic,
        max_idle_restarts=config.launch.max_idle_restarts,
        singleton=request.singleton,
        chain=secrets.token_hex(6),
        site=site,
    )
    gpu = "cpu" if config.engine.device == "cpu" else site.gpu or "h100"
    cluster = Cluster(max(spec.node_counts), ranks, find_gpu(gpu), find_calibration(gpu))
    return spec, check_fits(config, cluster)


def check_site(config: RunConfig, spec: LaunchSpec) -> None:
    """Checks data and start, and whether the config can resume the run in its folder.

    Raises:
        DataError: Shards are missing or damaged.
        ConfigError: No model is at `init.from`; keys that define the run differ from those that it was started with.
    """
    check_local(config.data)
    check_start(config, has_saved=spec.folder.has_saved())
    if spec.folder.config.is_file():
        stored = load_config(spec.folder.config, extensions="ignore")
        check_config(stored, fill_from(stored, config), has_saved=spec.folder.has_saved())


def check_partition(spec: LaunchSpec) -> str:
    """Checks nodes and time limit of a job against its partition; returns what was found.

    Raises:
        ConfigError: No partition that the job may have allows it.
    """
    if any(option.startswith(("--partition", "--clusters")) for option in spec.site.sbatch):
        return "the partition is not checked, as an option of sbatch names it"
    limits = partition_limits()
    names = (spec.site.partition or "").split(",")
    if not limits.keys() >= set(names):
        return "the partition is not checked, as sinfo does not list it"
    fix = "ask for less, or another --partition; --force submits it"
    listed = {name: limit for name, limit in limits.items() if name}
    enough = [name for name in names if spec.elastic or limits[name].nodes >= spec.nodes]
    if not enough:
        nodes = ", ".join(f"{name} {limit.nodes}" for name, limit in listed.items())
        raise ConfigError(
            f"a job of {spec.nodes} nodes would wait for ever; the partitions have at most: {nodes}",
            where="--nodes",
            fix=fix,
        )
    minutes = -(-spec.time_s // 60)  # as Slurm counts
    if all(minutes * 60 > _limit_s(limits[name].time) for name in enough):
        times = ", ".join(f"{name} {limit.time}" for name, limit in listed.items())
        text = f"a job of {clock_time(spec.time_s)} would wait for ever"
        raise ConfigError(f"{text}; the partitions allow at most: {times}", where="--time", fix=fix)
    return "the partition allows its nodes and time"


def _limit_s(text: str) -> float:
    """Returns a limit in seconds: `1-00:00:00`; infinite for any other text."""
    try:
        return parse_time(text)
    except ConfigError:
        return math.inf


def parse_vary(options: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the overrides of each run of an array.

    `optim.lr=1e-3,3e-4` gives two runs, together with `seed=1,2,3` six, the last option varied first; none gives one.

    Raises:
        ConfigError: An option names no values, or a key that is not varied; there are too many runs.
    """
    varied = [_values(text) for text in options]
    if math.prod(len(values) for values in varied) > MAX_VARY:
        raise ConfigError(f"more than {MAX_VARY} runs", where="--vary", fix="vary fewer values")
    return list(product(*varied))


def _values(text: str) -> list[str]:
    key, separator, values = text.partition("=")
    pairs = [f"{key}={value}" for value in values.split(",") if value]
    if not separator or not key or len(pairs) < 2:
        raise ConfigError(
            f"{text[:80]!r} names no values",
            where="--vary",
            fix="for example --vary optim.lr=1e-3,3e-4",
        )
    if key.startswith("run."):
        raise ConfigError(
            f"{key} is not varied",
            where="--vary",
            fix="elements are named NAME-0, NAME-1, ...",
        )
    return pairs


def align_array(specs: Mapping[int, LaunchSpec]) -> dict[int, LaunchSpec]:
    """Returns the specs of runs as one array can have them: all save as early as the slowest has to.

    Raises:
        ConfigError: They need different nodes.
    """
    signal_s = max(spec.signal_s for spec in specs.values())
    first, *rest = (_shared(spec) for spec in specs.values())
    for shared, spec in zip(rest, list(specs.values())[1:], strict=True):
        for key, value in shared.items():
            if value != first[key]:
                raise ConfigError(
                    f"{key} is {value} for {spec.name}, {first[key]} for the first run",
                    where="launch slurm",
                    fix="runs of an array share it: submit this by itself",
                )
    return {number: spec.model_copy(update={"signal_s": signal_s}) for number, spec in specs.items()}


def _shared(spec: LaunchSpec) -> dict[str, object]:
    """Returns what the runs of an array have in common, as one call of sbatch names it for all."""
    keys = ("ranks_per_node", "gpus_per_node", "elastic")
    return {"run.dir": str(Path(spec.run).parent), **{key: getattr(spec, key) for key in keys}}
