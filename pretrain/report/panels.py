"""Choice of the curves of a report: well-known metrics with titles and units, then every other one.

    choose_panels(runs)  ->  sections: a title and panels, each the curves of one pair of axes

A panel compares the runs, a colour for each. A family of metrics (`loss_NAME` of each source,
`grad_norm/LAYER`, the parts of a step) is one panel for each run, a colour for each member.
"""

import colorsys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.kinds.objectives import TARGET_COUNTS
from pretrain.report.metric_columns import NO_POINTS
from pretrain.report.run_data import RunData, target_unit
from pretrain.report.series import PARTS, Curve, make_curve

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6a3d9a", "#7f7f7f")
"""Colours of runs: the palette of Okabe and Ito, distinct to colour-blind readers, and two more."""
DASHES = ("solid", "dashed", "dotted")  # names in matplotlib and in CSS
MAX_GROUPS = 400  # of a curve: about one a pixel
MAX_ALL_GROUPS = 16_000  # of all curves of a page, which keeps it below 2 MB
MIN_GROUPS = 40
MAX_OTHERS = 100  # panels of unknown metrics


@dataclass(frozen=True, slots=True)
class Metric:
    """Contents of a panel."""

    title: str
    unit: str
    names: dict[str, str]  # metrics, each with its word in the key; all but the first are dashed
    scale: float = 1.0
    may_log: bool = False  # a logarithmic axis where few values are far above the others
    by_tokens: bool = False  # drawn once more over tokens, both axes logarithmic


_LEARNING = (
    Metric("Training loss", "nats a target", {"loss": ""}, by_tokens=True),
    Metric("Validation loss", "nats a target", {"val_loss": ""}, by_tokens=True),
    Metric("Validation loss of the average of the weights", "nats a target", {"val_ema_loss": ""}),
    Metric("Accuracy", "% of targets", {"accuracy": "training", "val_accuracy": "validation"}, 100),
    Metric("Validation, bits per byte", "bits", {"val_bits_per_byte": ""}),
    Metric("Validation perplexity", "", {"val_perplexity": ""}, may_log=True),
    Metric("Learning rate", "", {"lr": ""}),
    Metric("Gradient norm", "L2, before clipping", {"grad_norm": ""}, may_log=True),
    Metric("Epochs", "of the data", {"epochs": ""}),
    Metric("Loss scale", "", {"loss_scale": ""}, may_log=True),
    Metric("Skipped steps", "so far", {"skipped_steps": ""}),
    Metric("Steps without targets", "so far", {"empty_steps": ""}),
    Metric("Loss spikes", "so far", {"spikes": ""}),
)
_SPEED = (
    Metric("Throughput", "tokens/s", {"tokens_per_s": ""}),
    Metric("Images", "images/s", {"images_per_s": ""}),
    Metric("MFU", "% of the peak", {"mfu": ""}, 100),
    Metric("Data wait", "% of the time", {"data_wait": ""}, 100),
    Metric("Step time", "s", {"step_time_s": ""}),
    Metric("Memory of rank 0", "GiB", {"memory_bytes": "used", "memory_reserved_bytes": "reserved"}, 1 / 2**30),
    Metric("Saving", "s", {"checkpoint_stall_s": "training waited", "checkpoint_write_s": "until committed"}),
)
_PARTS = Metric("Where a step's time goes", "s", {f"{part}_s": part for part in PARTS})
_FAMILIES = {
    "loss_": ("Training loss by source", "nats a target"),
    "val_loss_": ("Validation loss by source", "nats a target"),
    "epochs_": ("Epochs by source", ""),
    "tasks/": ("Downstream tasks", ""),
    "grad_norm/": ("Gradient norm by layer", "L2, before clipping"),
    "update_norm/": ("Update norm by layer", "L2"),
}
_NOT_SHOWN = {"eta_s", "checkpoint_step"} | {f"{prefix}{unit}" for prefix in ("", "val_") for unit in TARGET_COUNTS}
_KNOWN = {name for metric in (*_LEARNING, *_SPEED, _PARTS) for name in metric.names} | _NOT_SHOWN


@dataclass(frozen=True, slots=True)
class Line:
    """One curve of a panel."""

    run: int  # number of its run
    key: str
    color: str
    dash: str
    curve: Curve


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    unit: str
    lines: list[Line]
    restarts: list[float]  # x at which one of its runs was started again
    has_key: bool = False  # colours or line styles mean something else than runs
    is_log: bool = False
    is_by_tokens: bool = False  # over tokens, logarithmic; else over steps
    tokens: str = "tokens"  # the word for them


def choose_panels(runs: Sequence[RunData]) -> dict[str, list[Panel]]:
    """Returns panels by section; sections and panels without a value are left out."""
    families, rest = _sort_metrics(dict.fromkeys(name for run in runs for name in run.metrics))
    num_curves = sum(len(run.metrics) for run in runs)
    max_groups = max(MIN_GROUPS, min(MAX_GROUPS, MAX_ALL_GROUPS // max(num_curves, 1)))
    title = "Other metrics"
    if len(rest) > MAX_OTHERS:
        title = f"{title}; {len(rest) - MAX_OTHERS:,} are left out"

    def compare(metrics: Iterable[Metric]) -> list[Panel]:
        return [panel for metric in metrics for panel in _compare(runs, metric, max_groups)]

    def split(metrics: Iterable[Metric]) -> list[Panel]:
        return [panel for metric in metrics for panel in _split(runs, metric, max_groups)]

    sections = {
        "Learning": compare(_LEARNING),
        "Speed and memory": compare(_SPEED) + split([_PARTS]),
        "By source and layer": split(families),
        title: compare(rest[:MAX_OTHERS]),
    }
    return {title: panels for title, panels in sections.items() if panels}


def _sort_metrics(names: Iterable[str]) -> tuple[list[Metric], list[Metric]]:
    """Returns each family, and each metric that is in none and has no panel of its own."""
    rest = [name for name in names if name not in _KNOWN]
    families = []
    for prefix, words in _FAMILIES.items():
        members = {name: name.removeprefix(prefix) for name in rest if name.startswith(prefix)}
        families.append(Metric(*words, members))
        rest = [name for name in rest if name not in members]
    return families, [Metric(name, "", {name: ""}) for name in rest]


def color_of(run: int) -> str:
    """Returns the colour of a run."""
    return COLORS[run % len(COLORS)]


def _compare(runs: Sequence[RunData], metric: Metric, max_groups: int) -> Iterator[Panel]:
    for is_by_tokens in (False, True) if metric.by_tokens else (False,):
        lines = []
        for number, run in enumerate(runs):
            for place, (name, word) in enumerate(metric.names.items()):
                dash = DASHES[(number // len(COLORS) + place) % len(DASHES)]
                if curve := _curve(run, name, metric.scale, max_groups, is_by_tokens):
                    lines.append(Line(number, word, color_of(number), dash, curve))
        may_hide = metric.names.keys() <= {"skipped_steps", "empty_steps", "spikes"}
        if not lines or (may_hide and not any(line.curve.highs.any() for line in lines)):
            continue
        yield Panel(
            title=f"{metric.title} by {target_unit(runs)}" if is_by_tokens else metric.title,
            unit=metric.unit,
            lines=lines,
            restarts=_restarts(runs, lines, is_by_tokens),
            has_key=len({line.key for line in lines}) > 1,
            is_log=_spreads(lines, 1 if is_by_tokens else 30) and (metric.may_log or is_by_tokens),
            is_by_tokens=is_by_tokens,
            tokens=target_unit(runs),
        )


def _split(runs: Sequence[RunData], metric: Metric, max_groups: int) -> Iterator[Panel]:
    for number, run in enumerate(runs):
        curves = {word: _curve(run, name, 1.0, max_groups) for name, word in metric.names.items()}
        drawn = {word: curve for word, curve in curves.items() if curve}
        colors = dict(zip(drawn, _colors(len(drawn)), strict=True))
        lines = [Line(number, word, colors[word], DASHES[0], curve) for word, curve in drawn.items()]
        title = metric.title
        if len(runs) > 1:
            title = f"{title}: {run.label}"
        if lines:
            yield Panel(title, metric.unit, lines, _restarts(runs, lines, False), has_key=True)


def _curve(run: RunData, name: str, scale: float, max_groups: int, is_by_tokens: bool = False) -> Curve | None:
    points = run.metrics.get(name, NO_POINTS)
    xs = run.course.tokens_at(points.steps) if is_by_tokens else points.steps
    if not len(xs) or (is_by_tokens and not xs[-1]):
        return None
    return make_curve(xs, points.values if scale == 1.0 else points.values * scale, max_groups)


def _restarts(runs: Sequence[RunData], lines: Sequence[Line], is_by_tokens: bool) -> list[float]:
    places: list[float] = []
    for number in sorted({line.run for line in lines}):
        steps = [start.get("from_step") for start in runs[number].starts[1:]]
        xs = np.array([step for step in steps if isinstance(step, int)], dtype=np.float64)
        if is_by_tokens:
            xs = runs[number].course.tokens_at(xs)
        places += xs.tolist()
    return places


def _colors(count: int) -> list[str]:
    """Returns a colour for each member: of the palette for a few, of a rainbow for more."""
    if count <= len(COLORS):
        return list(COLORS[:count])
    hues = [0.65 * (1 - number / (count - 1)) for number in range(count)]
    parts = [colorsys.hls_to_rgb(hue, 0.42, 0.75) for hue in hues]
    return ["#" + "".join(f"{round(255 * part):02x}" for part in rgb) for rgb in parts]


def _spreads(lines: Sequence[Line], factor: float) -> bool:
    """Returns whether all values are positive and the largest is more than `factor` times the median."""
    means = np.concatenate([line.curve.means for line in lines])
    lows = np.concatenate([line.curve.lows for line in lines])
    highs = np.concatenate([line.curve.highs for line in lines])
    return bool(len(means) and lows.min() > 0 and highs.max() > factor * np.median(means))
