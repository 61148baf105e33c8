"""Multi30k at an equal time: a Transformer beside LSTM encoder-decoders, without attention and with two kinds.

    pretrain prepare configs/prepare/multi30k.yaml ...         (as configs/run/multi30k.yaml says)
    python -m benchmarks.recurrent_bleu --data data/multi30k --source test.en --reference test.de [--budget-s 1200]

Trained as in benchmarks/recurrent.py, by CPU time on one thread, each by its recipe for twenty minutes. All are of one
size, embeddings counted, and a step has some 1,100 target tokens. BLEU is lower-cased and tokenised; rows go to
OUTPUT/rows.jsonl.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import environment
from benchmarks.recurrent import train_for
from pretrain.config.load import load_config
from pretrain.plan.params import count_parameters

RECIPES = Path("configs/run")
LSTM = "multi30k_recurrent.yaml"
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("multi30k_muon.yaml", {}),
    "lstm": (LSTM, {"attention": "none", "encoder": {"width": 204}, "decoder": {"width": 204}}),
    "lstm, Bahdanau": (LSTM, {}),
    "lstm, Luong": (LSTM, {"attention": "luong", "encoder": {"width": 196}, "decoder": {"width": 196}}),
}


def plan_run(name: str, data: Path) -> dict[str, Any]:
    """Returns the config of an arm, without its run and length."""
    recipe, model = ARMS[name]
    schedule = load_config(RECIPES / recipe).optim.schedule
    return {
        "include": str((RECIPES / recipe).resolve()),
        "data": {"path": str(data.resolve())},
        "model": model,
        "optim": {"schedule": {"kind": schedule.kind, "min_ratio": schedule.min_ratio}},
        "checkpoint": {"every_steps": 1_000_000},
        "tracking": {"wandb": "off"},
    }


def score(run: Path, source: Path, reference: Path) -> dict[str, Any]:
    """Returns what `pretrain evaluate` says of a translator, greedy and with a beam of 5."""
    texts = ["--source", str(source), "--reference", str(reference), "--beams", "1,5", "--length-penalty", "0.8"]
    command = [sys.executable, "-m", "pretrain", "evaluate", str(run), *texts, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout))


def main() -> None:
    """Trains and scores every arm, prints the row and adds it to OUTPUT/rows.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--source", type=Path, required=True, help="English lines of the test set")
    parser.add_argument("--reference", type=Path, required=True, help="the German ones")
    parser.add_argument("--output", type=Path, default=Path("runs/recurrent"))
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--budget-s", type=float, default=1200.0, help="CPU seconds of training an arm")
    parser.add_argument("--probe-steps", type=int, default=8)
    arguments = parser.parse_args()
    found = {}
    for name in arguments.arms:
        config, label = plan_run(name, arguments.data), name.replace(", ", "-").lower()
        trained = train_for(arguments.output / "bleu", label, config, arguments.budget_s, arguments.probe_steps)
        model = load_config(Path(trained["run"]) / "config.yaml").model
        trained["scores"] = score(Path(trained["run"]), arguments.source, arguments.reference)
        found[name] = trained | {"parameters": count_parameters(model)}
        print(name, found[name], file=sys.stderr)
    row = {
        "question": "bleu",
        "quick": False,
        "arms": found,
        "parameters": {n: a["parameters"] for n, a in found.items()},
    }
    with (arguments.output / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row | {"environment": environment(("torch",))}) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
