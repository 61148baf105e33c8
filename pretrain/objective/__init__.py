"""Training objectives by name. A new one: a file with its row maker, a line here and in `NEEDS`."""

from collections.abc import Callable
from typing import NamedTuple

from pretrain.config.objective import ObjectiveConfig, TaskConfig
from pretrain.errors import ConfigError
from pretrain.objective.answers import (
    CHANCE,
    OVERLAP,
    answer_loss,
    build_answers,
    build_choices,
    choice_loss,
)
from pretrain.objective.causal import build_causal, build_prefix, build_supervised
from pretrain.objective.fim import build_fim
from pretrain.objective.loss import Loss, LossOutput, token_loss
from pretrain.objective.masked import build_labels, build_masked
from pretrain.objective.masked_patches import build_masked_patches, patch_loss
from pretrain.objective.mixed import build_ul2, mix
from pretrain.objective.preferences import REWARDS, build_preferences, preference_loss
from pretrain.objective.replaced import REPLACEMENTS, build_replaced, replaced_loss
from pretrain.objective.row_maker import RowContext
from pretrain.objective.seq2seq import build_captions, build_seq2seq
from pretrain.objective.span import build_span
from pretrain.rows import RowMaker


class ObjectiveKind(NamedTuple):
    """An entry of the registry; `build_rows` raises ConfigError if the tokenizer lacks a token.

    `shown` names further sums of the loss (`LossOutput.shown_M`), logged as means over the targets.
    """

    build_rows: Callable[[TaskConfig, RowContext], RowMaker]
    build_loss: Callable[[ObjectiveConfig], Loss] = token_loss
    shown: tuple[str, ...] = ()


OBJECTIVES: dict[str, ObjectiveKind] = {
    "causal": ObjectiveKind(build_causal),
    "masked": ObjectiveKind(build_masked),
    "replaced": ObjectiveKind(build_replaced, replaced_loss, REPLACEMENTS),
    "span": ObjectiveKind(build_span),
    "prefix": ObjectiveKind(build_prefix),
    "ul2": ObjectiveKind(build_ul2),
    "fim": ObjectiveKind(build_fim),
    "seq2seq": ObjectiveKind(build_seq2seq),
    "supervised": ObjectiveKind(build_supervised),
    "dpo": ObjectiveKind(build_preferences, preference_loss, REWARDS),
    "classify": ObjectiveKind(build_labels),
    "tag": ObjectiveKind(build_labels),
    "answers": ObjectiveKind(build_answers, answer_loss, OVERLAP),
    "choices": ObjectiveKind(build_choices, choice_loss, CHANCE),
    "images": ObjectiveKind(build_labels),
    "masked_patches": ObjectiveKind(build_masked_patches, patch_loss),
    "captions": ObjectiveKind(build_captions),
}


def build_rows(config: ObjectiveConfig, context: RowContext) -> RowMaker:
    """Returns the row maker of a run.

    Raises:
        ConfigError: The tokenizer lacks a token, or mixed objectives have different losses.
    """
    if len({OBJECTIVES[task.kind].build_loss for task in config.tasks}) > 1:
        kinds = ", ".join(dict.fromkeys(task.kind for task in config.tasks))
        raise ConfigError(
            f"objective.mixture: {kinds} have different losses, and a run has one",
            fix="mix those that share a loss",
        )
    makers = [OBJECTIVES[task.kind].build_rows(task, context) for task in config.tasks]
    fill = context.vocabulary.eos
    return mix(makers, config.weights, "objective", context.seed, context.lengths, fill)


def build_loss(config: ObjectiveConfig) -> Loss:
    """Returns the loss of a run; call it inside the module that the engine wraps."""
    return OBJECTIVES[config.tasks[0].kind].build_loss(config)


def shown_of(config: ObjectiveConfig) -> tuple[str, ...]:
    """Returns the names of what its loss shows besides the loss and the right answers."""
    return OBJECTIVES[config.tasks[0].kind].shown


__all__ = [
    "OBJECTIVES",
    "Loss",
    "LossOutput",
    "ObjectiveKind",
    "RowContext",
    "RowMaker",
    "build_loss",
    "build_rows",
    "shown_of",
]
