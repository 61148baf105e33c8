"""`pretrain plan`."""

import math
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from pretrain.cli.options import Config, Json, Overrides, console, print_json
from pretrain.errors import ConfigError

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig
    from pretrain.plan.cluster import Cluster
    from pretrain.plan.course import StoredData


def plan_command(
    config: Config,
    overrides: Overrides = None,
    nodes: Annotated[int | None, Option(min=1, help="Nodes. Default: 1.")] = None,
    gpus_per_node: Annotated[int | None, Option(min=1, help="Default: the most up to 8 that divide the batch.")] = None,
    gpu: Annotated[str | None, Option(help="h100 (default; in fp32: cpu), a100, b200, ...")] = None,
    mfu: Annotated[float | None, Option(min=0.001, max=1.0, help="MFU to assume, 0 to 1.")] = None,
    measured: Annotated[Path | None, Option(help="Run with a measured speed.")] = None,
    time: Annotated[str | None, Option(help="Time limit of a job: 3d, 12h, 2-00:00:00.")] = None,
    disk_gb_s: Annotated[float, Option(min=0.001, help="Bandwidth of checkpoints, GB/s.")] = 2.0,
    mtbf_node_days: Annotated[float | None, Option(min=0.01, help="Mean days between failures of a node.")] = None,
    search: Annotated[bool, Option("--search", help="List the layouts that fit.")] = False,
    sweep: Annotated[str | None, Option(help="Scaling curve: nodes=1..512.")] = None,
    calibration: Annotated[
        Path | None,
        Option(help="File of `doctor --calibrate`. Default: that of the GPU, if any."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict memory, speed, disk, data and failures of a run, without a GPU.

    Example: pretrain plan configs/run/quickstart.yaml --gpu h100 --search
    """
    from pretrain.config.load import load_config
    from pretrain.plan.course import MTBF_NODE_DAYS, parse_time
    from pretrain.plan.estimate import PlanOptions, plan_facts
    from pretrain.plan.search import parse_sweep

    loaded = load_config(config, overrides or [], extensions="require")
    asked = PlanOptions(
        mfu=mfu,
        measured_tokens_s=None if measured is None else _tokens_s(measured),
        time_s=None if time is None else parse_time(time),
        disk_bytes_s=disk_gb_s * 1e9,
        mtbf_node_days=mtbf_node_days or MTBF_NODE_DAYS,
        search=search,
        sweep=() if sweep is None else tuple(parse_sweep(sweep)),
    )
    cluster = _cluster(loaded, nodes, gpus_per_node, gpu, calibration)
    facts = plan_facts(loaded, cluster, asked, find_stored(loaded))
    facts["cluster"]["assumed"] = gpu is None and calibration is None and loaded.engine.device != "cpu"
    refused = [problem for problem in facts["problems"] if problem["refuses"]]
    is_answered = "layout" in facts
    if is_answered or search or sweep:
        _print_plan(facts, as_json)
    if refused:
        options = {} if is_answered else {"--mfu": mfu, "--measured": measured, "--time": time}
        raise ConfigError(refused[0]["what"], fix=refused[0]["fix"] + _unanswered(options))


def _print_plan(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    from pretrain.plan.plan_table import show_plan

    show_plan(facts, console())


def _unanswered(options: Mapping[str, object]) -> str:
    """Returns the end of a sentence that names the options that were given."""
    names = [name for name, value in options.items() if value is not None]
    return f"; no answer to {', '.join(names)} before that" if names else ""


def _cluster(
    config: "RunConfig", nodes: int | None, per_node: int | None, gpu: str | None, calibration: Path | None
) -> "Cluster":
    """Returns the cluster; by default the most GPUs of a node, or cores of this machine, that divide the batch."""
    from pretrain.plan.cluster import Cluster, find_calibration, load_calibration
    from pretrain.plan.gpus import find_gpu

    measured = None if calibration is None else load_calibration(calibration, gpu)
    # A run in fp32 is one for a CPU unless a GPU is named: on a laptop its plan should not be that of an H100.
    engine = config.engine
    is_for_cpu = engine.device == "cpu" or (engine.device == "auto" and engine.precision == "fp32")
    default = "cpu" if is_for_cpu else "h100"
    name = gpu or (measured.gpu if measured else default)
    nodes = nodes or 1
    per_node = per_node or _ranks_a_node(config, nodes, name)
    return Cluster(nodes, per_node, find_gpu(name), measured or find_calibration(name))


def _ranks_a_node(config: "RunConfig", nodes: int, gpu: str) -> int:
    if config.engine.kind == "single":  # one process has one device, on any number of GPUs
        return 1
    shared = math.lcm(config.parallel.row_ranks, config.parallel.experts)
    ranks = config.batch.common_rows // config.batch.micro * config.parallel.row_ranks
    most = len(os.sched_getaffinity(0)) if gpu == "cpu" else 8  # ranks of this machine
    sizes = [size for size in (8, 4, 2, 1) if size <= most]
    fitting = (size for size in sizes if ranks % (size * nodes) == 0 and size * nodes % shared == 0)
    return next(fitting, sizes[0])


def find_stored(config: "RunConfig") -> "StoredData | None":
    """Returns the data of local shard folders; None where one is not there, or is an address."""
    from pretrain.plan.course import StoredData
    from pretrain.shards.dataset import open_dataset
    from pretrain.shards.index import INDEX_NAME, TOKEN_BYTES

    # An address is not opened: planning needs no network.
    paths = config.data.paths
    if any("://" in path or not (Path(path) / INDEX_NAME).is_file() for path in paths):
        return None
    dataset = open_dataset(config.data)
    splits = [source.index.split("train") for source in dataset.sources]
    tokens = sum(split.num_tokens for split in splits)
    token_bytes = TOKEN_BYTES[dataset.index.dtype]
    if dataset.index.has_images:
        # An image is one token of its shards, and a row of positions to the model.
        tokens *= config.batch.seq_len
        num_bytes = sum(shard.num_bytes for split in splits for shard in split.shards)
        token_bytes = max(1, round(num_bytes / tokens))
    elif config.data.packing == "padded":
        # A document is a row of its own, however short.
        tokens = sum(split.num_documents for split in splits) * config.lengths.row
    return StoredData(
        tokens=tokens,
        shards=sum(len(split.shards) for split in splits),
        token_bytes=token_bytes,
        vocab_size=dataset.index.vocab_size,
        labels=dataset.index.labels,
        has_validation=all("validation" in source.index.splits for source in dataset.sources),
    )


def _tokens_s(run: Path) -> float:
    """Returns the median speed of the second half of a run's metrics."""
    from pretrain.utils.jsonl import rows_with

    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise ConfigError("no such file", where=str(path), fix="check the path of --measured")
    speeds = [row["tokens_per_s"] for row in rows_with(path, "tokens_per_s") if row["tokens_per_s"]]
    if not speeds:
        raise ConfigError(
            "has no tokens_per_s",
            where=str(path),
            fix="give a run that has logged some steps",
        )
    # Compilation and caches slow the first steps.
    return float(statistics.median(speeds[len(speeds) // 2 :]))
