"""Rules of `checkpoint.best`: what it may name, and when that is known."""

from pretrain.config.data import DataConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.train import CheckpointConfig, EvalConfig

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
