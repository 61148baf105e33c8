"""RunConfig, the whole config of a run; its sections `guard:` and `launch:`; rules between sections."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pretrain.config.base import OnResume, Section
from pretrain.config.data import BatchConfig, DataConfig
from pretrain.config.engine import EngineConfig
from pretrain.config.finetune import FinetuneConfig
from pretrain.config.lengths import RowLengths, row_lengths
from pretrain.config.model import ModelConfig
from pretrain.config.objective import NEEDS, ObjectiveConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.recurrent import ModelSection
from pretrain.config.tracking import ProfileConfig, TrackingConfig, check_tracking
from pretrain.config.train import (
    CheckpointConfig,
    EvalConfig,
    InitConfig,
    ResumeConfig,
    RunSection,
    TrainConfig,
    check_best,
)


class GuardConfig(Section):
    """Detection of loss spikes and diverging replicas (docs/guard.md)."""

    on_spike: Annotated[Literal["warn", "skip", "rollback"], OnResume.WARN] = "warn"
    """Reaction to a loss spike. `warn`: log it and count it in the metrics. `skip`: also drop the
    step before it is applied. `rollback`: return to the newest checkpoint and leave out the samples
    since then."""
    spike_window: Annotated[int, OnResume.WARN] = Field(default=128, ge=8, le=128)
    """Number of last finite losses that a loss is compared with; detection starts with half as
    many."""
    spike_threshold: Annotated[float, OnResume.WARN] = Field(default=8.0, gt=0)
    """Distance of a spike above the median of the window, in robust standard deviations."""
    max_skips: Annotated[int, OnResume.FREE] = Field(default=10, ge=1)
    """Largest number of consecutive spikes that `skip` drops; then the loss is assumed to have a
    new level."""
    max_rollbacks: Annotated[int, OnResume.FREE] = Field(default=5, ge=1)
    """Largest number of automatic rollbacks of a run; one more ends it with exit code 77."""
    check_replicas_every: Annotated[int, OnResume.FREE] = Field(default=1000, ge=0)
    """Steps between comparisons of replicated weights, which are also compared before each
    checkpoint. 0: never."""

    @model_validator(mode="after")
    def _check(self) -> "GuardConfig":
        for key, action in (("max_skips", "skip"), ("max_rollbacks", "rollback")):
            is_default = getattr(self, key) == GuardConfig.model_fields[key].default
            if self.on_spike != action and not is_default:
                raise ValueError(f"{key} needs on_spike={action}; leave it out")
        return self


class LaunchConfig(Section):
    """Jobs under Slurm (slurm/README.md). No key changes the result, up to rounding."""

    elastic: Annotated[bool, OnResume.FREE] = False
    """Train on fewer nodes than requested if not all are available: on as many as divide the batch,
    with the same samples each step."""
    max_idle_restarts: Annotated[int, OnResume.FREE] = Field(default=3, ge=1)
    """Consecutive restarts without a new checkpoint after which the job is given up."""


WHOLE_MATRIX_KINDS = {"adafactor", "muon"}
"""Optimizers (`optim.kind`) whose step needs a whole matrix."""


def check_training(
    optim: OptimConfig, engine: EngineConfig, model: Section, total_steps: int, tokens_per_step: int
) -> None:
    """Checks rules between sections. Raises: ValueError, with keys from the root of the config."""
    optim.schedule.check_run(total_steps, tokens_per_step)
    if optim.kind in WHOLE_MATRIX_KINDS and engine.offload_optimizer != "none":
        raise ValueError(
            f"optim.kind={optim.kind} steps whole matrices, which "
            f"engine.offload_optimizer={engine.offload_optimizer} would gather and multiply on the CPU; "
            f"use engine.offload_optimizer=none or optim.kind=adamw"
        )
    if engine.precision == "fp16" and isinstance(model, ModelConfig) and _is_t5_style(model):
        # Raffel et al. trained T5 in bf16: its feed-forward layers and scores exceed 65504.
        raise ValueError(
            "engine.precision=fp16 overflows in a T5-style model (model.init=t5 or "
            "scaled_attention=false), whose activations exceed the range of fp16; "
            "use engine.precision=bf16"
        )


def _is_t5_style(model: ModelConfig) -> bool:
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    return model.init == "t5" or not all(stack.scaled_attention for stack in stacks)


class RunConfig(Section):
    """Config of a run; `pretrain config FILE` prints it with every default filled in."""

    seed: Annotated[int, OnResume.ALLOW] = Field(default=1234, ge=0, lt=2**63)
    """Seed of weights, data order and dropout."""
    extend: Annotated[list[str], OnResume.WARN] = Field(default_factory=list)
    """Modules to import first, which add entries to the registries (an objective, a backend, a
    family)."""
    run: RunSection
    """Name and place of the run."""
    data: DataConfig
    """Training data and their order."""
    batch: BatchConfig
    """Batch of one optimizer step."""
    model: ModelSection
    """Architecture of the model."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """Training objective."""
    optim: OptimConfig
    """Optimizer and learning rate."""
    train: TrainConfig
    """Length of the run."""
    eval: EvalConfig = EvalConfig()
    """Validation during training."""
    engine: EngineConfig = EngineConfig()
    """Parallelism, precision and memory."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Interval and retention of checkpoints."""
    guard: GuardConfig = GuardConfig()
    """Detection of loss spikes and diverging replicas."""
    tracking: TrackingConfig = TrackingConfig()
    """Metrics and other output."""
    profile: ProfileConfig = ProfileConfig()
    """Traces of single steps."""
    init: InitConfig = InitConfig()
    """Initial weights."""
    finetune: FinetuneConfig = FinetuneConfig()
    """Full fine-tuning or adapters."""
    resume: ResumeConfig = ResumeConfig()
    """Permitted changes of a resumed run."""
    launch: LaunchConfig = LaunchConfig()
    """Jobs under Slurm."""

    @property
    def folder(self) -> Path:
        """The run folder, `run.dir/run.name` with `~` expanded."""
        # Unlike Path.expanduser, this raises nothing for an unknown user.
        return Path(os.path.expanduser(self.run.dir)) / self.run.name  # noqa: PTH111

    @property
    def stacks(self) -> list[str]:
        """Names of the stacks of the model."""
        return [name for name in ("encoder", "decoder") if getattr(self.model, name)]

    @property
    def lengths(self) -> RowLengths:
        """Row lengths in tokens, in the data and in the model."""
        return row_lengths(self.objective, self.batch, len(self.stacks))

    @model_validator(mode="after")
    def _check_batch(self) -> "RunConfig":
        if self.batch.global_tokens % self.batch.seq_len:
            below = self.batch.rows * self.batch.seq_len
            sizes = " or ".join(str(size) for size in (below, below + self.batch.seq_len) if size)
            raise ValueError(
                f"batch.global_tokens={self.batch.global_tokens} must be a multiple of "
                f"batch.seq_len={self.batch.seq_len}; use {sizes}"
            )
        tokens_per_step = self.batch.global_tokens
        check_training(self.optim, self.engine, self.model, self.train.steps, tokens_per_step)
        check_best(self.checkpoint, self.eval, self.objective, self.data)
        check_tracking(self.tracking, self.eval, self.model)
        return self

    @model_validator(mode="after")
    def _check_objective(self) -> "RunConfig":
        stacks = "+".join(self.stacks)
        for task in self.objective.tasks:
            needs = NEEDS[task.kind]
            if stacks not in needs.shapes:
                raise ValueError(
                    f"objective.kind={task.kind} needs a model with {' or '.join(needs.shapes)}, "
                    f"this one has {stacks}; choose another model.preset or objective.kind"
                )
            is_recurrent_decoder = self.model.kind == "recurrent" and self.model.encoder is None
            if is_recurrent_decoder and task.kind in ("prefix", "ul2"):
                raise ValueError(
                    f"objective.kind={task.kind} needs bidirectional attention to the prefix, which a "
                    f"recurrent decoder lacks; use objective.kind=causal"
                )
            _check_head(task.kind, self)
            if needs.whole_rows and self.data.packing != "concat":
                raise ValueError(
                    f"objective.kind={task.kind} needs full rows, but "
                    f"data.packing={self.data.packing}; use data.packing=concat"
                )
            if task.kind == "ul2" and self.data.document_mask:
                raise ValueError(
                    "objective.kind=ul2 has one mode token a row, not one a document; use data.document_mask=false"
                )
        if not set.intersection(*(set(NEEDS[task.kind].data) for task in self.objective.tasks)):
            kinds = ", ".join(task.kind for task in self.objective.tasks)
            raise ValueError(f"objective.mixture: {kinds} have no kind of data in common; mix objectives that do")
        has_pairs = any(task.kind == "seq2seq" for task in self.objective.tasks)
        if has_pairs and len(self.objective.tasks) > 1:
            raise ValueError("objective.mixture: seq2seq cannot be mixed; use objective.kind=seq2seq alone")
        if self.batch.source_len is not None and not has_pairs:
            raise ValueError("batch.source_len needs objective.kind=seq2seq; leave it out")
        return self

    @model_validator(mode="after")
    def _check_finetune(self) -> "RunConfig":
        if self.finetune.kind == "lora":
            if self.init.from_ is None:
                raise ValueError("finetune.kind=lora needs a base model; set init.from")
            if self.init.freeze:
                raise ValueError(
                    "init.freeze does not go with finetune.kind=lora, which freezes the whole model; leave it out"
                )
            if self.model.kind == "recurrent":
                raise ValueError("finetune.kind=lora adapts Transformer blocks, which model.kind=recurrent lacks")
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> "RunConfig":
        lengths = {"seq_len": self.batch.seq_len, "source_len": self.batch.source_len or 0}
        for name, length in lengths.items():
            if length > self.model.max_seq_len:
                raise ValueError(
                    f"batch.{name}={length} exceeds model.max_seq_len={self.model.max_seq_len}; "
                    f"lower the first or raise the second"
                )
        _ = self.lengths  # raises if rows are too short for the objective
        return self


def _check_head(kind: str, config: RunConfig) -> None:
    """Checks that the head of the model fits an objective."""
    head = config.model.head
    needed = NEEDS[kind].head
    if head.kind != needed:
        tied = ", and model.tied_embeddings=false" if needed == "labels" else ""
        raise ValueError(
            f"objective.kind={kind} needs model.head.kind={needed}, this model has {head.kind}; set it{tied}"
        )
    if kind == "tag" and (head.mean or getattr(config.model, "pooler", False)):
        raise ValueError(
            "objective.kind=tag labels words, but model.head.mean and model.pooler summarize documents; "
            "set both to false"
        )
    if kind == "classify" and not config.data.document_mask:
        raise ValueError(
            "objective.kind=classify labels documents, which must not attend to each other; use data.document_mask=true"
        )
