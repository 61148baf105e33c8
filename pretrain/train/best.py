"""Evidence of earlier checkpoints in a run folder without any: a run that has ever committed never starts over.

The first commit of an attempt is marked in run.json. Where that file is missing, rows in the ledger or the metrics
show that the run is not new; where it lacks the mark, as on a full disk, a row of a later attempt or of a save does.
"""

import logging
from collections.abc import Sequence

from pretrain.checkpoint.manager import CheckpointManager
from pretrain.config.train import OF_A_SOURCE
from pretrain.errors import CheckpointError, ConfigError, DataError, DiskError
from pretrain.run.folder import RunDir, add_to_attempt
from pretrain.tracking.audit import read_audit
from pretrain.utils.jsonl import read_rows

log = logging.getLogger(__name__)

COMMITTED = "committed_step"

SAVED = "checkpoint_step"

"""Key of the metrics row of a save."""


def note_commit(folder: RunDir, step: int) -> None:
    """Marks the first commit of the last attempt in run.json. Thread-safe.

    A failure is a warning: the checkpoint is valid all the same, and the next commit tries again.
    """
    try:
        add_to_attempt(folder, {COMMITTED: step}, once=True)
    except (ConfigError, DiskError) as error:
        log.warning("%s", error)


def check_new(folder: RunDir) -> None:
    """Refuses to begin at step 0 in a folder with evidence of a checkpoint, or of a run without its record.

    Raises:
        CheckpointError: There is evidence; names the file.
        ConfigError: run.json is damaged.
    """
    sign = _find_sign(folder)
    if sign is not None:
        raise CheckpointError(
            f"there is no checkpoint, but {sign}: a run never starts over by itself",
            where=str(folder.checkpoints),
            fix="restore the checkpoints, or start over under another run.name",
        )


def _find_sign(folder: RunDir) -> str | None:
    """Returns the evidence that the run has committed, or is not new though its record is missing; else None."""
    if not folder.exists():
        for file in (folder.audit, folder.metrics):
            if file.is_file() and file.stat().st_size:
                return f"{file.name} has rows, and run.json is missing"
        return None
    for attempt in folder.read_record()["attempts"]:
        for key in (COMMITTED, "from_step"):
            if attempt.get(key):
                return f"run.json tells of one of step {attempt[key]}"
    return _find_in_ledger(folder)


def _find_in_ledger(folder: RunDir) -> str | None:
    """A later attempt that did not begin at step 1 began at a checkpoint."""
    try:
        before = 1
        for row in read_audit(folder.audit):
            if row.attempt > before and row.step > 1:
                return f"audit.jsonl tells of an attempt that began at one of step {row.step - 1}"
            before = max(before, row.attempt)
        for metrics in read_rows(folder.metrics):
            if metrics.get(SAVED):
                return f"metrics.jsonl tells of one of step {metrics[SAVED]}"
    except DataError as error:
        return f"the records are damaged ({error.where}: {error.what})"
    return None


# Evaluations of earlier attempts, for the best checkpoint.


def recall_evaluations(checkpoints: CheckpointManager, metric: str | None, sources: Sequence[str], run: RunDir) -> None:
    """Notes what metrics.jsonl knows of `checkpoint.best`: a killed attempt may have had no time to mark its best.

    Args:
        checkpoints: Checkpoints of the run.
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
