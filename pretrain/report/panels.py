"""Which curves a report shows: the metrics that people know first, with titles and units; then every other one.

    choose_panels(runs)  ->  sections, each a title and its panels, each panel the curves of one pair of axes

A panel compares the runs, a colour each. A family of metrics (`loss_NAME` of each source, `grad_norm/LAYER`, the parts
of a step) is one panel a run, a colour for each member.
"""

import colorsys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pretrain.report.run_data import RunData
from pretrain.report.series import PARTS, Curve, make_curve

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6a3d9a", "#7f7f7f")
"""Of runs: the palette of Okabe and Ito, told apart by colour-blind people too, and two more."""
DASHES = ("", "5 3", "1.5 2.5")
MAX_GROUPS = 400
"""About one a pixel."""
MAX_ALL_GROUPS = 20_000
"""Of all curves of a page together, which keeps it below 2 MB."""
MIN_GROUPS = 40


@dataclass(frozen=True, slots=True)
class Metric:
    """What a panel shows.

    Attributes:
        title: Of the panel.
        unit: Of the y axis.
        names: Metrics, each with a word for the key; the first is drawn solid, the others dashed.
        scale: What values are multiplied by.
        may_log: Whether the axis is logarithmic where few values are far above the others.
        is_noisy: Whether smoothing is of use: not for what follows a rule.
    """

    title: str
    unit: str
    names: dict[str, str]
    scale: float = 1.0
    may_log: bool = False
    is_noisy: bool = True


_LEARNING = (
    Metric("Training loss", "nats a target", {"loss": ""}),
    Metric("Validation loss", "nats a target", {"val_loss": ""}),
    Metric("Accuracy", "% of targets", {"accuracy": "training", "val_accuracy": "validation"}, 100),
    Metric("Validation, bits per byte", "bits", {"val_bits_per_byte": ""}),
    Metric("Validation perplexity", "", {"val_perplexity": ""}, may_log=True),
    Metric("Learning rate", "", {"lr": ""}, is_noisy=False),
    Metric("Gradient norm", "L2, before clipping", {"grad_norm": ""}, may_log=True),
    Metric("Epochs", "of the data", {"epochs": ""}, is_noisy=False),
    Metric("Loss scale", "", {"loss_scale": ""}, may_log=True, is_noisy=False),
    Metric("Skipped steps", "so far", {"skipped_steps": ""}, is_noisy=False),
    Metric("Loss spikes", "so far", {"spikes": ""}, is_noisy=False),
)
_SPEED = (
    Metric("Throughput", "tokens/s", {"tokens_per_s": ""}),
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
    "grad_norm/": ("Gradient norm by layer", "L2, before clipping"),
    "update_norm/": ("Update norm by layer", "L2"),
}
_NOT_SHOWN = {"tokens", "eta_s", "checkpoint_step", "val_tokens"}
_ALL_ZERO_HIDDEN = {"skipped_steps", "spikes"}


@dataclass(frozen=True, slots=True)
class Line:
    """One curve of a panel: which run's (by number), what the key says, and how it is drawn."""

    run: int
    key: str
    color: str
    dash: str
    curve: Curve


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. `has_key`: colours or dashes mean something else than runs. `is_noisy`: see `Metric`."""

    title: str
    unit: str
    lines: list[Line]
    has_key: bool
    is_log: bool
    is_noisy: bool


def choose_panels(runs: Sequence[RunData]) -> dict[str, list[Panel]]:
    """Returns panels by section; sections and panels without a value are left out."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    chosen = [*_LEARNING, *_SPEED]
    known = {name for metric in [*chosen, _PARTS] for name in metric.names} | _NOT_SHOWN
    families = {
        prefix: [name for name in names if name.startswith(prefix) and name not in known] for prefix in _FAMILIES
    }
    members = {name for family in families.values() for name in family}
    others = [Metric(name, "", {name: ""}) for name in names if name not in known | members]
    num_curves = sum(len(run.metrics) for run in runs)
    max_groups = max(MIN_GROUPS, min(MAX_GROUPS, MAX_ALL_GROUPS // max(num_curves, 1)))
    sections: dict[str, list[Panel]] = {
        "Learning": [_compare(runs, metric, max_groups) for metric in _LEARNING],
        "Speed and memory": [
            *(_compare(runs, metric, max_groups) for metric in _SPEED),
            *_split(runs, _PARTS, max_groups),
        ],
        "By source and layer": [
            panel
            for prefix, (title, unit) in _FAMILIES.items()
            for panel in _split(
                runs, Metric(title, unit, {name: name[len(prefix) :] for name in families[prefix]}), max_groups
            )
        ],
        "Other metrics": [_compare(runs, metric, max_groups) for metric in others],
    }
    kept = {title: [panel for panel in panels if panel.lines] for title, panels in sections.items()}
    return {title: panels for title, panels in kept.items() if panels}


def color_of(run: int) -> str:
    """Returns the colour of a run."""
    return COLORS[run % len(COLORS)]


def _compare(runs: Sequence[RunData], metric: Metric, max_groups: int) -> Panel:
    lines = [
        Line(number, word, color_of(number), DASHES[(number // len(COLORS) + place) % len(DASHES)], curve)
        for number, run in enumerate(runs)
        for place, (name, word) in enumerate(metric.names.items())
        if (curve := _curve(run, name, metric.scale, max_groups))
    ]
    if metric.names.keys() <= _ALL_ZERO_HIDDEN and not any(any(line.curve.highs or line.curve.means) for line in lines):
        lines = []
    has_key = len({line.key for line in lines}) > 1
    return Panel(metric.title, metric.unit, lines, has_key, metric.may_log and _spreads(lines), metric.is_noisy)


def _split(runs: Sequence[RunData], metric: Metric, max_groups: int) -> Iterator[Panel]:
    for number, run in enumerate(runs):
        found = [(word, curve) for name, word in metric.names.items() if (curve := _curve(run, name, 1.0, max_groups))]
        colors = _colors(len(found))
        lines = [Line(number, word, color, "", curve) for (word, curve), color in zip(found, colors, strict=True)]
        title = metric.title if len(runs) == 1 else f"{metric.title}: {run.label}"
        yield Panel(title, metric.unit, lines, has_key=True, is_log=False, is_noisy=True)


def _curve(run: RunData, name: str, scale: float, max_groups: int) -> Curve | None:
    points = run.metrics.get(name, [])
    if scale != 1.0:
        points = [(step, value * scale) for step, value in points]
    return make_curve(points, max_groups) if points else None


def _colors(count: int) -> list[str]:
    """Returns a colour for each member: told apart while they are few, in the order of a rainbow where they are not."""
    if count <= len(COLORS):
        return list(COLORS[:count])
    hues = [0.65 * (1 - number / (count - 1)) for number in range(count)]
    parts = [colorsys.hls_to_rgb(hue, 0.42, 0.75) for hue in hues]
    return ["#" + "".join(f"{round(255 * part):02x}" for part in rgb) for rgb in parts]


def _spreads(lines: Sequence[Line]) -> bool:
    """Returns whether the largest value is so far above the median that a linear axis would show nothing else."""
    means = sorted(value for line in lines for value in line.curve.means)
    lows = [value for line in lines for value in line.curve.lows or line.curve.means]
    highs = [value for line in lines for value in line.curve.highs or line.curve.means]
    return bool(means) and min(lows) > 0 and max(highs) > 30 * means[len(means) // 2]
