"""RunConfig: the whole config of a run, section by section, in the order in which data flows."""

from pydantic import Field, model_validator

from pretrain.config.base import Section
from pretrain.config.data import BatchConfig, DataConfig
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.objective import SHAPE_OF_OBJECTIVE, ObjectiveConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.train import (
    CheckpointConfig,
    EvalConfig,
    InitConfig,
    ResumeConfig,
    RunSection,
    TrackingConfig,
    TrainConfig,
)


class RunConfig(Section):
    """Everything that defines a run. `pretrain config FILE` prints it with every default filled in.

    Attributes:
        seed: Of weights, data order and dropout.
        extend: Modules to import first, which add entries to the registries (an objective, a backend, a family).
    """

    seed: int = Field(default=1234, ge=0, lt=2**63)
    extend: list[str] = Field(default_factory=list)
    run: RunSection
    data: DataConfig
    batch: BatchConfig
    model: ModelConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    init: InitConfig = InitConfig()
    resume: ResumeConfig = ResumeConfig()

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        if self.batch.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"batch.seq_len={self.batch.seq_len} exceeds model.max_seq_len={self.model.max_seq_len}; "
                f"lower the first or raise the second"
            )
        if self.batch.global_tokens % self.batch.seq_len:
            below = self.batch.global_tokens // self.batch.seq_len * self.batch.seq_len
            sizes = " or ".join(str(size) for size in (below, below + self.batch.seq_len) if size)
            raise ValueError(
                f"batch.global_tokens={self.batch.global_tokens} must be a multiple of "
                f"batch.seq_len={self.batch.seq_len}; use {sizes}"
            )
        stacks = [name for name in ("encoder", "decoder") if getattr(self.model, name)]
        needed = SHAPE_OF_OBJECTIVE[self.objective.kind]
        if "+".join(stacks) != needed:
            raise ValueError(
                f"objective.kind={self.objective.kind} needs a model with {needed}, this one has {'+'.join(stacks)}; "
                f"choose another model.preset or objective.kind"
            )
        end = self.optim.schedule.decay_steps or self.train.steps
        if end <= self.optim.schedule.warmup_steps:
            raise ValueError(
                f"optim.schedule.warmup_steps={self.optim.schedule.warmup_steps} must be less than the {end} steps "
                f"of the schedule; lower it or raise train.steps"
            )
        return self
