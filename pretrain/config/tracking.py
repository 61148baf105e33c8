"""`tracking:` and `profile:` -- where metrics go, what else is shown of a run, and which steps are looked into."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pretrain.config.base import Section
from pretrain.config.recurrent import AnyModelConfig, RecurrentConfig
from pretrain.config.train import EvalConfig


class SamplesConfig(Section):
    """Texts that are generated while the run goes on: `samples.jsonl`, and a table in Weights & Biases.

    Attributes:
        prompts: What a decoder continues, or an encoder-decoder answers. None: no texts.
        every_evals: Every so many evaluations (`eval.every_steps`).
        max_tokens: Longest text.
        temperature: 0: the likeliest token each time. Draws are the same each time.
    """

    prompts: list[str] = Field(default_factory=list)
    every_evals: int = Field(default=1, ge=1)
    max_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.0, ge=0)


class AttentionConfig(Section):
    """A picture of what heads attend to, drawn while the run goes on: `attention/`, and an image in Weights & Biases.

    Attributes:
        text: What the model reads; of an encoder-decoder, the source. None: no pictures.
        target: What the decoder of an encoder-decoder reads.
        every_evals: Every so many evaluations (`eval.every_steps`).
        kind: `self`, `cross`, or the self-attention of one stack. None: `cross` where there is any, else `self`.
        layers: Numbers from 0. None: at most four, from the first to the last.
        heads: The same.
    """

    text: str | None = None
    target: str | None = None
    every_evals: int = Field(default=1, ge=1)
    kind: Literal["self", "cross", "encoder", "decoder"] | None = None
    layers: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, min_length=1)
    heads: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, min_length=1)


class TrackingConfig(Section):
    """Where metrics go, besides `metrics.jsonl` and the console (docs/observability.md).

    Attributes:
        log_every_steps: Interval of metric rows.
        norms_every_steps: Interval of norms by layer, in the next row that is due. 0: never.
        wandb: `auto` is online with a key and offline without one.
        project: Weights & Biases project.
        entity: Weights & Biases team or user. None: the key's default.
        alerts: Weights & Biases alerts: a step that is not finite, a loss spike, a run that stands still.
        stall_alert_s: Longest time between two rows before a run is said to stand still; three times the longest so
            far at least. 0: never.
        artifacts: What Weights & Biases is told of checkpoints: nothing, where they lie, or all their bytes.
        samples: Texts that are generated.
        attention: Pictures that are drawn.
    """

    log_every_steps: int = Field(default=10, ge=1)
    norms_every_steps: int = Field(default=200, ge=0)
    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    project: str = "pretrain"
    entity: str | None = None
    alerts: bool = True
    stall_alert_s: float = Field(default=600.0, ge=0)
    artifacts: Literal["none", "references", "files"] = "none"
    samples: SamplesConfig = SamplesConfig()
    attention: AttentionConfig = AttentionConfig()

    def measures_norms(self, step: int) -> bool:
        """Returns whether the row of a step has norms by layer: the first one at or after each interval."""
        every, row = self.norms_every_steps, self.log_every_steps
        return every > 0 and step % row == 0 and step // every > (step - row) // every


class ProfileConfig(Section):
    """A look into single steps, written to `profile/` in the run folder.

    Attributes:
        steps: [first, last] to trace with torch's profiler. None: none.
        ranks: Which ranks trace.
        memory_history: Keep the stack of each allocation on CUDA, for the snapshot that is written when memory runs
            out; takes some 2 us an allocation.
    """

    steps: list[int] | None = Field(default=None, min_length=2, max_length=2)
    ranks: list[int] = Field(default_factory=lambda: [0])
    memory_history: bool = False

    @model_validator(mode="after")
    def _check(self) -> "ProfileConfig":
        if self.steps is not None and not 1 <= self.steps[0] <= self.steps[1]:
            raise ValueError(f"steps={self.steps} must be [first, last], from 1 on; use [{max(self.steps)}, "
                             f"{max(self.steps) + 2}]")  # fmt: skip
        return self


# Rules of `tracking.samples` and `tracking.attention`: what a model can show, and when.


def check_tracking(tracking: TrackingConfig, evaluation: EvalConfig, model: AnyModelConfig) -> None:
    """Checks that what is to be shown of a run can be. Raises: ValueError, that names keys from the root."""
    samples, attention = tracking.samples, tracking.attention
    wanted = {"samples.prompts": bool(samples.prompts), "attention.text": attention.text is not None}
    for key, is_set in wanted.items():
        if is_set and not evaluation.every_steps:
            raise ValueError(
                f"tracking.{key}: nothing is shown without evaluations; set eval.every_steps, which is 0, or remove it"
            )
    if samples.prompts and model.decoder is None:
        raise ValueError(
            "tracking.samples: a model without a decoder generates no text; remove tracking.samples.prompts"
        )
    if attention.text is not None:
        _check_attention(attention, model)


def _check_attention(attention: AttentionConfig, model: AnyModelConfig) -> None:
    if isinstance(model, RecurrentConfig):
        raise ValueError("tracking.attention: model.kind=recurrent has no heads to draw; remove tracking.attention")
    stacks = {name: stack for name in ("encoder", "decoder") if (stack := getattr(model, name)) is not None}
    if len(stacks) == 2 and attention.target is None:
        raise ValueError("tracking.attention.text is what the encoder reads; set tracking.attention.target, too")
    if len(stacks) == 1 and attention.target is not None:
        raise ValueError("tracking.attention.target is for models of two stacks; leave it out")
    kinds = {"self": list(stacks.values()), **{name: [stack] for name, stack in stacks.items()}}
    if len(stacks) == 2:
        kinds["cross"] = [stacks["decoder"]]
    kind = attention.kind or ("cross" if "cross" in kinds else "self")
    if kind not in kinds:
        raise ValueError(f"tracking.attention.kind={kind}: the model has none; use {' or '.join(kinds)}")
    _check_numbers("layers", attention.layers, max(stack.layers for stack in kinds[kind]))
    _check_numbers("heads", attention.heads, min(stack.heads for stack in kinds[kind]))


def _check_numbers(key: str, numbers: list[int] | None, count: int) -> None:
    if numbers is not None and max(numbers) >= count:
        raise ValueError(f"tracking.attention.{key}={numbers}: there are {count}; use 0 to {count - 1}")
