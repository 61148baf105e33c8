"""Draws what benchmarks/recurrent.py and recurrent_bleu.py measured: one picture, and one table in Markdown.

python -m benchmarks.recurrent_figure runs/recurrent/rows.jsonl --picture docs/why_transformers.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.recall_data import PAIRS

Rows = dict[str, dict[str, Any]]


def read_rows(paths: list[Path]) -> Rows:
    """Returns the last row of each question that was not a trial, with the arms of those before it that it lacks."""
    rows: Rows = {}
    for row in (json.loads(line) for path in paths for line in path.read_text().splitlines()):
        if row["quick"]:
            continue
        earlier = rows.get(row["question"], {})
        rows[row["question"]] = row | {
            key: earlier.get(key, {}) | row[key] for key in ("arms", "parameters", "tokens_per_s") if key in row
        }
    return rows


def draw(rows: Rows, path: Path) -> None:
    """Draws speed against length, and loss, recall by distance and BLEU at equal time, as far as they were measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across, down = min(2, len(rows)), -(-len(rows) // 2)
    size = (5.5 * across, 4 * down)
    figure, panels = pyplot.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for axes in panels.flat[len(rows) :]:
        axes.set_visible(False)
    for axes, (question, row) in zip(panels.flat, rows.items(), strict=False):
        if question == "loss":
            axes.barh(list(row["arms"]), [arm["val_loss"] for arm in row["arms"].values()])
            axes.set(title="loss after an equal time", xlabel="validation loss")
            axes.invert_yaxis()
        elif question == "speed":
            _curves(axes, row["tokens_per_s"])
            axes.set(title="speed", xlabel="tokens of a row", ylabel="tokens/s, forward and backward", yscale="log")
        elif question == "bleu":
            most = max(_bleu(arm, beams) for arm in row["arms"].values() for beams in (1, 5))
            axes.set_xlim(0, 1.3 * most)  # room for the legend
            for beams in (1, 5):
                scores = [_bleu(arm, beams) for arm in row["arms"].values()]
                places = [place + 0.2 * (1 if beams == 5 else -1) for place in range(len(scores))]
                axes.barh(places, scores, height=0.4, label="greedy" if beams == 1 else f"beam {beams}")
            axes.set_yticks(range(len(row["arms"])), list(row["arms"]))
            axes.set(title="Multi30k after an equal time", xlabel="BLEU, lower-cased and tokenised")
            axes.legend(fontsize="small", loc="upper right")
            axes.invert_yaxis()
        else:
            axes.axhline(1 / PAIRS, color="grey", linestyle=":", label="a guess")
            _curves(axes, {name: arm["recall"] for name, arm in row["arms"].items()})
            axes.set(title="recall after an equal time", xlabel="distance", ylabel="share of keys", ylim=(0, 1.02))
    figure.savefig(path, dpi=120)


def _bleu(arm: dict[str, Any], beams: int) -> float:
    (system,) = [system for system in arm["scores"]["systems"] if system["beams"] == beams]
    return float(system["scores"]["bleu_tokenized"]["score"])


def _curves(axes: Any, curves: dict[str, dict[str, float]]) -> None:
    """Draws a curve a model, over lengths or distances that double."""
    for name, points in curves.items():
        axes.plot(range(len(points)), list(points.values()), marker="o", label=name)
    labels = list(next(iter(curves.values())))
    axes.set_xticks(range(len(labels)), labels)
    axes.legend(fontsize="small", loc="best", ncols=2)


def table(rows: Rows) -> str:
    """Returns a row a model: tokens/s at the shortest and longest length, loss, recall by distance, BLEU.

    Below it, how large the models of each question were.
    """
    names = list(dict.fromkeys(name for row in rows.values() for name in row["parameters"]))
    head, lines = ["model"], [[name] for name in names]
    speed = rows.get("speed", {}).get("tokens_per_s", {})
    lengths = list(next(iter(speed.values()), {}))
    for length in dict.fromkeys(lengths[:1] + lengths[-1:]):
        head.append(f"tokens/s at {length}")
        _fill(lines, {name: f"{points[length]:,.0f}" for name, points in speed.items()})
    loss = rows.get("loss", {}).get("arms", {})
    if loss:
        head.append("loss")
        _fill(lines, {name: f"{arm['val_loss']:.3f}" for name, arm in loss.items()})
    recall = rows.get("recall", {}).get("arms", {})
    for distance in next(iter(recall.values()), {"recall": {}})["recall"]:
        head.append(f"recall at {distance}")
        _fill(lines, {name: f"{arm['recall'][distance]:.2f}" for name, arm in recall.items()})
    bleu = rows.get("bleu", {}).get("arms", {})
    for beams in (1, 5) if bleu else ():
        head.append("BLEU, greedy" if beams == 1 else f"BLEU, beam {beams}")
        _fill(lines, {name: f"{_bleu(arm, beams):.2f}" for name, arm in bleu.items()})
    sizes = {question: row["parameters"].values() for question, row in rows.items()}
    spans = [f"{question} {min(found) / 1e6:.2f}M to {max(found) / 1e6:.2f}M" for question, found in sizes.items()]
    cells = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)]
    return "\n".join([*cells, "", f"Parameters: {', '.join(spans)}."])


def _fill(lines: list[list[str]], cells: dict[str, str]) -> None:
    for line in lines:
        line.append(cells.get(line[0], ""))


def main() -> None:
    """Writes the picture and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path, default=Path("docs/why_transformers.png"))
    arguments = parser.parse_args()
    rows = read_rows(arguments.rows)
    draw(rows, arguments.picture)
    print(table(rows))


if __name__ == "__main__":
    main()
