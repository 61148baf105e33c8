"""The scaling curve as a picture."""

from pathlib import Path
from typing import Any


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
