"""The page of a ladder: loss over FLOPs with the law, the large run predicted and measured.

Made of the charts and tables of reports: one HTML file without network or script.
"""

from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain.report.charts import TEXT, chart_style, style_axes, to_image
from pretrain.report.page import html_page
from pretrain.report.panels import color_of
from pretrain.report.tables import section, swatch, table
from pretrain.scale.law import LineLaw, LossPoint, ScalingLaw
from pretrain.scale.prediction import PredictionScore
from pretrain.scale.scaling_rule import FLOPS_OF_A_WEIGHT
from pretrain.utils.io import write_file
from pretrain.utils.units import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = "scale.html"
_CURVE_POINTS = 60
_REACH = 2.0  # of a size's curve, beyond its runs
_MEASURED = "#000000"


def write_page(path: Path, prediction: dict[str, Any], score: PredictionScore | None = None) -> None:
    """Writes the page of a prediction, and of its score where there is one. Raises: DiskError."""
    law = ScalingLaw(**prediction["law"])
    # Version 1 of the file, which can still be scored, has no law of the line.
    along = LineLaw(**prediction["line_law"]) if prediction["version"] > 1 else None
    points = [LossPoint(run["name"], run["parameters"], run["tokens"], run["loss"]) for run in prediction["runs"]]
    laws = [f"L(N, D) = {law_text(law)}", *([f"L(C) = {line_text(along)}, on the line"] if along else [])]
    title = f"Scaling law: {prediction['ladder']}"
    with chart_style():
        picture = _draw(law, along, points, prediction["predicted"], score)
    sizes = sorted({point.parameters for point in points})
    keys = [f"<span>{swatch(color_of(number))} N={count(size)}</span> " for number, size in enumerate(sizes)]
    head = (
        f"<header><h1>{escape(title)}</h1>"
        f"<p class=note>predicted {escape(prediction['written'])}, SHA-256 {escape(prediction['sha256'])}</p></header>"
    )
    note = (
        '<p class="note">Dots are runs, lines the law at the size of that colour, the dashed line the law of '
        "the line. Squares are predicted losses with their 95% intervals, the cross is measured.</p>"
    )
    body = [
        head,
        section("Loss over FLOPs", f"<figure>{picture}<p class=key>{''.join(keys)}</p></figure>", note),
        section("Prediction", _predicted_table(prediction["predicted"], score)),
        section("Laws", *(f"<p>{escape(text)}</p>" for text in laws)),
        section("Runs", _runs_table(prediction["runs"]), _left_out(prediction["left_out"])),
    ]
    write_file(path, html_page(title, "".join(body)).encode())


def law_text(law: ScalingLaw) -> str:
    """Returns the right side of the law in figures."""
    return f"{law.e:.4f} + {law.a:.4g} / N^{law.alpha:.3f} + {law.b:.4g} / D^{law.beta:.3f}"


def line_text(law: LineLaw) -> str:
    """Returns the right side of the law of the line in figures."""
    return f"{law.e:.4f} + {law.k:.4g} / C^{law.gamma:.3f}"


def _draw(
    law: ScalingLaw,
    along: LineLaw | None,
    points: Sequence[LossPoint],
    predicted: Sequence[dict[str, Any]],
    score: PredictionScore | None,
) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.2))
    axes = figure.add_axes((0.08, 0.12, 0.89, 0.84))
    axes.set_xscale("log")
    for number, (size, runs) in enumerate(groupby(sorted(points, key=_by_size), key=_by_size)):
        _draw_size(axes, law, size, list(runs), color_of(number))
    all_flops = [*(point.flops for point in points), *(run["flops"] for run in predicted)]
    flops = np.geomspace(min(all_flops), max(all_flops), _CURVE_POINTS)
    if along is not None:
        axes.plot(flops, [along.loss(one) for one in flops], color=TEXT, linewidth=1, linestyle="dashed")
    for run in predicted:
        reach = [[run["loss"] - run["low"]], [run["high"] - run["loss"]]]
        axes.errorbar(
            [run["flops"]],
            [run["loss"]],
            np.abs(reach),
            fmt="s",
            color=TEXT,
            markersize=5,
            capsize=4,
        )
    if score is not None:
        axes.plot([score.predicted.flops], [score.measured], "x", color=_MEASURED, markersize=8)
    axes.set_xlim(min(all_flops) / _REACH, max(all_flops) * _REACH)
    style_axes(axes)
    axes.set_xlabel("FLOPs of training")
    axes.set_ylabel("validation loss, nats a target")
    return to_image(figure, "loss over FLOPs")


def _draw_size(axes: "Axes", law: ScalingLaw, size: float, runs: Sequence[LossPoint], color: str) -> None:
    """Draws the runs of a size, and the law around them."""
    budgets = [run.flops for run in runs]
    flops = np.geomspace(min(budgets) / _REACH, max(budgets) * _REACH, _CURVE_POINTS)
    axes.plot(
        flops,
        [law.loss(size, one / (FLOPS_OF_A_WEIGHT * size)) for one in flops],
        color=color,
        linewidth=1,
    )
    axes.plot(budgets, [run.loss for run in runs], "o", color=color, markersize=4)


def _by_size(point: LossPoint) -> float:
    return point.parameters


def _predicted_table(predicted: Sequence[dict[str, Any]], score: PredictionScore | None) -> str:
    rows = []
    for run in predicted:
        is_scored = score is not None and score.predicted.name == run["name"]
        measured = [score.run, score.measured, f"{100 * score.error:+.2f}%"] if score and is_scored else [None] * 3
        interval = f"{run['low']:.4f} to {run['high']:.4f}"
        size = [count(run["parameters"]), count(run["tokens"]), f"{run['flops']:.3g}"]
        rows.append([run["name"], *size, run["loss"], interval, *measured])
    heads = ("size", "N", "D", "FLOPs", "predicted", "95%", "run", "measured", "predicted, off by")
    return table(heads, rows)


def _runs_table(runs: Sequence[dict[str, Any]]) -> str:
    rows = [
        [run["name"], count(run["parameters"]), count(run["tokens"]), f"{run['flops']:.3g}", run["loss"],
         run["fitted"], f"{100 * (run['loss'] / run['fitted'] - 1):+.2f}%"]
        for run in runs
    ]  # fmt: skip
    return table(("run", "N", "D", "FLOPs", "loss", "fitted", "off by"), rows)


def _left_out(reasons: dict[str, str]) -> str:
    items = "".join(f"<li>{escape(name)} is left out: {escape(reason)}</li>" for name, reason in reasons.items())
    return f'<ul class="note">{items}</ul>' if items else ""
