"""A ladder: runs of some sizes and budgets under one rule, and the large run that they are to predict.

budget 1 ... k    a size on the line of tokens a parameter, and below the largest budget one of three
                  times the parameters and one of a third: by these the effects of parameters and of
                  tokens separate, which a line alone cannot tell
target            on the line, at the budget of the large run

plan_ladder  ->  write_ladder  ->  LADDER/ladder.yaml, reference.yaml, configs/NAME.yaml  ->  load_ladder
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import Field, model_validator

from pretrain.config.base import NAME_PATTERN, Section
from pretrain.config.load import dump_config, load_config, parse_section
from pretrain.config.run import RunConfig
from pretrain.config.yaml_nodes import read_yaml
from pretrain.errors import ConfigError
from pretrain.plan.course import StoredData, Supply, plan_supply
from pretrain.scale.law import BESIDE, MIN_RUNS
from pretrain.scale.scaling_rule import (
    FLOPS_OF_A_WEIGHT,
    LadderRule,
    parameters_of,
    scale_run,
    size_of,
    width_step,
)
from pretrain.utils.io import make_dir, new_folder, write_file
from pretrain.utils.units import count

RATIO = 30.0
"""FLOPs of the large run over those of the largest run of a ladder, by default."""
SPREAD = 10.0
"""FLOPs of the largest run of a ladder over those of the smallest, by default."""
RUNGS = 4
"""Sizes, and budgets, of a ladder by default."""
MAX_EPOCHS = 4.0
"""Epochs up to which repeated data are worth almost as much as new ones (Muennighoff et al. 2023)."""
MIN_SIZES = 3
MAX_FLOPS = 1e28
"""Largest budget, twenty times that of the largest run to date: larger sizes take minutes to find."""
LADDER = "ladder.yaml"
REFERENCE = "reference.yaml"


class LadderRun(Section):
    """A run of a ladder."""

    name: str = Field(pattern=NAME_PATTERN)
    width: int = Field(ge=1)
    layers: int = Field(ge=1)
    parameters: float = Field(gt=0)
    """N, FLOPs a token over 6."""
    tokens: int = Field(ge=1)
    steps: int = Field(ge=1)
    global_tokens: int = Field(ge=1)
    lr: float = Field(gt=0)
    flops: float = Field(gt=0)
    epochs: float | None = None
    """Times that the data are read. None: the data were not here."""


class Ladder(Section):
    """What `ladder.yaml` has."""

    version: Literal[1] = 1
    name: str = Field(pattern=NAME_PATTERN)
    rule: LadderRule
    budget: float = Field(gt=0)
    """FLOPs of the large run."""
    vocab_size: int | None = None
    """Vocabulary of the data. None: they were not here, and one was assumed."""
    flops: float = Field(gt=0)
    """FLOPs of all runs but the large one."""
    runs: list[LadderRun] = Field(min_length=1)
    target: LadderRun

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [run.name for run in (*self.runs, self.target)]
        if len(set(names)) < len(names):
            raise ValueError("two runs have the same name; plan the ladder again")
        return self


@dataclass(frozen=True, slots=True)
class LadderRequest:
    """Options of a ladder."""

    budget: float  # FLOPs of the large run
    smallest: float  # FLOPs of the smallest run
    largest: float  # FLOPs of the largest run of the ladder
    rungs: int = RUNGS  # number of sizes, and of budgets
    widths: tuple[int, ...] = ()  # sizes; empty: chosen by the budgets
    seeds: int = 1  # runs of each size on the line


@dataclass(frozen=True)
class LadderPlanner:
    """A reference run, a rule, and the data: what makes the runs of a ladder below `folder`."""

    reference: RunConfig
    rule: LadderRule
    folder: Path
    vocab_size: int | None  # None: an unknown vocabulary is assumed

    def run(self, width: int, flops: float, suffix: str, repeat: int = 0) -> RunConfig:
        """Returns the config of a run, its seed `repeat` above the reference's. Raises: ConfigError as `scale_run`."""
        place = {"dir": str(self.folder / "runs"), "name": f"{self.reference.run.name}-{suffix}"}
        run = scale_run(self.reference, self.rule, width, flops, vocab_size=self.vocab_size, run=place)
        return run.model_copy(update={"seed": run.seed + repeat})

    def parameters(self, width: int) -> float:
        """Returns N of a width. Raises: ConfigError where the width does not divide into heads."""
        return parameters_of(self.reference, self.rule, width, self.vocab_size)

    def nearest_width(self, parameters: float) -> int:
        """Returns the width whose N is nearest, by its ratio."""
        step = width_step(self.reference)
        low, high = 1, 2
        while self.parameters(high * step) < parameters:
            low, high = high, 2 * high
        # N grows with the width: bisection to two neighbours.
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.parameters(middle * step) < parameters else (low, middle)
        return step * min((low, high), key=lambda steps: abs(math.log(self.parameters(steps * step) / parameters)))


def plan_ladder(
    planner: LadderPlanner, request: LadderRequest, stored: StoredData | None
) -> tuple[Ladder, list[RunConfig]]:
    """Plans the runs; returns them and their configs, the large run last. `stored=None`: no data here.

    Raises:
        ConfigError: Budgets, widths or data that cannot work.
    """
    if stored is not None and not stored.has_validation:
        raise ConfigError(
            "the data have no validation split, whose loss the law is about",
            where="data.path",
            fix="prepare them with --split tail:0.05",
        )
    a_square = FLOPS_OF_A_WEIGHT * planner.rule.tokens_per_parameter  # FLOPs of the line over N^2
    if request.widths:
        widths = sorted(set(request.widths))
        budgets = [a_square * planner.parameters(width) ** 2 for width in widths]
    else:
        ratio = request.largest / request.smallest
        budgets = [request.smallest * ratio ** (rung / max(1, request.rungs - 1)) for rung in range(request.rungs)]
        widths = [planner.nearest_width(math.sqrt(budget / a_square)) for budget in budgets]
    _check_sizes(widths, budgets, request, planner, stored)
    line = list(zip(widths, budgets, strict=True))
    cells = [(width, budget, repeat) for repeat in range(request.seeds) for width, budget in line]
    for width, budget in line[:-1]:
        for factor in (1 / BESIDE, BESIDE):
            beside = planner.nearest_width(planner.parameters(width) * factor)
            if beside != width:
                cells.append((beside, budget, 0))
    configs = [planner.run(width, flops, str(number), repeat) for number, (width, flops, repeat) in enumerate(cells)]
    large = planner.nearest_width(math.sqrt(request.budget / a_square))
    configs.append(planner.run(large, request.budget, "target"))
    *runs, target = [describe_run(config, planner.vocab_size, stored) for config in configs]
    ladder = Ladder(
        name=planner.reference.run.name,
        rule=planner.rule,
        budget=float(request.budget),
        vocab_size=planner.vocab_size,
        flops=sum(run.flops for run in runs),
        runs=runs,
        target=target,
    )
    return ladder, configs


def _check_sizes(
    widths: Sequence[int],
    budgets: Sequence[float],
    request: LadderRequest,
    planner: LadderPlanner,
    stored: StoredData | None,
) -> None:
    """Refuses a ladder whose sizes cannot tell a law, or that is above its target."""
    option = "--widths" if request.widths else "--rungs"
    if len(widths) < MIN_SIZES:
        raise ConfigError(
            f"{len(widths)} sizes give too few runs for a law, which takes {MIN_RUNS}",
            where=option,
            fix=f"give at least {MIN_SIZES} sizes",
        )
    if budgets[0] >= request.budget:
        raise ConfigError(
            f"{request.budget:.3g} FLOPs are below the {budgets[0]:.3g} of the smallest run",
            where="--budget",
            fix=f"raise it, or lower {option} or --smallest",
        )
    if budgets[-1] >= request.budget:
        raise ConfigError(
            f"{request.budget:.3g} FLOPs are not above the {budgets[-1]:.3g} of the largest run of the ladder",
            where="--budget",
            fix=f"raise it, or lower {option} or --largest",
        )
    same = next((width for width, after in pairwise(widths) if width == after), None)
    if same is not None:
        step = width_step(planner.reference)
        text = f"two budgets have the same size, width {same}: widths go in steps of {step}, a group of heads"
        # Neighbouring widths from the smallest on, whose budgets are then those of their sizes.
        apart = [widths[0] + step * number for number in range(max(MIN_SIZES, len(widths)))]
        ratio = planner.rule.tokens_per_parameter
        largest = planner.parameters(apart[-1])
        instead = f"--widths {','.join(map(str, apart))} --budget {RATIO * FLOPS_OF_A_WEIGHT * ratio * largest**2:.1e}"
        tokens = ratio * largest * math.sqrt(RATIO)
        needs = f"its large run reads {count(tokens)} tokens"
        fix = f"use {instead} ({needs}), or narrower heads in the config"
        if stored is not None and tokens > MAX_EPOCHS * stored.tokens:
            more = f"prepare {count(tokens / MAX_EPOCHS)} tokens (there are {count(stored.tokens)})"
            fix = f"use narrower heads in the config, or {more} for {instead} ({needs})"
        raise ConfigError(text, where=option, fix=fix)


def describe_run(config: RunConfig, vocab_size: int | None, stored: StoredData | None) -> LadderRun:
    """Returns a run of a ladder. Raises: ConfigError where its data are too few."""
    size = size_of(config, vocab_size)
    name = config.run.name
    supply = _supply(config, size.parameters, stored)
    if supply.problem:
        raise ConfigError(supply.problem, where=name)
    if supply.epochs is not None and supply.epochs > MAX_EPOCHS:
        raise ConfigError(
            f"reads its data {supply.epochs:.1f} times; beyond {MAX_EPOCHS:g} the law does not hold",
            where=name,
            fix="prepare more text, or lower --budget or tokens_per_parameter",
        )
    stack = config.model.last_stack
    return LadderRun(
        name=name,
        width=stack.width,
        layers=stack.layers,
        parameters=size.parameters,
        tokens=size.tokens,
        steps=config.train.steps,
        global_tokens=config.batch.global_tokens,
        lr=config.optim.lr,
        flops=size.flops,
        epochs=supply.epochs,
    )


def _supply(config: RunConfig, parameters: float, stored: StoredData | None) -> Supply:
    return plan_supply(
        rows=config.batch.rows,
        row_tokens=config.lengths.row,
        total_rows=config.batch.steps.before(config.train.steps),
        step_s=1.0,
        parameters=round(parameters),
        lanes=config.data.lanes,
        stored=stored,
    )


def write_ladder(ladder: Ladder, reference: RunConfig, configs: Sequence[RunConfig], folder: Path) -> None:
    """Writes a ladder and its configs as a new folder. Raises: ConfigError, DiskError."""
    with new_folder(folder) as new:
        make_dir(new / "configs")
        write_file(new / REFERENCE, dump_config(reference).encode())
        for config in configs:
            write_file(new / "configs" / f"{config.run.name}.yaml", dump_config(config).encode())
        text = yaml.safe_dump(ladder.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=200)
        write_file(new / LADDER, text.encode())


def load_ladder(folder: Path) -> Ladder:
    """Reads a ladder. Raises: ConfigError."""
    path = folder / LADDER
    if not path.is_file():
        raise ConfigError(
            f"no ladder here (no {LADDER})",
            where=str(folder),
            fix="make one with `pretrain scale plan`",
        )
    return parse_section(Ladder, read_yaml(path), str(path))


def is_near(parameters: float, planned: float) -> bool:
    """Returns whether runs BESIDE times off the line can tell a size to be better than the planned one."""
    return 1 / BESIDE**2 <= parameters / planned <= BESIDE**2


def config_path(folder: Path, name: str) -> Path:
    """Returns the config of a run of a ladder."""
    return folder / "configs" / f"{name}.yaml"


def run_path(folder: Path, name: str) -> Path:
    """Returns the folder of a run of a ladder."""
    return folder / "runs" / name


def place_items(folder: Path, name: str) -> list[str]:
    """Returns the item that puts a run below the folder of its ladder; none, unless that was moved or copied.

    Raises: ConfigError: The config is damaged.
    """
    config = load_config(config_path(folder, name), extensions="ignore")
    wanted = run_path(folder, name)
    return [] if config.folder.resolve() == wanted.resolve() else [f"run.dir={wanted.parent}"]
