"""`tracking:` and `profile:` -- metrics, generated texts, attention maps, and traces."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from pretrain.config.base import OFF, Conflicts, OnResume, Section
from pretrain.config.model import AnyModelConfig, ModelConfig, RecurrentConfig
from pretrain.config.train import EvalConfig
from pretrain.kinds.trackers import TrackersConfig


class SamplesConfig(Section):
    """Texts generated during the run: `samples.jsonl`, and trackers."""

    prompts: Annotated[list[str], OnResume.FREE] = Field(default_factory=list)
    """Prompts that a decoder continues, or inputs of an encoder-decoder. Empty: no texts."""
    every_evals: Annotated[int, OFF, OnResume.FREE] = Field(default=1, ge=0)
    """Interval in evaluations (`eval.every_steps`). 0: never."""
    max_tokens: Annotated[int, OnResume.FREE] = Field(default=64, ge=1)
    """Longest text in tokens."""
    temperature: Annotated[float, OnResume.FREE] = Field(default=0.0, ge=0)
    """Sampling temperature, with the same random numbers each time. 0: greedy decoding."""


class AttentionConfig(Section):
    """Attention maps drawn during the run: files in `attention/`, and images in trackers."""

    text: Annotated[str | None, OnResume.FREE] = None
    """Input of the model; of an encoder-decoder, the source. None: no pictures."""
    target: Annotated[str | None, OnResume.FREE] = None
    """Input of the decoder, for an encoder-decoder."""
    every_evals: Annotated[int, OFF, OnResume.FREE] = Field(default=1, ge=0)
    """Interval in evaluations (`eval.every_steps`). 0: never."""
    kind: Annotated[Literal["self", "cross", "encoder", "decoder"] | None, OnResume.FREE] = None
    """`self` or `cross` attention, or that of one stack. None: `cross` if any, otherwise `self`."""
    layers: Annotated[list[Annotated[int, Field(ge=0)]] | None, OnResume.FREE] = Field(default=None, min_length=1)
    """Layers by number, from 0. None: at most four, evenly from the first to the last."""
    heads: Annotated[list[Annotated[int, Field(ge=0)]] | None, OnResume.FREE] = Field(default=None, min_length=1)
    """Heads by number, from 0. None: at most four, evenly from the first to the last."""


class TrackingConfig(TrackersConfig):
    """Metrics beyond `metrics.jsonl` and the console (docs/observability.md)."""

    project: Annotated[str, OnResume.FREE] = "pretrain"
    """Project of Weights & Biases and Trackio, experiment of MLflow."""
    entity: Annotated[str | None, OnResume.FREE] = None
    """Weights & Biases team or user. None: the default of the API key."""
    name: Annotated[str | None, OnResume.FREE] = None
    """Display name of the run in trackers. None: `run.name`."""
    group: Annotated[str | None, OnResume.FREE] = None
    """Group of the run in trackers. `launch slurm --vary` sets it to `run.name`."""
    job_type: Annotated[str | None, OnResume.FREE] = None
    """Kind of the run within its group, such as `baseline`."""
    tags: Annotated[list[str], OnResume.FREE] = Field(default_factory=list)
    """Tags to filter runs by in trackers."""
    notes: Annotated[str | None, OnResume.FREE] = None
    """Description of the run in trackers."""
    alerts: Annotated[bool, OnResume.FREE] = True
    """Send alerts to trackers: a non-finite step, a loss spike, a stalled run."""
    stall_alert_s: Annotated[float, OFF, OnResume.FREE] = Field(default=600.0, ge=0)
    """Seconds without a row, and 3 of the longest intervals, until a run is stalled. 0: never."""
    artifacts: Annotated[Literal["none", "references", "files"], OnResume.FREE] = "none"
    """Checkpoints as Weights & Biases artifacts: `none`, `references` (paths) or `files`."""
    samples: SamplesConfig = SamplesConfig()
    attention: AttentionConfig = AttentionConfig()

    def _conflicts(self) -> Conflicts:
        # wandb refuses these when the run starts, and all rows with them.
        if len(self.project) > 128 or set(self.project) & set("/\\#?%:"):
            yield f"project={self.project[:200]!r}: use at most 128 characters, without / \\ # ? % :"
        if self.mlflow is not None and self.mlflow != "auto":
            parts = urlsplit(self.mlflow)
            if not parts.scheme:
                yield f"mlflow={self.mlflow}: use auto, or an address such as http://HOST:5000"
            if "@" in parts.netloc or parts.query:
                yield (
                    "mlflow: an address in a config has no credentials",
                    "use auto, and set MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and _PASSWORD",
                )
        if any(not 1 <= len(tag) <= 64 for tag in self.tags):
            yield "tags: use 1 to 64 characters each"

    def measures_norms(self, step: int) -> bool:
        """Returns True if the row of a step has norms by layer: the first of each interval does."""
        every = self.norms_every_steps
        row = self.log_every_steps
        return every > 0 and self.has_row(step) and step // every > (step - row) // every

    def has_row(self, step: int) -> bool:
        """Returns True if a step has a row of metrics, be it the last one or not."""
        return self.log_every_steps > 0 and step % self.log_every_steps == 0


class ProfileConfig(Section):
    """Traces of single steps, written to `profile/` in the run folder."""

    steps: Annotated[list[int] | None, OnResume.FREE] = Field(default=None, min_length=2, max_length=2)
    """First and last step to trace with the profiler of torch. None: no trace."""
    ranks: Annotated[list[int], OnResume.FREE] = Field(default_factory=lambda: [0])
    """Ranks that trace."""
    memory_history: Annotated[bool, OnResume.FREE] = False
    """Record the stack of each CUDA allocation (2 us each), for a snapshot when memory runs out."""

    def _conflicts(self) -> Conflicts:
        if self.steps is not None and not 1 <= self.steps[0] <= self.steps[1]:
            last = max(self.steps)
            yield f"steps={self.steps} must be [first, last], from 1 on", f"use [{last}, {last + 2}]"


def tracking_conflicts(tracking: TrackingConfig, evaluation: EvalConfig, model: AnyModelConfig) -> Conflicts:
    """Yields texts and maps that the model does not have, with keys from the root."""
    samples = tracking.samples
    attention = tracking.attention
    wanted = {"samples.prompts": bool(samples.prompts), "attention.text": attention.text is not None}
    for key, is_set in wanted.items():
        if is_set and not evaluation.every_steps:
            yield f"tracking.{key} needs evaluations", "set eval.every_steps, which is 0, or remove it"
    if samples.prompts and (model.decoder is None or not model.head.record.scores_words):
        lacking = "without a decoder" if model.decoder is None else f"of head.kind={model.head.kind}"
        yield f"tracking.samples: a model {lacking} generates no text", "remove tracking.samples.prompts"
    if attention.text is not None:
        if isinstance(model, ModelConfig) and (mixers := model.last_stack.lacking("maps")):
            lacking = f"layers of {mixers} have no weights to draw"
            yield f"tracking.attention: {lacking}", "remove tracking.attention"
        yield from _attention_conflicts(attention, model)


def _attention_conflicts(attention: AttentionConfig, model: AnyModelConfig) -> Conflicts:
    if isinstance(model, RecurrentConfig) and model.attention == "none":
        yield "tracking.attention: model.attention=none has no weights to draw", "remove tracking.attention"
    has_both = model.encoder is not None and model.decoder is not None
    if has_both and attention.target is None:
        yield "tracking.attention.text is the input of the encoder", "set tracking.attention.target, too"
    if not has_both and attention.target is not None:
        yield "tracking.attention.target is for models of two stacks", "leave it out"
    kinds = _layers_and_heads(model)
    kind = attention.kind or ("cross" if "cross" in kinds else "self")
    if kind not in kinds:
        yield f"tracking.attention.kind={kind}: the model has none", f"use {' or '.join(kinds)}"
        return
    for key, numbers, count in zip(("layers", "heads"), (attention.layers, attention.heads), kinds[kind], strict=True):
        if numbers is not None and max(numbers) >= count:
            yield f"tracking.attention.{key}={numbers}: there are {count}", f"use 0 to {count - 1}"


def _layers_and_heads(model: AnyModelConfig) -> dict[str, tuple[int, int]]:
    """Returns layers and heads by kind of attention; `self` stands for every stack."""
    if not isinstance(model, ModelConfig):
        return {"cross": (1, 1)}
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    kinds = {name: (stack.layers, stack.heads) for name, stack in stacks.items() if stack is not None}
    layers, heads = zip(*kinds.values(), strict=True)
    cross = {"cross": kinds["decoder"]} if len(kinds) == 2 else {}
    return {"self": (max(layers), min(heads)), **kinds, **cross}
