"""`train:`, `eval:`, `checkpoint:`, `run:`, `init:`, `resume:` -- a run's course, and what it leaves."""

from pydantic import Field

from pretrain.config.base import Section
from pretrain.config.data import DataConfig
from pretrain.config.objective import ObjectiveConfig


class TrainConfig(Section):
    """How long.

    Attributes:
        steps: Optimizer steps of the whole run; the schedule is laid over them.
        stop_after: Stop early at this step with a checkpoint, the schedule unchanged. None: run to `steps`.
    """

    steps: int = Field(ge=1)
    stop_after: int | None = Field(default=None, ge=1)

    @property
    def last_step(self) -> int:
        """Step at which the run ends."""
        return min(self.stop_after or self.steps, self.steps)


class EvalConfig(Section):
    """Validation loss during training.

    Attributes:
        every_steps: Interval; 0: never.
        max_tokens: Tokens of the validation split to use, from its beginning. None: all.
    """

    every_steps: int = Field(default=0, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)


class CheckpointConfig(Section):
    """Checkpoints.

    Attributes:
        every_steps: Interval; 0: only when the run ends or is stopped.
        keep: Newest ones kept.
        keep_every_steps: Those of steps that are a multiple of it are kept for good, besides; 0: none.
        best: Metric of validation by which the best one is marked (`checkpoints/best.json`) and kept, besides:
            `val_loss`, `val_perplexity`, `val_accuracy`, `val_bits_per_byte`, or `val_loss_NAME` of a source.
    """

    every_steps: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=2)
    keep_every_steps: int = Field(default=0, ge=0)
    best: str | None = None


class RunSection(Section):
    """Identity. The run folder is `dir/name`.

    Attributes:
        dir: Folder of runs.
        name: Letters, digits, `.`, `_` and `-`.
    """

    dir: str = "runs"
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")


class InitConfig(Section):
    """Where weights start.

    Attributes:
        from_: (`from`) A run, a checkpoint, a model folder or a Hugging Face folder to take the weights of; where
            `model` names neither a preset nor stacks, the model too. None: random.
        freeze: Patterns of parameters that stay as they are, such as `embedding.*` or `encoder.blocks.[0-3].*`.
        check_tokenizer: Refuse data in which a token of the start's tokenizer has another number.
    """

    from_: str | None = Field(default=None, alias="from")
    freeze: list[str] = Field(default_factory=list)
    check_tokenizer: bool = True


class ResumeConfig(Section):
    """What may differ from the run that is resumed.

    Attributes:
        allow: Dotted keys, such as `optim.lr` or `data`, whose change is intended.
    """

    allow: list[str] = Field(default_factory=list)


# Rules of `checkpoint.best`: what it may name, and when that is known.


METRICS = ("val_loss", "val_perplexity", "val_accuracy", "val_bits_per_byte")

OF_A_SOURCE = "val_loss_"


def check_best(
    checkpoint: CheckpointConfig, evaluation: EvalConfig, objective: ObjectiveConfig, data: DataConfig
) -> None:
    """Checks that each checkpoint is of a step that is evaluated. Raises: ValueError, with keys from the root."""
    best, every = checkpoint.best, evaluation.every_steps
    if best is None:
        return
    sources = [source.name for source in data.mixture]
    known = [*METRICS, *(OF_A_SOURCE + name for name in sources if len(sources) > 1)]
    if best not in known:
        raise ValueError(f"checkpoint.best={best} is no metric of validation; use one of: {', '.join(known)}")
    if best == "val_bits_per_byte" and any(task.kind != "causal" for task in objective.tasks):
        kinds = "+".join(task.kind for task in objective.tasks)
        raise ValueError(f"checkpoint.best={best} is known of objective.kind=causal, not of {kinds}; use val_loss")
    if not checkpoint.every_steps or not every or checkpoint.every_steps % every:
        raise ValueError(
            f"checkpoint.best needs checkpoints of steps that are evaluated: checkpoint.every_steps="
            f"{checkpoint.every_steps} must be a multiple of eval.every_steps={every}, neither of them 0"
        )
