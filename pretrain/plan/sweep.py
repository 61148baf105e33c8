"""The scaling curve: the same global batch on more and more nodes."""

from dataclasses import dataclass, replace

from pretrain.config.run import RunConfig
from pretrain.errors import ConfigError
from pretrain.plan.cluster import Cluster
from pretrain.plan.layout import Layout
from pretrain.plan.rate import Rate, predict_rate
from pretrain.plan.search import divisors
from pretrain.plan.state import largest_micro
from pretrain.plan.work import Task


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


def sweep(config: RunConfig, task: Task, cluster: Cluster, nodes: list[int]) -> list[Point]:
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


def _point(config: RunConfig, task: Task, cluster: Cluster) -> Point:
    rows, size = config.batch.rows, cluster.size
    if rows % size:
        return Point(cluster.nodes, size, 0, 0, None, 0.0, f"{rows} rows a step do not divide over {size} ranks")
    most = largest_micro(task, Layout(config.engine, 1, 1), cluster, min(config.batch.micro, rows // size))
    if not most:
        return Point(cluster.nodes, size, 0, 0, None, 0.0, "not one row fits")
    micro = max(count for count in divisors(rows // size) if count <= most)
    layout = Layout(config.engine, micro, rows // size // micro)
    return Point(cluster.nodes, size, micro, layout.accumulation, predict_rate(task, layout, cluster), 1.0)
