"""Row makers and losses of objectives, by the records of `pretrain.kinds.objectives`."""

from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

from torch import Tensor

from pretrain.config.objective import ObjectiveConfig
from pretrain.errors import ConfigError
from pretrain.kinds.objective import Shown
from pretrain.kinds.objectives import OBJECTIVES
from pretrain.objective.loss import Loss, LossOutput
from pretrain.objective.mixed import mix
from pretrain.objective.row_maker import RowContext
from pretrain.types import Batch, RowMaker

Comparison = Callable[[Sequence[Batch], Sequence[Tensor], int], list[Batch]]
"""`compare(batches, outputs, rank)`: micro-batches, and results of their rehearsals. Collective."""

_OF_TEACHER = Shown(("distill_loss",))


def build_rows(config: ObjectiveConfig, context: RowContext) -> RowMaker:
    """Returns the row maker of a run.

    Raises:
        ConfigError: The tokenizer lacks a token, or mixed objectives have different losses.
    """
    if len({OBJECTIVES[task.kind].loss for task in config.tasks}) > 1:
        kinds = ", ".join(dict.fromkeys(task.kind for task in config.tasks))
        raise ConfigError(
            f"objective.mixture: {kinds} have different losses, and a run has one",
            fix="mix those that share a loss",
        )
    makers = [resolve_name(OBJECTIVES[task.kind].rows)(task.section, context) for task in config.tasks]
    fill = context.vocabulary.eos
    return mix(makers, config.weights, "objective", context.seed, context.lengths, fill)


def build_loss(config: ObjectiveConfig) -> Loss:
    """Returns the loss of a run; call it inside the module that the engine wraps."""
    record = OBJECTIVES[config.tasks[0].kind]
    return partial(resolve_name(record.loss), **_settings(config))


def build_comparison(config: ObjectiveConfig) -> Comparison | None:
    """Returns the comparison of all micro-batches of a step; None: their losses are sums."""
    record = OBJECTIVES[config.tasks[0].kind]
    if not record.whole_batch:
        return None
    return partial(resolve_name(record.whole_batch), **_settings(config))


def _settings(config: ObjectiveConfig) -> dict[str, Any]:
    keys = OBJECTIVES[config.tasks[0].kind].loss_settings
    sections = {key: config.section if hasattr(config.section, key) else config for key in keys}
    return {key: getattr(one, key) for key, one in sections.items()}


def shown_of(config: ObjectiveConfig) -> Shown:
    """Returns what its loss shows besides the loss and the right answers."""
    record = OBJECTIVES[config.tasks[0].kind]
    return Shown(record.shown, record.summarize) if config.distill is None else _OF_TEACHER


__all__ = [
    "Comparison",
    "Loss",
    "LossOutput",
    "RowContext",
    "RowMaker",
    "build_comparison",
    "build_loss",
    "build_rows",
    "shown_of",
]
