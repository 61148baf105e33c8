"""`train:`, `eval:`, `checkpoint:`, `run:`, `init:`, `resume:`, `guard:`, `launch:` -- course and output of a run."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from pretrain.config.base import NAME_PATTERN, OFF, Conflicts, OnResume, Section, UserPath
from pretrain.config.data import DataConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.optim import EmaConfig
from pretrain.kinds.heads import HEADS
from pretrain.kinds.objectives import OBJECTIVES

METRICS = ("val_loss", "val_perplexity", "val_accuracy", "val_bits_per_byte", "val_ema_loss")
"""Values of `checkpoint.best`."""


class TrainConfig(Section):
    """Length of the run."""

    steps: Annotated[int, OnResume.WARN] = Field(ge=1)
    """Optimizer steps of the whole run, which the schedule covers."""
    stop_after: Annotated[int | None, OnResume.FREE] = Field(default=None, ge=1)
    """Step after which to save and stop early, on the same schedule. None: train up to `steps`."""

    @property
    def last_step(self) -> int:
        """Last step of the run."""
        return min(self.stop_after or self.steps, self.steps)


class TasksConfig(Section):
    """Tasks of lm-eval-harness during training; the extra `eval` installs it."""

    names: Annotated[list[str], OnResume.FREE] = Field(default_factory=list)
    """Tasks, groups or tags: of the files under `path`, or of the harness. Empty: none."""
    path: Annotated[UserPath | None, OnResume.FREE] = None
    """Folder of task files (YAML). None: only the harness's own."""
    every_steps: Annotated[int, OFF, OnResume.FREE] = Field(default=1000, ge=0)
    """Steps between evaluations on tasks; the last step has one too. 0: only that."""
    limit: Annotated[int | None, OnResume.FREE] = Field(default=None, ge=1)
    """Documents of each task to use, the first. None: all."""
    num_fewshot: Annotated[int | None, OnResume.FREE] = Field(default=None, ge=0)
    """Examples before a question. None: as the task says."""
    batch_tokens: Annotated[int, OnResume.FREE] = Field(default=8192, ge=1)
    """Tokens of a batch of questions, at least one question."""


class EvalConfig(Section):
    """Validation loss during training."""

    every_steps: Annotated[int, OFF, OnResume.FREE] = Field(default=0, ge=0)
    """Steps between evaluations. 0: never."""
    max_tokens: Annotated[int | None, OnResume.FREE] = Field(default=None, ge=1)
    """Tokens of the validation split to use, from its beginning. None: all."""
    ema: Annotated[bool, OnResume.FREE] = True
    """Under `optim.ema`: also measure the average of the weights, `val_ema_loss`, which takes as long again."""
    tasks: TasksConfig = TasksConfig()


class CheckpointConfig(Section):
    """Interval and retention of checkpoints."""

    every_steps: Annotated[int, OFF, OnResume.FREE] = Field(default=0, ge=0)
    """Steps between checkpoints. 0: only when the run ends or is stopped."""
    keep: Annotated[int, OnResume.FREE] = Field(default=2, ge=2)
    """Number of newest checkpoints that are kept."""
    keep_every_steps: Annotated[int, OFF, OnResume.FREE] = Field(default=0, ge=0)
    """Also keep checkpoints whose step is a multiple of this. 0: none."""
    upload: Annotated[str | None, OnResume.FREE] = None
    """Address on s3 or gs, such as `s3://bucket/runs`: each checkpoint is uploaded to its folder
    `run.name` in the background, and a run folder that has none, or older ones, continues from
    there (docs/checkpoints.md). None: checkpoints stay in the run folder."""
    best: Annotated[str | None, OnResume.FREE] = None
    """Validation metric of the best checkpoint (`checkpoints/best.json`), which is kept:
    `val_loss`, `val_perplexity`, `val_accuracy`, `val_bits_per_byte`, `val_ema_loss` (`optim.ema`),
    or `val_loss_NAME` of a source."""

    @field_validator("upload")
    @classmethod
    def _check_upload(cls, value: str | None) -> str | None:
        if value is None:
            return None
        match = re.fullmatch(r"(?:s3|gs)://([^/@?#]+)(?:/[^?#]*)?", value)
        if match is None:
            raise ValueError("write s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, without credentials")
        return value

    @field_validator("best", mode="before")
    @classmethod
    def _check_best(cls, value: Any) -> Any:
        # `true` is what one tries first; which metrics a run has is checked by `best_conflicts`.
        if value is not None and not isinstance(value, str):
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ValueError(f"{shown} is no validation metric; write one of: {', '.join(METRICS)}")
        return value


class RunSection(Section):
    """Name and place of the run; the run folder is `dir/name`."""

    dir: Annotated[UserPath, OnResume.FREE] = "runs"
    """Parent folder of runs; the run folder is `dir/name`. `~` is the home folder."""
    name: Annotated[str, OnResume.FREE] = Field(pattern=NAME_PATTERN)
    """Name of the run: letters, digits, `.`, `_` and `-`."""
    recover: Annotated[Literal["off", "spare", "shrink"], OnResume.FREE] = "off"
    """Effect of a lost rank (killed, crashed, frozen) under `launch local`. `off`: the job ends; the
    same command continues the run. `spare`: the launcher replaces all ranks by new forks, which
    continue from the newest checkpoint. `shrink`: by fewer, as many as divide the batch
    (docs/reliability.md)."""
    recover_every_steps: Annotated[int, OFF, OnResume.FREE] = Field(default=0, ge=0)
    """Steps between copies of weights and optimizer state in the memory of the machine (/dev/shm),
    three at once, from which a recovery continues where they are newer than the checkpoints. 1: a
    loss costs the step and at most two before it. 0: none."""
    self_check: Annotated[Literal["auto", "on", "off"], OnResume.FREE] = "auto"
    """Check of the stack at the first start of a run on each combination of versions (torch, DeepSpeed,
    CUDA, driver, compiler), on a tiny model of its kinds, about 10 s (docs/doctor.md). `auto`: on GPUs,
    and on several nodes."""

    def _conflicts(self) -> Conflicts:
        if self.recover_every_steps and self.recover == "off":
            key = f"recover_every_steps={self.recover_every_steps}"
            yield f"{key} needs recover=spare or shrink", "leave it out"


class InitConfig(Section):
    """Initial weights."""

    from_: Annotated[UserPath | None, OnResume.WARN] = Field(default=None, alias="from")
    """Run, checkpoint, model folder or Hugging Face folder of the weights, and of the model if
    `model` names neither a preset nor stacks. A run stands for its newest checkpoint at the start,
    which the run folder's config.yaml then names. None: random weights."""
    freeze: Annotated[list[str], OnResume.NEVER] = Field(default_factory=list)
    """Patterns of parameters that are not trained: `embedding.*`, `encoder.blocks.[0-3].*`."""
    check_tokenizer: Annotated[bool, OnResume.FREE] = True
    """Refuse data whose tokenizer gives a token of the start another id, or a text other ids."""


class ResumeConfig(Section):
    """Permitted changes of a resumed run."""

    allow: Annotated[list[str], OnResume.FREE] = Field(default_factory=list)
    """Keys or sections, such as `optim.lr` or `data`, that may differ from the resumed run."""


class GuardConfig(Section):
    """Detection of loss spikes and diverging replicas (docs/guard.md)."""

    on_spike: Annotated[Literal["warn", "skip", "rollback"], OnResume.WARN] = "warn"
    """`warn`: log a spike and count it in the metrics. `skip`: also drop the step before it is
    applied. `rollback`: return to the newest checkpoint and leave out the samples since then."""
    spike_window: Annotated[int, OnResume.WARN] = Field(default=128, ge=8, le=128)
    """Last finite losses that a loss is compared with; detection starts with half as many."""
    spike_threshold: Annotated[float, OnResume.WARN] = Field(default=8.0, gt=0)
    """Distance of a spike above the median of the window, in robust standard deviations."""
    max_skips: Annotated[int, OnResume.FREE] = Field(default=10, ge=1)
    """Limit of spikes in a row that `skip` drops; then the loss is assumed to have a new level."""
    max_rollbacks: Annotated[int, OnResume.FREE] = Field(default=5, ge=1)
    """Largest number of automatic rollbacks of a run; one more ends it with exit code 77."""
    check_replicas_every: Annotated[int, OFF, OnResume.FREE] = Field(default=1000, ge=0)
    """Steps between comparisons of replicated weights, besides those before a save. 0: never."""

    def _conflicts(self) -> Conflicts:
        for key, action in (("max_skips", "skip"), ("max_rollbacks", "rollback")):
            if self.on_spike != action and self.differs(key):
                yield f"{key} needs on_spike={action}", "leave it out"


class LaunchConfig(Section):
    """Jobs under Slurm (slurm/README.md). No key changes the result, up to rounding."""

    elastic: Annotated[bool, OnResume.FREE] = False
    """Train on fewer nodes if not all are free, as many as divide the batch; same samples."""
    max_idle_restarts: Annotated[int, OnResume.FREE] = Field(default=3, ge=1)
    """Consecutive restarts without a new checkpoint after which the job is given up."""


OF_A_SOURCE = "val_loss_"
"""Prefix of the validation loss of one source."""


def best_conflicts(
    checkpoint: CheckpointConfig, evaluation: EvalConfig, objective: ObjectiveConfig, data: DataConfig, ema: EmaConfig
) -> Conflicts:
    """Yields reasons for which `checkpoint.best` is not measured at each checkpoint."""
    best = checkpoint.best
    every = evaluation.every_steps
    if best is None:
        return
    sources = [source.name for source in data.mixture]
    metrics = [*METRICS, *(OF_A_SOURCE + name for name in sources if len(sources) > 1)]
    if best not in metrics:
        yield f"checkpoint.best={best} is no validation metric", f"use one of: {', '.join(metrics)}"
    yield from _metric_conflicts(best, [task.kind for task in objective.tasks])
    if best == "val_ema_loss" and not (ema.is_on and evaluation.ema):
        yield f"checkpoint.best={best} needs optim.ema and eval.ema=true", "use val_loss"
    # A checkpoint without an evaluation could not be compared with the best.
    if not checkpoint.every_steps or not every or checkpoint.every_steps % every:
        yield (
            "checkpoint.best needs an evaluation at the step of each checkpoint: "
            f"checkpoint.every_steps={checkpoint.every_steps} must be a multiple of "
            f"eval.every_steps={every}, neither of them 0"
        )


def _metric_conflicts(best: str, kinds: list[str]) -> Conflicts:
    if best == "val_bits_per_byte" and not all(OBJECTIVES[kind].running_text for kind in kinds):
        yield f"checkpoint.best={best} needs objective.kind=causal, not {'+'.join(kinds)}", "use val_loss"
    heads = [HEADS[OBJECTIVES[kind].head] for kind in kinds]
    if best == "val_perplexity" and any(head.chooses and not head.scores_words for head in heads):
        yield f"checkpoint.best={best}: a classifier has no perplexity", "use val_loss or val_accuracy"
    for kind in kinds:
        instead = OBJECTIVES[kind].instead_of_tokens
        if best == "val_perplexity" and instead:
            yield f"checkpoint.best={best}: objective.kind={kind} {instead}", "use val_loss or val_accuracy"
    if best in ("val_perplexity", "val_accuracy") and not all(head.chooses for head in heads):
        yield f"checkpoint.best={best}: pixels are no choice among answers", "use val_loss"
