"""`pretrain quickstart --chat`: from documentation of this machine to a model that answers.

data dialogue  ->  prepare  ->  a few steps of the recipe: FLOPs a second
  ->  width of all stages, and steps of each, by the rules of `scale`
  ->  dialogue        documentation                          evaluate --plain
  ->  dialogue_mid    conversations, loss on all tokens      evaluate
  ->  dialogue_answers    loss on answers alone              evaluate, and again on practice
  ->  dialogue_preferred  DPO against its own wrong answers  evaluate  ->  chat
"""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.cli.wish_commands.command_steps import PROGRAM, CommandSteps, measure_pace

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig

SHARES = {
    "dialogue": 0.1,
    "dialogue_mid": 0.3,
    "dialogue_answers": 0.57,
    "dialogue_preferred": 0.03,
}
"""Recipes of the stages, with their shares of the minutes."""
CONVERSATIONS_A_MINUTE = 2500
DEPTH_BY_WIDTH = 0.5
"""Exponent of the width in the number of layers: a text is read by two at least."""
MIN_PAIRS = 64
"""Wrong answers below which there is nothing to prefer."""
_ON_GPU = ["engine.device=cuda", "engine.precision=bf16"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Minutes of training, and what it runs on."""

    minutes: float
    ranks: int = 1  # processes on a CPU
    gpu: bool = False

    @property
    def name(self) -> str:
        """The beginning of the names of all data and runs."""
        return f"chat-{self.minutes:g}{'-gpu' * self.gpu}"

    @property
    def engine(self) -> list[str]:
        """Overrides of the engine."""
        if self.gpu:
            return _ON_GPU
        return ["engine.kind=ddp"] if self.ranks > 1 else []

    def train(self, config: str) -> list[str]:
        """Returns the arguments that train a config."""
        if self.gpu or self.ranks == 1:
            return ["train", config]
        return ["launch", "local", config, "--ranks", str(self.ranks)]


def run_dialogue(budget: Budget) -> None:
    """Runs all stages, and the conversation where there is a terminal. Started again, it continues.

    Raises: as `fulfil`. ConfigError: Too few minutes.
    """
    steps = CommandSteps()
    source = Path("data") / budget.name
    data = Path("data") / f"{budget.name}-answers"
    if not source.exists():
        count = math.ceil(budget.minutes * CONVERSATIONS_A_MINUTE)
        steps.check(["data", "dialogue", str(source), "--conversations", str(count)])
    texts = _prepare(steps, "dialogue_texts", source / "texts.jsonl", Path("data") / f"{budget.name}-texts")
    _prepare(
        steps,
        "dialogue",
        source / "conversations.jsonl",
        data,
        f"tokenizer.path={texts}/tokenizer.json",
    )
    steps.check(["data", "show", str(data), "--seq-len", "256", "--rows", "1"])
    stages = Stages(budget, texts, data)
    stages.measure(steps)
    questions = str(source / "held_out.jsonl")
    for recipe in SHARES:
        if recipe == "dialogue_preferred" and not _prefer(steps, stages, source):
            break
        run = stages.train(steps, recipe)
        steps.check(["evaluate", str(run), "--questions", questions, *["--plain"] * (recipe == "dialogue")])
    chat = ["chat", str(stages.last), "--temperature", "0"]
    if sys.stdin.isatty():
        print(f"\n$ pretrain {' '.join(chat)}", flush=True)
        os.execv(PROGRAM[0], [*PROGRAM, *chat])
    print(f"\nnext: pretrain {' '.join(chat)}", flush=True)


def _prepare(steps: CommandSteps, recipe: str, source: Path, output: Path, *overrides: str) -> Path:
    steps.check(["prepare", recipe, f"inputs.0.path={source}", f"output={output}", *overrides])
    return output


def _prefer(steps: CommandSteps, stages: "Stages", source: Path) -> bool:
    """Writes pairs of right answers and the model's wrong ones; returns False if they are few."""
    wrong = Path("data") / f"{stages.budget.name}-wrong.jsonl"
    if not wrong.exists():  # written again, it would be another input
        steps.check(
            [
                "evaluate",
                str(stages.last),
                "--questions",
                str(source / "practice.jsonl"),
                "--output",
                str(wrong),
            ]
        )
    count = len(wrong.read_text().splitlines())
    if count < MIN_PAIRS:
        print(f"\n-- no preferences: {count} wrong answers are too few", flush=True)
        return False
    steps.check(
        [
            *("prepare", "preferences", f"inputs.0.path={wrong}", f"output={stages.pairs}"),
            f"tokenizer.path={stages.last}",
        ]
    )
    return True


class Stages:
    """Runs of one size, each from the one before."""

    def __init__(self, budget: Budget, texts: Path, data: Path) -> None:
        self.budget = budget
        self.pairs = Path("data") / f"{budget.name}-pairs"
        self._texts = texts
        self._data = data
        self.last: Path | None = None
        self._width = 0
        self._flops_s = 0.0

    def _changes(self, recipe: str) -> list[str]:
        """Returns the overrides of a recipe: its data, and the run from which it starts."""
        changes = [*self.budget.engine]
        if self.last is not None:
            changes.append(f"init.from={self.last}")
        path = {"dialogue": self._texts, "dialogue_preferred": self.pairs}.get(recipe, self._data)
        return [*changes, f"data.path={path}"]

    def measure(self, steps: CommandSteps) -> None:
        """Measures FLOPs a second by the first recipe, and chooses the width of all stages."""
        from pretrain.config.load import load_config
        from pretrain.scale.ladder import LadderPlanner
        from pretrain.scale.scaling_rule import FLOPS_OF_A_WEIGHT, LadderRule, size_of
        from pretrain.shards.index import load_index
        from pretrain.utils.units import count

        recipe = next(iter(SHARES))
        changes = [*self._changes(recipe), f"run.name={self.budget.name}"]
        config = load_config(recipe, changes)
        step_s = measure_pace(steps, [*self.budget.train(recipe), *changes], config)
        self._vocab_size = load_index(self._texts).vocab_size
        size = size_of(config, self._vocab_size)
        self._flops_s = size.flops / config.train.steps / step_s
        flops = self._flops_s * self.budget.minutes * 60
        self._rule = LadderRule(ranks=self.budget.ranks, depth_by_width=DEPTH_BY_WIDTH)
        planner = LadderPlanner(config, self._rule, Path(), self._vocab_size)
        parameters = math.sqrt(flops / FLOPS_OF_A_WEIGHT / self._rule.tokens_per_parameter)
        self._width = planner.nearest_width(parameters)
        print(
            f"\n-- {count(self._flops_s)} FLOPs a second: {count(flops)} in {self.budget.minutes:g} minutes, "
            f"for {count(parameters)} parameters: width {self._width}",
            flush=True,
        )

    def train(self, steps: CommandSteps, recipe: str) -> Path:
        """Trains a stage for its share of the minutes; returns its run. Raises: as `run_dialogue`."""
        from pretrain.config.load import dump_config, load_config
        from pretrain.scale.scaling_rule import scale_run
        from pretrain.utils.io import make_dir, write_file

        name = f"{self.budget.name}-{recipe.removeprefix('dialogue_')}"
        flops = self._flops_s * self.budget.minutes * 60 * SHARES[recipe]
        config: RunConfig = scale_run(
            load_config(recipe, self._changes(recipe)),
            self._rule,
            self._width,
            flops,
            vocab_size=self._vocab_size,
            run={"dir": "runs", "name": name},
        )
        file = make_dir(Path("data") / self.budget.name) / f"{recipe}.yaml"
        write_file(file, dump_config(config).encode())
        steps.check(self.budget.train(str(file)))
        self.last = config.folder
        return self.last
