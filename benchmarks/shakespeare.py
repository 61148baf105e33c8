"""Character-level Shakespeare with nanoGPT's CPU configuration: our recipes beside nanoGPT's own train.py, in one run.

    python -m benchmarks.shakespeare --nanogpt PATH --text input.txt [--seeds 1337 1 2] [--arms muon] [--quick]

PATH is a clone of github.com/karpathy/nanoGPT, bare or not.

    nanogpt    2,000 steps of 12 rows of 64 characters; train.py as it is, but for the seed that it gives to torch
    char       the same configuration here, shakespeare_char.yaml
    muon       shakespeare_muon.yaml: another optimizer, model and batch, in the CPU time of nanoGPT
    short      muon for as few steps as reach nanoGPT's loss, in smaller batches

All run on one thread, start-up counted, and are scored in the same way: the mean over the whole validation split (the
last tenth of the text), cut into windows of 64.

    --loop ROUNDS    instead: the CPU time of a step of both whole loops at this configuration, data, logging and ledger
                     included. A long run less a short one, which takes start-up and evaluation out.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Timing, is_conclusive, print_row, ratio, time_once

MUON = "configs/run/shakespeare_muon.yaml"
SMALL_BATCHES = ("batch.global_tokens=768", "batch.micro=12")
OURS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "char": ("configs/run/shakespeare_char.yaml", 2000, ()),
    "muon": (MUON, 950, ()),
    "short": (MUON, 120, (*SMALL_BATCHES, "optim.schedule.warmup_steps=10")),
}
"""Recipe, steps and overrides of each arm."""
WITHIN = 0.01
LOOP_STEPS = 20, 170
LOOP_MUST, LOOP_AIM = 0.97, 1.0
NANOGPT = """
import json, os, runpy, sys
import numpy as np, torch
seed, out = int(sys.argv[1]), sys.argv[2]
sys.argv = ["train.py", *sys.argv[3:]]
sys.path.insert(0, os.getcwd())
manual_seed = torch.manual_seed
torch.manual_seed = lambda given: manual_seed(given - 1337 + seed)
trained = runpy.run_path("train.py", run_name="__main__")
model, size, device = trained["model"].eval(), trained["block_size"], trained["device"]
tokens = np.fromfile(os.path.join(trained["data_dir"], "val.bin"), dtype=np.uint16).astype(np.int64)
rows = (len(tokens) - 1) // size
x = torch.from_numpy(tokens[: rows * size].reshape(rows, size)).to(device)
y = torch.from_numpy(tokens[1 : rows * size + 1].reshape(rows, size)).to(device)
with torch.no_grad(), trained["ctx"]:
    total = sum(float(model(x[i : i + 16], y[i : i + 16])[1]) * len(x[i : i + 16]) for i in range(0, rows, 16))
open(out, "w").write(json.dumps({"loss": total / rows, "targets": rows * size}))
"""


def nanogpt_flags(steps: int) -> list[str]:
    """Returns the arguments that nanoGPT's README gives for a CPU; the loss of 20 batches is taken once, at the end."""
    shape = ["--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0"]
    length = [f"--max_iters={steps}", f"--lr_decay_iters={steps}", f"--eval_interval={steps}", "--eval_iters=20"]
    return [
        "config/train_shakespeare_char.py",
        "--device=cpu",
        "--compile=False",
        "--log_interval=500",
        *shape,
        *length,
    ]


def run(command: list[str], folder: Path) -> None:
    """Runs a command there, one thread; ends the benchmark with what it said where it fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def train_nanogpt(source: Path, seed: int, steps: int) -> dict[str, Any]:
    """Trains nanoGPT; returns its loss over the whole validation split."""
    out = source / f"loss-{seed}.json"
    run([sys.executable, "-c", NANOGPT, str(seed), str(out), *nanogpt_flags(steps)], source)
    return dict(json.loads(out.read_text()))


def train_ours(folder: Path, arm: str, seed: int, shorter: int | None = None) -> dict[str, Any]:
    """Trains a recipe, or fewer steps of it; returns its loss over the whole validation split."""
    recipe, steps, overrides = OURS[arm]
    shortened = [f"train.steps={steps}", *overrides]
    if shorter is not None:
        shortened += [f"train.steps={shorter}", "optim.schedule.warmup_steps=10"]
    name = f"{arm}-{seed}-{shorter}"
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    where = [f"run.dir={folder / 'runs'}", f"run.name={name}", f"data.path={folder / 'data'}", f"seed={seed}"]
    quiet = ["tracking.wandb=off", "eval.every_steps=1000000"]
    run([sys.executable, "-m", "pretrain", "train", recipe, *shortened, *where, *quiet], folder)
    rows = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    (held,) = [row for row in map(json.loads, rows) if "val_loss" in row]
    return {"loss": held["val_loss"], "targets": int(held["val_tokens"])}


def time_loops(source: Path, folder: Path, seed: int, rounds: int) -> dict[str, Any]:
    """Times a step of both loops in alternation; prints and returns the figures."""
    trainers = {
        "ours": partial(train_ours, folder, "char", seed),
        "nanogpt": partial(train_nanogpt, source, seed),
        "ours_again": partial(train_ours, folder, "char", seed),
    }
    first, last = LOOP_STEPS
    steps: dict[str, list[Timing]] = {arm: [] for arm in trainers}
    for number in range(rounds):
        for arm, train in list(trainers.items())[:: -1 if number % 2 else 1]:
            short, long = time_once(partial(train, first)), time_once(partial(train, last))
            steps[arm].append(Timing((long.cpu_s - short.cpu_s) / (last - first), long.wall_s - short.wall_s))
    aa, speed = ratio(steps["ours"], steps["ours_again"]), ratio(steps["nanogpt"], steps["ours"])
    ms = {arm: round(1e3 * float(np.median([run.cpu_s for run in runs])), 2) for arm, runs in steps.items()}
    held = "aim reached" if speed.low >= LOOP_AIM else "holds" if speed.low >= LOOP_MUST else "MISSED"
    print(f"a step of ours over nanoGPT's {speed}, must {LOOP_MUST}, aim {LOOP_AIM}: {held}; A/A {aa}; ms of CPU {ms}")
    return {"speed": str(speed), "aa": str(aa), "conclusive": is_conclusive(aa), "ms": ms}


def main() -> None:
    """Trains all at every seed and prints one JSON row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    parser.add_argument("--text", type=Path, required=True, help="the text of its shakespeare_char example")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=tuple(OURS), default=list(OURS), help="those beside nanoGPT")
    parser.add_argument("--quick", action="store_true", help="20 steps of one seed, whose figures mean nothing")
    parser.add_argument("--loop", type=int, default=0, metavar="ROUNDS", help="time a step of both loops instead")
    arguments = parser.parse_args()
    quick = arguments.quick
    seeds = arguments.seeds[:1] if quick else arguments.seeds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "nanogpt"
        run(["git", "clone", "--quiet", str(arguments.nanogpt.resolve()), str(source)], folder)
        shutil.copy(arguments.text, source / "data/shakespeare_char/input.txt")
        run([sys.executable, "data/shakespeare_char/prepare.py"], source)
        options = ["--tokenizer", "char", "--split", "tail:0.1"]
        text = str(arguments.text.resolve())
        run([sys.executable, "-m", "pretrain", "prepare", "--input", text, "--output", "data", *options], folder)
        if arguments.loop:
            print_row("loop", time_loops(source, folder, seeds[0], arguments.loop), ("torch",))
            return
        trainers = {"nanogpt": lambda seed: train_nanogpt(source, seed, 20 if quick else 2000)} | {
            arm: partial(train_ours, folder, arm, shorter=20 if quick else None) for arm in arguments.arms
        }
        found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in trainers}
        for seed in seeds:
            for arm, train in trainers.items():
                result: dict[str, Any] = {"seed": seed}
                timing = time_once(lambda: result.update(train(seed)))  # noqa: B023
                found[arm].append(result | {"cpu_s": round(timing.cpu_s, 1)})
                print(arm, found[arm][-1], file=sys.stderr)
    means = {
        arm: {key: float(np.mean([result[key] for result in results])) for key in ("loss", "cpu_s")}
        for arm, results in found.items()
    }
    peer = means["nanogpt"]
    marks = {  # arm, highest loss, largest share of nanoGPT's CPU time
        "char within 0.01 of nanoGPT": ("char", peer["loss"] + WITHIN, np.inf),
        "muon at 1.55 in nanoGPT's CPU time": ("muon", 1.55, 1.0),
        "short at nanoGPT's loss in a third of its CPU time": ("short", peer["loss"], 1 / 3),
    }
    held = {
        what: means[arm]["loss"] <= loss and means[arm]["cpu_s"] <= share * peer["cpu_s"]
        for what, (arm, loss, share) in marks.items()
        if arm in means
    }
    print_row("shakespeare", {"quick": quick, **found, "means": means, "held": held}, ("torch",))


if __name__ == "__main__":
    main()
