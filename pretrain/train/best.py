"""What is known of a run's checkpoints when an attempt begins: evaluations that earlier attempts have logged."""

import logging
from collections.abc import Sequence

from pretrain.checkpoint.manager import CheckpointManager
from pretrain.config.best_rules import OF_A_SOURCE
from pretrain.errors import ConfigError, DataError
from pretrain.run.folder import RunDir
from pretrain.utils.jsonl import read_rows

log = logging.getLogger(__name__)


def recall_evaluations(checkpoints: CheckpointManager, metric: str | None, sources: Sequence[str], run: RunDir) -> None:
    """Notes what metrics.jsonl knows of `checkpoint.best`: a killed attempt may have had no time to mark its best.

    Args:
        checkpoints: Of the run.
        metric: `checkpoint.best`.
        sources: Those that have a validation split.
        run: Rewound to the step that the attempt goes on from.

    Raises:
        ConfigError: Nothing is going to tell the metric.
    """
    if metric is None:
        return
    if not sources or (metric.startswith(OF_A_SOURCE) and metric.removeprefix(OF_A_SOURCE) not in sources):
        raise ConfigError(
            f"checkpoint.best={metric}: the data have no validation split that tells it",
            fix="prepare with a split, or leave it out",
        )
    try:
        rows = read_rows(run.metrics)
    except DataError as error:
        log.warning("%s", error)
        return
    for row in rows:
        if metric in row:
            checkpoints.note_evaluation(row["step"], row)
