"""Ablation of recipes: each ingredient alone and each left out, at an equal CPU time.

    python -m benchmarks.recipes quickstart --data data/stdlib --other-data data/stdlib-8192
        [--budget-s 270 | --steps 200] [--seeds 1 2 3] [--arms before recipe]

    before           the recipe that stood here before, AdamW
    recipe, again    as it is shipped; twice, for what a difference of nothing looks like
    plain            it without all of its ingredients
    with NAME        plain with one ingredient
    without NAME     the recipe without one
    added NAME       the recipe with one that it does not have

Arms of another vocabulary read the same text from --other-data, and are left out without it; losses are in bits a byte.
Each arm trains on one thread for as many steps as fill the budget, by the CPU time of short runs of all arms in turn,
--rounds of them; with --steps all train as many, for ingredients whose cost is below the noise of these short runs.
Arms follow each other within a seed. Of an average of the weights its loss counts. Rows go to OUTPUT/rows.jsonl as
they are measured.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import append_row, environment, time_once

PROBE_STEPS = (12, 84)
"""Steps of the two short runs: far enough apart that their start-ups, a second apart at times, hardly count."""
QUIET = ("tracking.wandb=off", "checkpoint.every_steps=1000000", "eval.every_steps=1000000")
ONE_PROCESS = ("engine.kind=single", "engine.zero_stage=0", "engine.device=cpu")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A config, and the overrides that leave each ingredient out, or add another."""

    config: str
    before: tuple[str, ...]
    """The config before it, with overrides."""
    without: dict[str, tuple[str, ...]]
    other_vocabulary: tuple[str, ...] = ()
    """Arms whose data have another vocabulary."""
    added: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Overrides that add an ingredient which the recipe lacks."""


ADAMW = ("optim.kind=adamw", "optim.muon=null")
RECIPES = {
    "quickstart": Recipe(
        "configs/run/quickstart.yaml",
        (
            "configs/run/quickstart.yaml",
            *ADAMW,
            "model.preset=llama-5m",
            "optim.lr=1e-3",
            "batch={global_tokens: 4096, seq_len: 256, micro: 8}",
        ),
        {
            "muon": ADAMW,
            "NorMuon": ("optim.muon.row_beta2=null",),
            "values": ("model.decoder.value_residual=false", "model.decoder.value_embeddings=0"),
            "relu2": ("model.decoder={activation: silu, gated: true, ff_width: 352}",),
            "zero outputs": ("model.init_output=drawn",),
            "qk_norm": ("model.decoder.qk_norm=false",),
            "short rows": ("batch.seq_len=256", "batch.micro=4"),
            "small batches": ("batch.global_tokens=4096",),
            "small vocabulary": (),
        },
        ("before", "without small vocabulary"),
        {
            "soft cap": ("model.head.soft_cap=30",),
            "residual scalars": ("model.decoder.residual_scalars=true",),
            "partial rotary": ("model.decoder.rope_fraction=0.5",),
            "yarn": ("model.decoder.rope_scaling={kind: yarn, factor: 2, original_max_seq_len: 64}",),
            "growing rows": ("batch.short_rows=[{until_tokens: 150000, seq_len: 64}]",),
            "short windows": ("batch.short_windows=[{until_tokens: 150000, window: 32}]",),
            "split heads": ("optim.muon.split_heads=true",),
            "lion": ("optim.kind=lion", "optim.muon=null", "optim.lr=2e-3"),
            "soap": ("optim.kind=soap", "optim.muon=null", "optim.lr=8e-3"),
            "cautious decay": ("optim.cautious_decay=true",),
            "linear decay": ("optim.schedule={kind: linear, min_ratio: 0}",),
            "average": ("optim.ema.horizon_steps=20",),
        },
    ),
    "shakespeare": Recipe(
        "configs/run/shakespeare_muon.yaml",
        ("configs/run/shakespeare_char.yaml",),
        {
            "muon": ADAMW,
            "n-grams": ("model.ngram_embeddings=0",),
            "NorMuon": ("optim.muon.row_beta2=null",),
            "rotary": ("model.decoder.position=learned",),
            "relu2": ("model.decoder.activation=gelu",),
            "zero outputs": ("model.init_output=drawn",),
            "qk_norm": ("model.decoder.qk_norm=false",),
            "values": ("model.decoder.value_residual=false", "model.decoder.value_embeddings=0"),
            "residual_scalars": ("model.decoder.residual_scalars=false",),
            "linear decay": ("optim.schedule={kind: cosine, min_ratio: 0.1}",),
        },
    ),
}


def arms_of(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """Returns the config and the overrides of each arm, in the order in which they run."""
    here = (recipe.config,)
    arms = {"before": recipe.before, "recipe": here, "again": here, "plain": sum(recipe.without.values(), here)}
    for name, overrides in recipe.without.items():
        others = (values for other, values in recipe.without.items() if other != name)
        if overrides:  # else the ingredient is one of the data, which `plain` has too
            arms[f"with {name}"] = sum(others, here)
        arms[f"without {name}"] = here + overrides
    for name, overrides in recipe.added.items():
        if not any(key.startswith("optim.muon.") for key in overrides):  # `plain` has AdamW
            arms[f"with {name}"] = arms["plain"] + overrides
        arms[f"added {name}"] = here + overrides
    return arms


def train(folder: Path, name: str, arm: list[str], steps: int) -> tuple[list[dict[str, Any]], float]:
    """Trains a new run on one thread; returns the rows of its metrics, and its CPU time in seconds."""
    if (folder / name).exists():
        raise SystemExit(f"{folder / name} exists, and would be gone on with; give another --output")
    where = [f"run.dir={folder}", f"run.name={name}", f"train.steps={steps}"]
    command = [sys.executable, "-m", "pretrain", "train", *arm, *ONE_PROCESS, *QUIET, *where]

    def run() -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")

    cpu_s = time_once(run).cpu_s
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()], cpu_s


def plan_steps(folder: Path, arms: dict[str, list[str]], rounds: int, budget_s: float) -> dict[str, int]:
    """Returns the steps of each arm in `budget_s` seconds of CPU time, start-up included.

    By two short runs of it a round, the arms in turn, and their medians: what else the machine does for
    some minutes then costs no arm its steps.
    """
    first, second = PROBE_STEPS
    schedule = [f"optim.schedule.warmup_steps={first // 4}", "eval.max_tokens=1024"]
    found: dict[str, list[list[float]]] = {name: [] for name in arms}
    for turn in range(rounds):
        for name, arm in arms.items():
            label = f"{name.replace(' ', '-')}-probe-{turn + 1}"
            found[name].append([train(folder, f"{label}-{n}", [*arm, *schedule], n)[1] for n in PROBE_STEPS])
    steps = {}
    for name, turns in found.items():
        short, long = np.median(turns, axis=0)
        steps[name] = round((budget_s - short) / (long - short) * (second - first)) + first
    return steps


def main() -> None:
    """Trains every arm at every seed, and prints the means with 95% intervals of the difference to the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=tuple(RECIPES))
    parser.add_argument("--data", type=Path, required=True, help="the shard folder that the recipe's head names")
    parser.add_argument("--other-data", type=Path, help="the same text with the vocabulary of `before`")
    parser.add_argument("--output", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--budget-s", type=float, default=270.0, help="CPU seconds of an arm, start-up included")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="of every arm; default: as many as fill the budget")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of short runs that the steps are planned by")
    parser.add_argument("--arms", nargs="+", help="some of them; default: all")
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.recipe]
    arms = arms_of(recipe)
    unknown = sorted(set(arguments.arms or ()) - set(arms))
    if unknown:
        parser.error(f"no arms {unknown}; there are {list(arms)}")
    elsewhere = recipe.other_vocabulary
    chosen = [name for name in arguments.arms or arms if arguments.other_data or name not in elsewhere]
    folder = arguments.output / arguments.recipe
    data = {name: arguments.other_data if name in elsewhere else arguments.data for name in chosen}
    whole = {name: [*arms[name], f"data.path={data[name]}"] for name in chosen}
    steps = dict.fromkeys(chosen, arguments.steps)
    if arguments.steps is None:
        steps = plan_steps(folder, whole, arguments.rounds, arguments.budget_s)
    losses: dict[str, list[float]] = {name: [] for name in chosen}
    for seed in arguments.seeds:
        for name, arm in whole.items():
            label = f"{name.replace(' ', '-')}-{seed}"
            rows, cpu_s = train(folder, label, [*arm, f"seed={seed}"], steps[name])
            (held,) = [row for row in rows if "val_loss" in row]
            averaged = held.get("val_ema_loss", held["val_loss"]) / held["val_loss"]
            losses[name].append(held["val_bits_per_byte"] * averaged)
            row = {"question": "recipes", "recipe": arguments.recipe, "arm": name, "seed": seed, "steps": steps[name]}
            row |= {"cpu_s": round(cpu_s, 1), "bits_per_byte": losses[name][-1]}
            append_row(arguments.output / "rows.jsonl", row | {"environment": environment(("torch",))})
            print(row, file=sys.stderr)
    for name, values in losses.items():
        print(f"{name:24} {np.mean(values):.4f}  {_difference(values, losses.get('recipe'))}")


def _difference(values: list[float], recipe: list[float] | None) -> str:
    """Returns the mean difference to the recipe over the seeds, and its 95% interval (Student's t)."""
    if recipe is None or values is recipe or len(values) < 2:
        return ""
    apart = np.subtract(values, recipe)
    quantile = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}.get(len(apart), 2.6)
    return f"{apart.mean():+.4f} +- {quantile * apart.std(ddof=1) / len(apart) ** 0.5:.4f}"


if __name__ == "__main__":
    main()
