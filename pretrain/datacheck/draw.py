"""Which objective, and which of its denoisers, a row is of: the draw that mixes rows is asked to mix their numbers."""

from collections.abc import Sequence

import numpy as np

from pretrain.config.lengths import RowLengths
from pretrain.config.objective import DenoiserConfig, ObjectiveConfig, TaskConfig
from pretrain.objective.contract import RowContext, RowMaker
from pretrain.objective.mixed import mix
from pretrain.rows import ModelRows, PairRows, TokenRows


def draw_objectives(
    config: ObjectiveConfig, context: RowContext, sample_ids: np.ndarray
) -> list[tuple[TaskConfig, DenoiserConfig | None]]:
    """Returns the objective of each row, and its denoiser where the objective has several.

    Args:
        config: Of the run.
        context: Of the run.
        sample_ids: int64 [B].
    """
    tasks = [config.tasks[number] for number in _draw(config.weights, "objective", context, sample_ids)]
    kinds: list[tuple[TaskConfig, DenoiserConfig | None]] = []
    for place, task in enumerate(tasks):
        denoiser = None
        if task.kind == "ul2":
            weights = [denoiser.weight for denoiser in task.ul2.denoisers]
            (number,) = _draw(weights, "denoiser", context, sample_ids[place : place + 1])
            denoiser = task.ul2.denoisers[number]
        kinds.append((task, denoiser))
    return kinds


def _draw(weights: Sequence[float], purpose: str, context: RowContext, sample_ids: np.ndarray) -> list[int]:
    rows = TokenRows(np.zeros((len(sample_ids), 2), np.int64), np.empty(0, np.int64), None, sample_ids)
    makers = [_say(number) for number in range(len(weights))]
    mixed = mix(makers, weights, purpose, context.seed, RowLengths(1, 1), 0)(rows)
    return [int(number) for number in mixed.inputs[:, 0]]


def _say(number: int) -> RowMaker:
    """Returns what makes rows of one token, a number."""

    def make(rows: TokenRows | PairRows) -> ModelRows:
        assert isinstance(rows, TokenRows), "made here"
        numbers = np.full((len(rows.sample_ids), 1), number)
        return ModelRows(numbers, numbers, len(numbers), rows.sample_ids)

    return make
