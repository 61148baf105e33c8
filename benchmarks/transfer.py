"""The best learning rate over widths, with and without `optim.transfer`, and its picture.

    python -m benchmarks.transfer --data data/shakespeare [--widths 64 128 256 512]
        [--output runs/transfer] [--picture docs/optimizers_transfer.png]

Two layers of Llama's kind, AdamW, on any small shard folder. The first width is the base of `mup`.
At each width three rates, a factor of 2 apart, are tried around the one expected to be the best:
that of the base with `optim.transfer`, and base / width of it without. If the best of them is at an
end, further rates follow there. The best rate is the vertex of a parabola through the best of those
tried and its two neighbours, of the loss over the logarithm of the rate. Rows go to
OUTPUT/rows.jsonl, the factors between the best rates of the first and the last width to OUTPUT/factors.json; a run that
has a row there is not repeated.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import append_row, environment
from benchmarks.recipes import train

BASE_RATE = 1.6e-2
"""Rate around which that of the base is looked for."""
ARMS = ("mup", "no transfer")
MOST_RATES = 7


def overrides(arm: str, width: int, base: int, data: Path, seed: int) -> list[str]:
    """Returns the config of a run, without its rate."""
    sizes = {"width": width, "heads": width // 16, "kv_heads": width // 16, "ff_width": 3 * width}
    found = ["configs/run/shakespeare_char.yaml", "model={preset: llama-tiny}"]
    found += [f"model.decoder.{key}={value}" for key, value in sizes.items()]
    found += ["optim.schedule={kind: linear, warmup_steps: 10, min_ratio: 0}"]
    found += [f"data.path={data}", f"seed={seed}", "eval.max_tokens=16384"]
    transfer = f"optim.transfer={{kind: mup, base_width: {base}}}"
    return [*found, transfer] if arm == "mup" else found


def losses_of(rows: list[dict[str, Any]], arm: str, width: int) -> dict[float, float]:
    """Returns the loss by rate."""
    chosen = (row for row in rows if (row["arm"], row["width"]) == (arm, width))
    return {row["lr"]: row["val_loss"] for row in chosen}


def best_rate(losses: dict[float, float]) -> float | None:
    """Returns the rate of the lowest loss, None if that is at an end of the rates tried.

    It is the vertex of a parabola through the lowest loss and its neighbours.
    """
    rates = sorted(losses)
    lowest = min(range(len(rates)), key=lambda place: losses[rates[place]])
    if lowest in (0, len(rates) - 1):
        return None
    near = rates[lowest - 1 : lowest + 2]
    a, b, _ = np.polyfit(np.log(near), [losses[rate] for rate in near], 2)
    return math.exp(-b / (2 * a))


def factor_of(rates: list[float | None]) -> float | None:
    """Returns the factor between the best rates of the first and the last width; None: one is not known."""
    first, last = rates[0], rates[-1]
    return None if first is None or last is None else max(first / last, last / first)


def next_rate(losses: dict[float, float], expected: float) -> float | None:
    """Returns the rate to be tried next; None: enough.

    Three around the expected one, then those beyond the end that is lowest.
    """
    for rate in (expected, expected / 2, expected * 2):
        if rate not in losses:
            return rate
    if best_rate(losses) is not None or len(losses) >= MOST_RATES:
        return None
    lowest = min(losses, key=lambda rate: losses[rate])
    return lowest / 2 if lowest == min(losses) else lowest * 2


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes the picture: loss over rate, a line a width, a panel an arm."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    widths = sorted({row["width"] for row in rows})
    colors = colormaps["viridis"](np.linspace(0.0, 0.9, len(widths)))
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, arm in zip(panels, reversed(ARMS), strict=True):
        for width, color in zip(widths, colors, strict=True):
            losses = losses_of(rows, arm, width)
            rates = sorted(losses)
            found = [losses[rate] for rate in rates]
            axes.plot(rates, found, "o-", color=color, markersize=3, label=str(width))
            if (best := best_rate(losses)) is not None:
                axes.axvline(best, color=color, linestyle=":", linewidth=1.2)
        title = "without optim.transfer" if arm == "no transfer" else "optim.transfer by muP"
        axes.set(xscale="log", xlabel="optim.lr", title=title)
    figure.axes[0].set_ylabel("validation loss")
    lowest = min(row["val_loss"] for row in rows)
    figure.axes[0].set_ylim(lowest - 0.05, lowest + 0.6)
    figure.axes[0].legend(title="width", fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Trains what has no row yet, prints the best rate of each width, and draws."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/transfer"))
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    kept = options.output / "rows.jsonl"
    lines = kept.read_text().splitlines() if kept.exists() else []
    rows = [json.loads(line) for line in lines]
    base = options.widths[0]

    def run(rate: float, width: int, arm: str) -> dict[str, Any]:
        config = overrides(arm, width, base, options.data, options.seed)
        name = f"{arm.replace(' ', '-')}-{width}-{rate:g}"
        metrics, cpu_s = train(options.output, name, [*config, f"optim.lr={rate}"], options.steps)
        (held,) = [found["val_loss"] for found in metrics if "val_loss" in found]
        return {"val_loss": held, "steps": options.steps, "cpu_s": round(cpu_s, 1)}

    best_rates: dict[str, list[float | None]] = {arm: [] for arm in ARMS}
    for width in options.widths:
        for arm in ARMS:
            losses = losses_of(rows, arm, width)
            expected = BASE_RATE * (1 if arm == "mup" else base / width)
            while (rate := next_rate(losses, expected)) is not None:
                # At the width of the base both arms are the same run.
                known = losses_of(rows, ARMS[0], width).get(rate) if width == base else None
                row = {"question": "transfer", "arm": arm, "width": width, "lr": rate}
                row |= {"val_loss": known} if known else run(rate, width, arm)
                append_row(kept, row | {"environment": environment(("torch",))})
                rows.append(row)
                losses[rate] = row["val_loss"]
            best = best_rate(losses)
            best_rates[arm].append(best)
            shown = "at an end" if best is None else f"{best:.2e}"
            found = f"best rate {shown}, loss {min(losses.values()):.4f}"
            print(f"{arm:12} width {width:4}: {found}", flush=True)
    factors = {arm: factor_of(rates) for arm, rates in best_rates.items()}
    (options.output / "factors.json").write_text(json.dumps(factors) + "\n")
    if options.picture:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
