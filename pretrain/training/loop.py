"""The training loop. One screen shows the order of a step:

    micro-batches forward and backward  ->  next batch fetched  ->  update, while the ranks exchange
    ->  ledger  ->  metrics  ->  validation, if due  ->  save advances or begins  ->  stop, if asked

No callbacks: evaluation, checkpoints and tracking are called here.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pretrain import dist
from pretrain.checkpoint.state import TrainState
from pretrain.checkpoint.upload import Uploads
from pretrain.config.lengths import describe_rows
from pretrain.config.run import RunConfig
from pretrain.data.loader import StepBatch, StepCounts
from pretrain.engine.engine import Update
from pretrain.evaluation.row_loss import LossReport, evaluate_loss, pool
from pretrain.kinds.objective import NOTHING_SHOWN, Shown
from pretrain.objective import shown_of
from pretrain.shards.store import WaitStoppedError
from pretrain.tracking.meter import SourceLosses, memory_metrics
from pretrain.training.bad_step import is_spoiled, refuse_bad_end, report_step
from pretrain.training.build import Run, ValidationSource
from pretrain.training.claim import check_order
from pretrain.training.guard import Guard, SpikeError, go_back
from pretrain.training.health.rank_health import timed_waits
from pretrain.training.saving import Saving
from pretrain.training.step import StepTotals, seed_noise, start_exchange
from pretrain.types import Batch
from pretrain.utils.units import plural

log = logging.getLogger(__name__)


def train(run: Run, state: TrainState) -> TrainState:
    """Runs steps up to the last one, or to a stop, and leaves a checkpoint. Collective.

    Raises:
        DivergedError: The guard gives up: bad steps in a row, too many rollbacks, replicas differ.
        DiskError: The last save, or three in a row, could not be written.
        CheckpointError: The state to save is not one to go back to.
    """
    if run.world.is_main:
        _announce(run, state.step, run.config.train.last_step)
    while True:
        run.tracker.advance(state.step, "first step")
        if run.engine.module.balance is not None:
            run.engine.module.balance.forget()  # steps that a rollback gave up
        gathers = run.config.engine.on(run.world.size).zero_stage == 3 and run.engine.device.type == "cpu"
        try:
            with _start_saving(run, state.step) as saving, timed_waits(run.timeline.own, is_wanted=gathers):
                return _take_steps(run, state, saving)
        except SpikeError as spike:
            state = go_back(run, spike)


def _take_steps(run: Run, state: TrainState, saving: Saving) -> TrainState:
    config = run.config
    target, end = config.train.last_step, config.train.steps
    guard = Guard(config.guard, run.engine, run.world, state.losses, config.checkpoint.every_steps)
    sources = SourceLosses([source.name for source in run.dataset.sources])
    skipped_rows, phase, loss = 0, "compile", 0.0
    upcoming = _fetch(run, state.step + 1) if state.step < target else None
    # Before the first step too: the loss scale of a step needs its global number of targets.
    agreed = _start_exchange(run, saving, _zero(run), None, upcoming)()
    check_order(state, agreed.next_digest, config.resume.allow)
    while state.step < target and upcoming is not None and agreed.coming is not None and not agreed.stop:
        batch, num_targets = upcoming, agreed.coming.num_targets
        learning_rate = _learning_rate(config, state.step)
        shows_norms = config.tracking.measures_norms(state.step + 1)
        run.profiler.before_step(state.step + 1)
        sums = _accumulate(run, state.step, batch, agreed.coming, phase)
        phase = "forward-backward"
        # Fetched before the update, whose exchange has its counters; the last save has its digest.
        upcoming = _fetch(run, state.step + 1) if state.step + 1 < end else None
        with run.phase("update"):
            run.stop.arm()  # from here on a stop has something to save
            pending = _start_exchange(run, saving, sums, batch, upcoming)
            saving.before_update()
            if shows_norms:
                run.norms.arm()
            update, agreed = guard.update(learning_rate, num_targets, pending)
            _follow(run, state.step, update, agreed)
        skipped_rows += agreed.done.num_skipped
        run.samples.damage.check(skipped_rows)
        loss = agreed.loss_sum / max(num_targets, 1)
        state = guard.judge(_advance(state, batch, update, agreed), loss, num_targets, update)
        _audit(run, state.step, loss, update, agreed)
        sources.add(agreed.sums.get("by_source", ()))
        run.meter.end_step(agreed.done.num_tokens)
        run.tracker.advance(state.step)
        is_last = state.step >= target
        if is_last or config.tracking.has_row(state.step):
            metrics = {"loss": loss, "grad_norm": update.grad_norm} if num_targets else {}
            metrics["lr"] = learning_rate
            metrics |= _metrics(run, state, agreed, skipped_rows) | sources.take()
            if shows_norms:
                metrics |= run.norms.take(update, run.engine.device)
            run.tracker.log(state.step, metrics)
        _alert(run, state, loss, agreed)
        with run.meter.excluded():
            report_step(run, state, batch, loss, agreed.done)
            guard.act(state)
        _evaluate(run, state, is_last)
        with run.phase("save"):
            may_begin = not (agreed.stop or is_last or is_spoiled(run, state, loss))
            saving.after_step(state, agreed.num_written, may_begin=may_begin)
        run.timeline.end_step()
        with run.meter.excluded():
            run.profiler.after_step(state.step)
    run.profiler.close(state.step)
    refuse_bad_end(run, state, loss, skipped_rows)
    guard.check_replicas(state)
    with run.phase("save"):
        saving.finish(state, is_last=state.step >= run.config.train.last_step)
    return state


def _advance(state: TrainState, batch: StepBatch, update: Update, agreed: StepTotals) -> TrainState:
    return replace(
        state,
        step=state.step + 1,
        optimizer_step=state.optimizer_step + (0 if update.skipped else 1),
        tokens=state.tokens + agreed.done.num_targets,
        position=batch.next_position,
        next_digest=agreed.next_digest,
    )


def _audit(run: Run, step: int, loss: float, update: Update, agreed: StepTotals) -> None:
    if run.audit is not None:
        run.audit.append(
            step=step,
            tokens=agreed.done.num_targets,
            **agreed.done.digests(),
            loss=loss,
            grad_norm=None if update.skipped else update.grad_norm,
            attempt=run.attempt,
            multi_token_loss=agreed.multi_token_loss,
        )
        run.recovery = run.recovery.end(run.folder, step)


def _start_saving(run: Run, step: int) -> Saving:
    return Saving(
        checkpoints=run.checkpoints,
        store=run.engine.state,
        folder=run.folder,
        audit=run.audit,
        tracker=run.tracker,
        progress=run.progress,
        world=run.world,
        every_steps=run.config.checkpoint.every_steps,
        step=step,
        uploads=_start_uploads(run),
    )


def _start_uploads(run: Run) -> Uploads | None:
    saved = run.config.checkpoint
    if saved.upload is None:
        return None
    uploads = Uploads(
        upload=saved.upload,
        run=run.folder,
        world=run.world,
        keep=saved.keep,
        keep_every_steps=saved.keep_every_steps,
        retention=run.checkpoints.retention,
    )
    uploads.begin(run.progress.go_on)
    return uploads


def _announce(run: Run, step: int, target: int) -> None:
    for sentence in run.samples.too_long():
        log.warning("%s", sentence)
    for name, end in run.samples.ends(run.config.batch.steps.before(target)).items():
        log.warning("%s ends after %d samples of the run, and the other sources continue alone", name, end)
    if step >= target:
        log.info("%s is complete: %s", run.folder.path, plural(step, "step"))
    elif step:
        text = "resuming %s at step %d of %d: %s"
        log.info(text, run.folder.path, step, target, run.engine.description)
    else:
        log.info("starting %s, %s: %s", run.folder.path, plural(target, "step"), run.engine.description)
    if run.config.eval.every_steps and not run.validation:
        fix = "prepare another folder with --split tail:0.05, or set eval.every_steps=0"
        log.warning("nothing is evaluated: the data have no validation split; %s", fix)
    if step == 0 and run.config.finetune.kind != "lora" and (rate := run.config.optim.high_rate()):
        log.warning("%s", rate)
    if step < target and (cut := run.config.shortened()):
        log.warning("%s; %s", *cut)
    if rows := describe_rows(run.config.objective, run.config.batch, len(run.config.stacks)):
        log.info("%s", rows)


def _fetch(run: Run, step: int) -> StepBatch | None:
    """Returns the batch of `step`; None where a stop was asked for during the wait."""
    try:
        with run.phase("data", step):
            return next(run.loader)
    except WaitStoppedError:
        return None  # the exchange passes the stop on to the other ranks


def _start_exchange(
    run: Run, saving: Saving, sums: Tensor, ending: StepBatch | None, upcoming: StepBatch | None
) -> Callable[[], StepTotals]:
    done = ending.counts if ending else StepCounts()
    coming = upcoming.counts if upcoming else None
    flags = {"stop": bool(run.stop), "is_written": saving.is_written}
    of_ranks = run.health.measures(run.timeline.forward_s)
    finish = start_exchange(sums, done, coming, run.engine.module.layout, **flags, of_ranks=of_ranks)

    def wait() -> StepTotals:
        with run.timeline.within("communication"):
            return finish()

    return wait


def _zero(run: Run) -> Tensor:
    return torch.zeros(len(run.engine.module.layout), dtype=torch.float64, device=run.engine.device)


def _accumulate(run: Run, step: int, batch: StepBatch, counts: StepCounts, phase: str) -> Tensor:
    scale = run.world.size / max(counts.num_targets, 1)
    run.engine.module.targets_per_token = counts.num_targets / max(counts.num_tokens, 1)
    total = _zero(run)
    micro_batches = batch.micro_batches
    compare = run.engine.module.comparison
    if compare is not None and run.world.size * len(micro_batches) > 1:
        outputs = _rehearse(run, step, micro_batches, phase)
        micro_batches = compare(micro_batches, outputs, run.world.rank)
    for number, micro in enumerate(micro_batches):
        with run.phase(phase, step + 1):
            seed_noise(run.config, run.world, step, number)
            is_last = number + 1 == len(micro_batches)
            total += run.engine.forward_backward(micro.to(run.engine.device), scale, is_last)
    if phase == "compile":
        gc.collect()  # cycles that compilation leaves behind hold tensors on the device
    return total


def _rehearse(run: Run, step: int, micro_batches: Sequence[Batch], phase: str) -> list[Tensor]:
    """Returns the sums of the micro-batches of a step, with the dropout that they will have."""
    outputs = []
    for number, micro in enumerate(micro_batches):
        with run.phase(phase, step + 1):
            seed_noise(run.config, run.world, step, number)
            outputs.append(run.engine.rehearse(micro.to(run.engine.device)))
    return outputs


def _learning_rate(config: RunConfig, step: int) -> float:
    optim = config.optim
    return optim.lr * optim.schedule.rate(step, config.batch, config.train.steps)


def _follow(run: Run, step: int, update: Update, agreed: StepTotals) -> None:
    """Moves the average of the weights and the balance of experts, unless the step was skipped."""
    balance = run.engine.module.balance
    if balance is not None and not update.skipped:
        balance.follow(agreed.sums["routed"])
    if run.engine.average is not None and not update.skipped:
        batch = run.config.batch
        run.engine.average.follow(run.config.optim.ema.decay(step, batch.steps.at(step) * batch.seq_len))


def _metrics(run: Run, state: TrainState, agreed: StepTotals, skipped_rows: int) -> dict[str, float]:
    metrics = {run.config.counted: float(state.tokens)}
    num_targets = agreed.done.num_targets
    if num_targets and run.config.model.head.record.chooses:
        metrics["accuracy"] = agreed.num_correct / num_targets
    if num_targets:
        means = (value / num_targets for value in agreed.shown.values())
        metrics |= shown_of(run.config.objective).metrics(means)
    num_skipped = state.step - state.optimizer_step - state.empty_steps
    metrics["skipped_steps"] = float(max(num_skipped, 0))  # earlier versions applied empty steps
    loss_scale = run.engine.state.scalars().get("loss_scale.cur_scale")
    if loss_scale is not None:
        metrics["loss_scale"] = loss_scale
    metrics |= agreed.of_modules()
    if run.engine.module.balance is not None:
        metrics |= run.engine.module.balance.take()
    counts = {"skipped_rows": skipped_rows, "spikes": state.spikes, "empty_steps": state.empty_steps}
    metrics |= {name: float(count) for name, count in counts.items() if count}
    epochs = run.samples.epochs(state.position)
    metrics |= {f"epochs_{name}" if len(epochs) > 1 else "epochs": count for name, count in epochs.items()}
    metrics |= run.meter.read(state.step) | run.timeline.take() | run.health.metrics()
    lengths = run.config.lengths
    if lengths.image is not None and "tokens_per_s" in metrics:
        metrics["images_per_s"] = metrics["tokens_per_s"] / (lengths.target + (lengths.source or 0))
    return metrics | memory_metrics(run.engine.device)


def _alert(run: Run, state: TrainState, loss: float, agreed: StepTotals) -> None:
    """Sends an alert at the first of several steps that went wrong, and names ranks that are not well.

    The guard logs the response to the former.
    """
    run.health.judge(state.step, agreed.of_ranks, run.tracker.alert)
    if state.bad_steps_in_a_row == 1:
        run.tracker.alert("A step was not finite", f"step {state.step}, loss {loss:.4g}: it was skipped")
    elif state.spikes_in_a_row == 1:
        run.tracker.alert("A loss spike", f"step {state.step}, loss {loss:.4g}")


def _evaluate(run: Run, state: TrainState, is_last: bool) -> None:
    if run.validation and (is_last or state.step % run.config.eval.every_steps == 0):
        with run.phase("evaluate"):
            validate(run, state)
    if run.tasks is not None and run.tasks.is_due(state.step, is_last):
        with run.phase("evaluate"):
            run.tracker.advance(state.step, "answering tasks")
            # A stop leaves out the tasks that follow.
            scores = run.tasks.measure(partial(_should_stop, run), run.progress.go_on)
            if scores:
                run.tracker.log(state.step, scores)


def validate(run: Run, state: TrainState) -> None:
    """Logs the loss over the validation splits, then texts and pictures; ends at a stop."""
    should_stop = partial(_should_stop, run)
    run.tracker.advance(state.step, "evaluating")
    metrics = _measure(run, should_stop)
    average = run.engine.average
    if metrics and average is not None and run.config.eval.ema:
        with average.exchanged(state.optimizer_step):
            averaged = _measure(run, should_stop)
        metrics = None if averaged is None else metrics | {"val_ema_loss": averaged["val_loss"]}
    if metrics is None:
        run.checkpoints.note_evaluation(state.step, {})
        return
    damage = run.validation[0].damage
    damage.check(int(_total(run, damage.num_skipped_rows)) // run.world.row_ranks)
    if not metrics and run.world.is_main:
        log.warning("step %d: the validation split has no target, and so no loss", state.step)
    run.checkpoints.note_evaluation(state.step, metrics)
    if metrics:
        run.tracker.log(state.step, metrics)
    run.progress.go_on()
    if run.texts is not None and run.texts.is_due(state.step):
        run.tracker.samples(state.step, run.texts.generate())
    if run.pictures is not None and run.pictures.is_due(state.step):
        png = run.pictures.draw()
        if png is not None:
            run.tracker.attention(state.step, png)


def _total(run: Run, value: float) -> float:
    values = torch.tensor([value], dtype=torch.float64, device=run.engine.device)
    return dist.all_reduce_sum(values).item()


def _should_stop(run: Run) -> bool:
    run.progress.go_on()
    return _total(run, float(bool(run.stop))) > 0


def _measure(run: Run, should_stop: Callable[[], bool]) -> dict[str, float] | None:
    """Returns the row of an evaluation of the present weights; None at a stop."""
    reports = []
    for source in run.validation:
        report = evaluate_loss(run.engine, source.loader, should_stop)
        if report is None:
            return None
        reports.append(report)
    config = run.config
    return _describe(
        run.validation,
        reports,
        config.counted,
        shown_of(config.objective),
        scores_words=config.objective.scores_words,
        chooses=config.model.head.record.chooses,
    )


def _describe(
    validation: Sequence[ValidationSource],
    reports: Sequence[LossReport],
    counted: str = "tokens",
    shown: Shown = NOTHING_SHOWN,
    *,
    scores_words: bool = True,
    chooses: bool = True,
) -> dict[str, float]:
    """Returns the row of an evaluation: all splits, and each loss; empty without a target.

    Perplexity is left out where the loss is not one of words (`ObjectiveConfig.scores_words`), accuracy where it
    is no choice among answers, which pixels are not.
    """
    whole, bits = pool(reports, [source.tokens_per_byte for source in validation])
    if not whole.num_targets:
        return {}
    metrics = {}
    if len(validation) > 1:
        pairs = zip(validation, reports, strict=True)
        metrics = {f"val_loss_{source.name}": one.loss for source, one in pairs if one.num_targets}
    metrics["val_loss"] = whole.loss
    if scores_words:
        metrics["val_perplexity"] = whole.perplexity
    if chooses:
        metrics["val_accuracy"] = whole.accuracy
    metrics |= {f"val_{name}": value for name, value in shown.metrics(whole.shown).items()}
    metrics[f"val_{counted}"] = float(whole.num_targets)
    if bits is not None:
        metrics["val_bits_per_byte"] = bits
    return metrics
