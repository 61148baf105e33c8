"""The rule of a ladder: width, depth, learning rate and batch of a run of any size and number of tokens.

    reference run (the user's config), width, FLOPs  ->  scale_run  ->  the config of a run

Width and depth grow together, heads keep their width. The learning rate and the batch are powers
of parameters and tokens relative to the reference run, with the exponents of Li et al. 2025
(Predictable Scale, Part I: Step Law). With `optim.transfer` one learning rate fits all widths, and
stays.
"""

import math
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from pretrain.config.base import Section
from pretrain.config.load import parse_section
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig, ScheduleConfig
from pretrain.config.run import RunConfig
from pretrain.config.yaml_nodes import LocatedTree
from pretrain.errors import ConfigError
from pretrain.plan.task import known_model, task_of

FLOPS_OF_A_WEIGHT = 6
"""FLOPs of training a weight on a token (Kaplan et al. 2020, 2.1)."""
MIN_STEPS = 30
"""Steps below which a run has hardly left its warm-up."""
_FF_MULTIPLE = 16


class LadderRule(Section):
    """Exponents and ratios of a ladder."""

    tokens_per_parameter: float = Field(default=20.0, gt=0)
    """Tokens a parameter on the line that the sizes and the large run are on."""
    depth_by_width: float = Field(default=1.0, ge=0)
    """Exponent of the width in the number of layers. 0: all sizes have the layers of the config."""
    lr_by_parameters: float = -0.713
    """Exponent of the parameters in the learning rate; 0 under `optim.transfer`."""
    lr_by_tokens: float = 0.307
    """Exponent of the tokens in the learning rate; 0 under `optim.transfer`."""
    batch_by_tokens: float = 0.571
    """Exponent of the tokens in the tokens of a step."""
    ranks: int = Field(default=2, ge=1)
    """Number of ranks that the rows of a step and its micro-batches divide among."""


@dataclass(frozen=True, slots=True)
class RunSize:
    """Size of a run as the law counts it."""

    parameters: float  # N: FLOPs a token over 6, so that attention counts and embeddings do not
    tokens: int  # D: target tokens over all steps

    @property
    def flops(self) -> float:
        """FLOPs of training."""
        return FLOPS_OF_A_WEIGHT * self.parameters * self.tokens


def size_of(config: RunConfig, vocab_size: int | None = None) -> RunSize:
    """Returns the size of a run; `vocab_size`: its data's, where the config does not have it."""
    task = task_of(config, known_model(config.model, vocab_size))
    parameters = task.flops.whole.total / FLOPS_OF_A_WEIGHT / config.batch.seq_len
    return RunSize(parameters, config.train.last_step * config.batch.global_tokens)


def has_transfer(optim: OptimConfig) -> bool:
    """Returns whether the config asks for a learning rate that fits all widths (`optim.transfer`)."""
    return "transfer" in type(optim).model_fields and optim.differs("transfer")


def width_step(config: RunConfig) -> int:
    """Returns the smallest step between widths: each of them has whole heads of the same width, and whole groups.

    Raises:
        ConfigError: The model is no Transformer, or has latent attention or other mixers.
    """
    model = config.model
    if not isinstance(model, ModelConfig):
        raise ConfigError(
            "a ladder scales heads and blocks, which model.kind=recurrent lacks",
            fix="use a Transformer, with or without optim.transfer",
        )
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    if any(stack.latent for stack in stacks):
        raise ConfigError(
            "a ladder has no rule for the widths of model.decoder.latent",
            fix="use grouped or multi-head attention",
        )
    if mixers := "".join(stack.lacking("widths") for stack in stacks):
        raise ConfigError(
            f"a ladder has no rule for the widths of {mixers}",
            fix="use attention in each layer",
        )
    common = math.gcd(*(number for stack in stacks for number in (stack.heads, stack.num_kv_heads)))
    return model.last_stack.width // common


def _scale_stack(stack: dict[str, Any], ratio: float, depth: float) -> dict[str, Any]:
    """Returns the values of a stack with `ratio` times the width and `depth` times the layers; heads come out whole."""

    def hidden(width: int) -> int:
        return max(1, round(width * ratio / _FF_MULTIPLE)) * _FF_MULTIPLE

    experts, tables = stack["experts"], stack["embedding_width"]
    if experts and experts["width"]:
        experts = experts | {"width": hidden(experts["width"])}
    return stack | {
        "width": round(stack["width"] * ratio),
        "layers": max(1, round(stack["layers"] * depth)),
        "heads": round(stack["heads"] * ratio),
        "kv_heads": stack["kv_heads"] and round(stack["kv_heads"] * ratio),
        "ff_width": stack["ff_width"] and hidden(stack["ff_width"]),
        "embedding_width": tables and max(1, round(tables * ratio)),
        "experts": experts,
    }


def scale_model(config: RunConfig, rule: LadderRule, width: int) -> dict[str, Any]:
    """Returns the values of `model:` at another width, with the depth that belongs to it.

    Raises:
        ConfigError: The width is no multiple of `width_step`.
    """
    step = width_step(config)
    if width % step or width < step:
        near = " or ".join(str(size) for size in (width // step * step, (width // step + 1) * step) if size)
        raise ConfigError(
            f"width={width} is no multiple of {step}, the width of a group of heads",
            fix=f"use {near}, or more heads in the config",
        )
    assert isinstance(config.model, ModelConfig)
    ratio = width / config.model.last_stack.width
    values = config.model.model_dump(mode="json")
    for name in config.stacks:
        values[name] = _scale_stack(values[name], ratio, ratio**rule.depth_by_width)
    return values | {"preset": None}


def _round_rows(rows: float, ranks: int) -> int:
    """Returns the nearest multiple of `ranks` to rows of four binary digits, 8 to 15 times a power of 2."""
    unit = 2.0 ** max(0, math.floor(math.log2(max(rows, 1))) - 3)
    return max(1, round(round(rows / unit) * unit / ranks)) * ranks


def _scale_schedule(schedule: ScheduleConfig, factor: float, steps: int) -> dict[str, Any]:
    """Returns a schedule in steps of a run of `steps`, its positions multiplied by `factor`."""
    values = schedule.model_dump(mode="json")
    for name in ("warmup_steps", "decay_steps", "cooldown_steps", "hold_steps"):
        if values[name]:
            values[name] = max(1, round(values[name] * factor))
    if values["cooldown_steps"]:  # both may be rounded up
        after = (values["decay_steps"] or steps) - values["warmup_steps"]
        values["cooldown_steps"] = max(1, min(values["cooldown_steps"], after))
    return values


def parameters_of(reference: RunConfig, rule: LadderRule, width: int, vocab_size: int | None) -> float:
    """Returns N of the reference model at another width. Raises: ConfigError: The width, or its depth, does not fit."""
    values = LocatedTree(scale_model(reference, rule, width), {})
    model = parse_section(ModelConfig, values, f"width={width}; --rule depth_by_width=0 keeps the layers")
    return size_of(reference.model_copy(update={"model": model}), vocab_size).parameters


def scale_run(
    reference: RunConfig,
    rule: LadderRule,
    width: int,
    flops: float,
    *,
    vocab_size: int | None,
    run: dict[str, str],
) -> RunConfig:
    """Returns the config of a run of a width that takes so many FLOPs; `run`: its `dir` and `name`.

    The validation loss is measured at its last step.

    Raises:
        ConfigError: The width does not fit, the steps are too few, or the config that results breaks a rule.
    """
    if reference.batch.schedule:
        text, fix = "a ladder has one batch size a run, by batch_by_tokens of --rule", "leave it out"
        raise ConfigError(text, where="batch.schedule", fix=fix)
    base = size_of(reference, vocab_size)
    parameters = parameters_of(reference, rule, width, vocab_size)
    tokens = flops / (FLOPS_OF_A_WEIGHT * parameters)
    more = tokens / base.tokens
    rows = _round_rows(reference.batch.rows * more**rule.batch_by_tokens, rule.ranks)
    global_tokens = rows * reference.batch.seq_len
    steps = round(tokens / global_tokens)
    if steps < MIN_STEPS:
        raise ConfigError(
            f"{steps} steps of {global_tokens} tokens are too few to learn from, at least {MIN_STEPS} are needed",
            where=run["name"],
            fix="lower batch.global_tokens, or raise --smallest and --budget",
        )
    values = reference.model_dump(mode="json", by_alias=True)
    optim = values["optim"]
    if not has_transfer(reference.optim):
        factor = (parameters / base.parameters) ** rule.lr_by_parameters * more**rule.lr_by_tokens
        optim["lr"] = float(f"{optim['lr'] * factor:.4g}")
        if rate := reference.optim.of_matrices("lr"):
            optim[reference.optim.kind]["lr"] = float(f"{rate * factor:.4g}")
    schedule = reference.optim.schedule.in_steps(reference.batch, reference.train.steps)
    longer = steps / reference.train.steps
    optim["schedule"] = _scale_schedule(schedule, longer, steps)
    for name, factor in (("horizon_steps", longer), ("horizon_tokens", more)):
        if optim["ema"][name]:
            optim["ema"][name] = max(1, round(optim["ema"][name] * factor))
    values["model"] = scale_model(reference, rule, width)
    values["batch"] |= {
        "global_tokens": global_tokens,
        "micro": max(size for size in range(1, reference.batch.micro + 1) if rows // rule.ranks % size == 0),
    }
    for short in (*values["batch"]["short_rows"], *values["batch"]["short_windows"]):
        short["until_tokens"] = max(1, round(short["until_tokens"] * more))
    for stage in values["data"]["curriculum"]:
        stage["tokens"] = max(1, round(stage["tokens"] * more))
    values["train"] = {"steps": steps, "stop_after": None}
    values["eval"]["every_steps"] = steps
    values["checkpoint"]["best"] = None
    values["tracking"]["group"] = reference.tracking.group or reference.run.name
    values["run"] = run
    return parse_section(RunConfig, LocatedTree(values, {}), run["name"])
