"""An evaluation during a run: the loss over the validation splits, texts and pictures; all ranks together."""

import logging
from collections.abc import Sequence

import torch

from pretrain import dist
from pretrain.checkpoint.state import TrainState
from pretrain.evaluate.row_loss import LossReport, evaluate_loss, pool
from pretrain.train.build import Run, ValidationSource

log = logging.getLogger(__name__)


def validate(run: Run, state: TrainState) -> None:
    """Logs the loss over the validation splits, the mean over all their targets; gives up when a stop is asked for."""

    def should_stop() -> bool:
        run.progress.go_on()
        flag = torch.tensor([float(bool(run.stop))], dtype=torch.float64, device=run.engine.device)
        return bool(dist.all_reduce_sum(flag).item() > 0)

    reports = []
    for source in run.validation:
        report = evaluate_loss(run.engine, source.loader, should_stop)
        if report is None:
            run.checkpoints.note_evaluation(state.step, {})
            return
        reports.append(report)
    damage = run.validation[0].damage
    damaged = torch.tensor([float(damage.num_skipped_rows)], dtype=torch.float64, device=run.engine.device)
    damage.check(int(dist.all_reduce_sum(damaged).item()))
    metrics = _describe(run.validation, reports)
    if not metrics and run.world.is_main:
        log.warning("step %d: nothing in the validation split has a target; there is no loss of it", state.step)
    run.checkpoints.note_evaluation(state.step, metrics)
    if metrics:
        run.tracker.log(state.step, metrics)
    run.progress.go_on()
    if run.texts is not None and run.texts.is_due(state.step):
        run.tracker.samples(state.step, run.texts.generate())
    if run.pictures is not None and run.pictures.is_due(state.step) and (png := run.pictures.draw()) is not None:
        run.tracker.attention(state.step, png)


def _describe(validation: Sequence[ValidationSource], reports: Sequence[LossReport]) -> dict[str, float]:
    """Returns the row of an evaluation: of all splits, and the loss of each; empty where nothing has a target."""
    whole, bits = pool(reports, [source.tokens_per_byte for source in validation])
    if not whole.num_targets:
        return {}
    metrics = {}
    if len(validation) > 1:
        metrics = {
            f"val_loss_{source.name}": one.loss
            for source, one in zip(validation, reports, strict=True)
            if one.num_targets
        }
    metrics |= {"val_loss": whole.loss, "val_perplexity": whole.perplexity, "val_accuracy": whole.accuracy}
    metrics["val_tokens"] = float(whole.num_targets)
    if bits is not None:
        metrics["val_bits_per_byte"] = bits
    return metrics
