"""The scaling curve: the same global batch on more and more nodes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.config.run import RunConfig
from pretrain.errors import ConfigError
from pretrain.plan.cluster import Cluster
from pretrain.plan.layout import ParallelLayout
from pretrain.plan.search import Rate, divisors, predict_rate
from pretrain.plan.state_memory import largest_micro
from pretrain.plan.work import TrainingTask


@dataclass(frozen=True, slots=True)
class Point:
    """One size of the cluster.

    Attributes:
        nodes: Of it.
        ranks: Of it.
        micro: Rows at once: the most that fits and divides, at most the config's.
        accumulation: Follows.
        rate: Predicted; None where nothing fits, or where there are fewer rows than ranks.
        efficiency: Tokens a second and rank, over those of the first point.
        why: Why there is no rate.
    """

    nodes: int
    ranks: int
    micro: int
    accumulation: int
    rate: Rate | None
    efficiency: float
    why: str = ""


def parse_sweep(text: str) -> list[int]:
    """Returns the numbers of nodes of `nodes=1..512`: powers of two from the first to the last.

    Raises:
        ConfigError: It is not of that form.
    """
    name, _, span = text.partition("=")
    first, dots, last = span.partition("..")
    if name != "nodes" or not dots or not first.isdecimal() or not last.isdecimal() or not 0 < int(first) <= int(last):
        raise ConfigError(f"{text!r} is no sweep", where="--sweep", fix="write --sweep nodes=1..512")
    nodes, found = int(first), []
    while nodes <= int(last):
        found.append(nodes)
        nodes *= 2
    return found


def sweep(config: RunConfig, task: TrainingTask, cluster: Cluster, nodes: list[int]) -> list[Point]:
    """Predicts each size, at the config's ZeRO stage."""
    points: list[Point] = []
    for count in nodes:
        there = replace(cluster, nodes=count)
        point = _point(config, task, there)
        first = next((p for p in points if p.rate is not None), None)
        if point.rate is not None and first is not None and first.rate is not None:
            each = point.rate.tokens_s / point.ranks
            point = replace(point, efficiency=each / (first.rate.tokens_s / first.ranks))
        points.append(point)
    return points


def _point(config: RunConfig, task: TrainingTask, cluster: Cluster) -> Point:
    rows, size = config.batch.rows, cluster.size
    if rows % size:
        return Point(cluster.nodes, size, 0, 0, None, 0.0, f"{rows} rows a step do not divide over {size} ranks")
    most = largest_micro(task, ParallelLayout(config.engine, 1, 1), cluster, min(config.batch.micro, rows // size))
    if not most:
        return Point(cluster.nodes, size, 0, 0, None, 0.0, "not one row fits")
    micro = max(count for count in divisors(rows // size) if count <= most)
    layout = ParallelLayout(config.engine, micro, rows // size // micro)
    return Point(cluster.nodes, size, micro, layout.accumulation, predict_rate(task, layout, cluster), 1.0)


# The scaling curve as a picture.


def draw_sweep(points: list[dict[str, Any]], path: Path) -> None:
    """Draws tokens a second and MFU over the number of GPUs; the format is that of the file's name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [point for point in points if point["tokens_per_s"] is not None]
    ranks = [point["ranks"] for point in shown]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.loglog(ranks, [point["tokens_per_s"] for point in shown], marker="o", label="predicted")
    if shown:
        each = shown[0]["tokens_per_s"] / ranks[0]
        left.loglog(ranks, [each * count for count in ranks], linestyle="--", color="0.6", label="linear")
    left.set(xlabel="GPUs", ylabel="tokens a second", title="Scaling, the batch as it is")
    left.legend(frameon=False)
    right.semilogx(ranks, [100 * point["mfu"] for point in shown], marker="o", base=2)
    right.set(xlabel="GPUs", ylabel="MFU, %", title="Share of the peak")
    right.set_ylim(0, 1.15 * max((100 * point["mfu"] for point in shown), default=1.0))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_xticks(ranks, [str(count) for count in ranks], minor=False)
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
