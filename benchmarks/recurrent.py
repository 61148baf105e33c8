"""Why did the Transformer win? It against torch's RNN, GRU and LSTM, and layers with a state, at equal parameters.

    speed    tokens/s of forward and backward, against the length of a row, as many tokens a step at each
    loss     validation loss after an equal time of training, on a shard folder of text
    recall   share of keys recalled after an equal time of training, by distance (benchmarks/recall_data.py)

Loss and recall are trained by `pretrain train` on one thread, each arm at each of `--lr`, the best kept. The budget is
CPU time, so that what else runs costs no arm its steps: two short runs give that of a step, and with it the steps that
fill the budget. Rows go to OUTPUT/rows.jsonl; recurrent_figure.py draws them. BLEU: benchmarks/recurrent_bleu.py.

    python -m benchmarks.recurrent speed --quick
    python -m benchmarks.recurrent loss --data data/stdlib --budget-s 1200
    python -m benchmarks.recurrent recall --budget-s 1200
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import environment, measure, time_once
from benchmarks.recall_data import DISTANCES, FILLERS, PAIRS, class_of, draw_document, write_recall
from pretrain.artifact import open_artifact
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import AnyModelConfig, parse_model
from pretrain.config.objective import ObjectiveConfig
from pretrain.model import build_model, init_weights
from pretrain.objective import build_loss
from pretrain.plan.params import count_parameters
from pretrain.shards.index import load_index
from pretrain.types import Batch

TRANSFORMER = "transformer"
RECURRENT = {f"{cell} x{layers}": (cell, layers) for cell in ("rnn", "gru", "lstm") for layers in (1, 3)}
STATES: dict[str, dict[str, Any]] = {
    "gated delta net": {"mixers": ["delta"]},
    "mamba 2": {"mixers": ["mamba2"], "mamba2": {"head_width": 32, "state_width": 64}},
    "hybrid": {"mixers": ["delta", "attention"]},
}
"""Layers with a state in the place of attention, of all layers or of every second."""
WIDTHS = range(16, 2048, 4)
RECALL_ROW = 2 * PAIRS + max(FILLERS) + 16
RECALL_LAYERS = 2
"""Of the Transformer: two are what it takes (Olsson et al. 2022), and more of them find it later."""
RECIPE = {
    "init_output": "zero",
    "decoder": {"activation": "relu2", "gated": False, "qk_norm": True, "value_residual": True},
}
"""Of the Transformer by Muon: what the quickstart's recipe adds without parameters."""


def plan_arms(
    names: list[str], vocab_size: int, max_seq_len: int, width: int, layers: int, given: dict[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Returns the `model:` section of each arm that is named: a Transformer of `layers` layers with the `given` keys,
    and recurrent models as large, embeddings counted (they are tied), to the nearest width that is a multiple of 4;
    or layers with a state, as wide as the Transformer, with the feed-forward width that makes them as large.
    """
    shared = {"vocab_size": vocab_size, "max_seq_len": max_seq_len, "tied_embeddings": True}
    given = given or {}
    stack = {"layers": layers, "width": width, "heads": width // 32, **given.get("decoder", {})}
    stack["ff_width"] = width * 8 // 3 // 8 * 8 if stack.get("gated", True) else 4 * width
    arms: dict[str, dict[str, Any]] = {TRANSFORMER: {**shared, **given, "decoder": stack}}
    wanted = count_parameters(parse_model(arms[TRANSFORMER]))
    for name, (cell, depth) in RECURRENT.items():
        sizes = [
            {**shared, "kind": "recurrent", "decoder": {"cell": cell, "layers": depth, "width": each}}
            for each in WIDTHS
        ]
        arms[name] = min(sizes, key=lambda section: abs(count_parameters(parse_model(section)) - wanted))
    for name, keys in STATES.items():
        plain = {"layers": layers, "width": width, "heads": width // 32, **keys}
        sizes = [{**shared, "decoder": {**plain, "ff_width": each}} for each in range(8, 4 * width, 8)]
        arms[name] = min(sizes, key=lambda section: abs(count_parameters(parse_model(section)) - wanted))
    return {name: arms[name] for name in names}


def measure_speed(arms: dict[str, AnyModelConfig], lengths: list[int], tokens: int, rounds: int) -> dict[str, Any]:
    """Returns tokens/s of each arm at each length: the median over the rounds."""
    loss = build_loss(ObjectiveConfig())
    found: dict[str, dict[int, float]] = {name: {} for name in arms}
    for length in lengths:
        steps = {}
        for name, config in arms.items():
            model = build_model(config, PLAIN_ENGINE, torch.device("cpu"))
            init_weights(model, config, seed=0)
            assert config.vocab_size is not None
            shape = (max(1, tokens // length), length)
            read_BT = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(length))
            batch = Batch(read_BT, read_BT)

            def step(model: Any = model, batch: Batch = batch) -> None:
                loss(model, batch).loss_sum.backward()
                model.zero_grad()

            step()
            steps[name] = step
        for name, timings in measure(steps, rounds).items():
            seconds = float(np.median([timing.wall_s for timing in timings]))
            found[name][length] = max(1, tokens // length) * length / seconds
    return {"tokens_per_s": found, "tokens_a_step": tokens, "rounds": rounds}


def train_run(folder: Path, name: str, config: dict[str, Any], steps: int) -> tuple[list[dict[str, Any]], float]:
    """Trains a new run of `steps` steps on one thread; returns the rows of its metrics, and its CPU time in seconds.

    The learning rate rises over 50 steps, and falls to a tenth by a cosine, but for what `config` says of its schedule.
    """
    if (folder / name).exists():
        raise SystemExit(f"{folder / name} exists, and would be gone on with; give another --output")
    run = {**config, "run": {"dir": str(folder), "name": name}, "train": {"steps": steps}}
    schedule = {"kind": "cosine", "warmup_steps": min(50, steps // 4), "min_ratio": 0.1}
    run["optim"] = run["optim"] | {"schedule": schedule | run["optim"].get("schedule", {})}
    run["eval"] = {"every_steps": steps, "max_tokens": 200_000}
    path = folder / f"{name}.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run))
    command = [sys.executable, "-m", "pretrain", "train", str(path)]

    def train() -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")

    cpu_s = time_once(train).cpu_s
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()], cpu_s


def train_for(folder: Path, name: str, config: dict[str, Any], budget_s: float, probe_steps: int) -> dict[str, Any]:
    """Trains for about `budget_s` seconds of CPU time of steps; returns what came of it."""
    short, long = (train_run(folder, f"{name}-probe-{n}", config, n)[1] for n in (probe_steps, 3 * probe_steps))
    step_s = (long - short) / (2 * probe_steps)  # start-up and validation are in both
    steps = max(8, round(budget_s / step_s))
    rows, cpu_s = train_run(folder, name, config, steps)
    last = next(row for row in reversed(rows) if "step_time_s" in row)
    (held,) = [row for row in rows if "val_loss" in row][-1:]
    return {
        "run": str(folder / name),
        "steps": steps,
        "step_s": step_s,
        "cpu_s": cpu_s,
        "tokens": last["tokens"],
        "val_loss": held["val_loss"],
        "val_accuracy": held["val_accuracy"],
    }


def measure_recall(run: str, num_documents: int) -> dict[int, float]:
    """Returns the share of keys that a trained model recalls, by class of distance; of long documents that are new."""
    model, rng = open_artifact(Path(run)).model, np.random.default_rng(10_000)
    recalled: dict[int, list[bool]] = {distance: [] for distance in DISTANCES}
    for _ in range(num_documents):
        document, questions = draw_document(rng, max(FILLERS))
        tokens_BT = torch.from_numpy(document[None, :-1])
        with torch.no_grad():
            best_T = model(Batch(tokens_BT, tokens_BT)).logits_BTV[0].argmax(-1)
        for place, distance in questions.items():
            recalled[class_of(distance)].append(int(best_T[place - 1]) == document[place])
    return {distance: float(np.mean(found)) for distance, found in recalled.items()}


def run_arms(
    arms: dict[str, dict[str, Any]], config: dict[str, Any], arguments: argparse.Namespace, folder: Path
) -> dict[str, dict[str, Any]]:
    """Trains every arm at every learning rate for an equal time; returns the best of each by validation loss."""
    best = {}
    for name, section in arms.items():
        tried = []
        for lr in arguments.lr:
            optim: dict[str, Any] = {"lr": lr}
            if arguments.muon:
                optim |= {"kind": "muon", "muon": {"lr": lr, "adjust_lr_fn": "match_rms_adamw"}}
                optim["schedule"] = {"kind": "linear", "min_ratio": 0}
            run = {**config, "model": section, "optim": optim}
            label = f"{name.replace(' ', '-')}-{lr:g}"
            tried.append(train_for(folder, label, run, arguments.budget_s, arguments.probe_steps) | {"lr": lr})
        best[name] = min(tried, key=lambda found: found["val_loss"])
        print(name, {key: best[name][key] for key in ("lr", "steps", "val_loss")}, file=sys.stderr)
    return best


def _common(data: Path, seq_len: int, rows: int, micro: int) -> dict[str, Any]:
    return {
        "data": {"path": str(data), "lanes": 1, "block_samples": 2048},
        "batch": {"global_tokens": rows * seq_len, "seq_len": seq_len, "micro": micro},
        "engine": {"kind": "single", "zero_stage": 0, "precision": "fp32", "device": "cpu"},
        "tracking": {"log_every_steps": 4, "wandb": "off"},
    }


def answer(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one question; returns its figures."""
    if arguments.question == "speed":
        arms = plan_arms(
            arguments.arms, arguments.vocab_size, max(arguments.lengths), arguments.width, arguments.layers
        )
        configs = {name: parse_model(section) for name, section in arms.items()}
        figures = measure_speed(configs, arguments.lengths, arguments.tokens, arguments.rounds)
    elif arguments.question == "loss":
        vocab_size, given = load_index(arguments.data).vocab_size, RECIPE if arguments.muon else None
        arms = plan_arms(arguments.arms, vocab_size, 256, arguments.width, arguments.layers, given)
        config = _common(arguments.data, 256, 8, 8) | {"objective": {"kind": "causal"}}
        figures = {"arms": run_arms(arms, config, arguments, arguments.output / "loss")}
    else:
        folder = arguments.output / "recall-data"
        if not folder.exists():
            write_recall(folder, arguments.documents)
        vocab_size = load_index(folder).vocab_size
        arms = plan_arms(arguments.arms, vocab_size, RECALL_ROW, arguments.width, RECALL_LAYERS, {"init": "xavier"})
        config = _common(folder, RECALL_ROW, 8, 8) | {"objective": {"kind": "supervised"}}
        config["data"] |= {"packing": "bins"}
        found = run_arms(arms, config, arguments, arguments.output / "recall")
        for arm in found.values():
            arm["recall"] = measure_recall(arm["run"], arguments.recall_documents)
        figures = {"arms": found}
    sizes = {name: count_parameters(parse_model(section)) for name, section in arms.items()}
    return {"question": arguments.question, **figures, "parameters": sizes}


def main() -> None:
    """Measures one question, prints its row and adds it to OUTPUT/rows.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=("speed", "loss", "recall"))
    parser.add_argument("--output", type=Path, default=Path("runs/recurrent"))
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"), help="loss: a shard folder of text")
    names = (TRANSFORMER, *RECURRENT, *STATES)
    parser.add_argument("--arms", nargs="+", choices=names, default=[TRANSFORMER, *RECURRENT])
    parser.add_argument("--width", type=int, default=256, help="of the Transformer: a multiple of 32")
    parser.add_argument("--layers", type=int, default=4, help="speed, loss: of the Transformer")
    parser.add_argument("--budget-s", type=float, default=1200.0, help="loss, recall: CPU seconds of training an arm")
    parser.add_argument("--probe-steps", type=int, default=12)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 3e-3])
    parser.add_argument("--muon", action="store_true", help="Muon and a linear decay to 0, not AdamW and a cosine")
    parser.add_argument("--documents", type=int, default=300_000, help="recall: of the data")
    parser.add_argument("--recall-documents", type=int, default=1000, help="recall: asked")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--tokens", type=int, default=4096, help="speed: of a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vocab-size", type=int, default=4096, help="speed")
    parser.add_argument("--quick", action="store_true", help="a trial of under a minute, whose figures mean nothing")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.output /= "quick"
        arguments.width, arguments.budget_s, arguments.probe_steps, arguments.lr = 32, 0.5, 4, [3e-3]
        arguments.documents, arguments.recall_documents, arguments.lengths = 2000, 20, [32, 64]
        arguments.tokens, arguments.rounds, arguments.vocab_size = 256, 2, 256
        if arguments.question != "speed":
            arguments.arms = [TRANSFORMER, "lstm x1", "hybrid"]
    row = answer(arguments) | {"quick": arguments.quick, "environment": environment(("torch",))}
    arguments.output.mkdir(parents=True, exist_ok=True)
    with (arguments.output / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
