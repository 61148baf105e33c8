"""One rank of a training run, from its signals to its exit code."""

import contextlib
import faulthandler
import logging
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td

from pretrain.artifact.model_path import read_texts
from pretrain.checkpoint.state import TrainState
from pretrain.config.run import RunConfig
from pretrain.dist import World, ranks_of_node
from pretrain.errors import (
    EXIT_BUG,
    EXIT_OK,
    EXIT_RESUME_ME,
    CheckpointError,
    ConfigError,
    DataError,
    DiskError,
    HangError,
    OutOfMemoryError,
    PretrainError,
)
from pretrain.kinds.objectives import OBJECTIVES
from pretrain.report.metric_columns import read_tables
from pretrain.report.series import make_course
from pretrain.run.folder import RECOVERY, RunDir, end_attempt
from pretrain.run.heartbeat import Progress
from pretrain.run.recovery import MAY_REPEAT, Recovery, read_recovery
from pretrain.run.stop import StopFlag
from pretrain.run.watchdog import Watchdog
from pretrain.tracking.meter import FOLDER
from pretrain.tracking.tracker import FINISH_TIMEOUT_S
from pretrain.training.build import Run, build_run
from pretrain.training.claim import Claim, claim_run
from pretrain.training.loop import train
from pretrain.utils.io import make_dir
from pretrain.utils.jsonl import newest_rows, rows_with
from pretrain.utils.log import setup_logging
from pretrain.utils.units import clock_time, plural

log = logging.getLogger(__name__)

_GIB = 2**30


@contextlib.contextmanager
def memory_explained(config: RunConfig, run_dir: Path, world: World) -> Iterator[None]:
    """Turns torch's out-of-memory error into ours: peak, advice, and path of the snapshot."""
    if config.profile.memory_history and torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
    except torch.OutOfMemoryError as error:
        peak = snapshot = ""
        if torch.cuda.is_available():
            most = torch.cuda.max_memory_allocated()
            total = torch.cuda.get_device_properties(0).total_memory
            peak = f", tensors held up to {most / _GIB:.1f} of {total / _GIB:.1f} GiB"
            # For pytorch.org/memory_viz. The error of the run is the one to tell.
            path = run_dir / FOLDER / f"memory-rank-{world.rank}.pickle"
            try:
                make_dir(path.parent)
                torch.cuda.memory._dump_snapshot(str(path))
                snapshot = str(path)
            except (DiskError, OSError, RuntimeError) as failure:
                log.warning("no memory snapshot: %s", failure)
        reason = str(error).splitlines()[0].removesuffix(".")
        raise OutOfMemoryError(
            f"out of GPU memory on rank {world.rank}{peak}: {reason}", where=snapshot, fix="; or ".join(_advice(config))
        ) from error


def _advice(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    if config.batch.micro > 1:
        micro = config.batch.micro
        yield f"use batch.micro={micro // 2} (now {micro}), which changes nothing else"
    if engine.activation_checkpointing != "full":
        yield "use engine.activation_checkpointing=full"
    elif engine.offload_activations == "none":
        yield "use engine.offload_activations=cpu"
    if engine.is_replicated or engine.zero_stage < 3:
        yield f"use engine.kind=deepspeed engine.zero_stage={3 if engine.zero_stage == 2 else 2}"
    yield "ask `pretrain plan` what fits"


STOPPED_TRACKER_S = 20.0
"""Wait for the rows of trackers after a stop: a loaded node took more than 5 s to end a run that it
tracked offline, and wandb writes in blocks of 32 KiB, so that cutting it off costs the last of
them."""


def run_training(config: RunConfig, world: World, stop: StopFlag | None = None) -> int:
    """Trains as one rank of the world; returns the exit code: 0, or 75 after a stop.

    `stop` is installed before imports that take seconds; None: one is installed now.

    Raises:
        PretrainError: A condition that the user can fix; the attempt in run.json says so too.
        HangError: Another rank is gone, and named.
    """
    setup_logging(world.rank, world.size)
    stop, progress = stop or StopFlag(), Progress()
    stop.install()
    faulthandler.enable(2)  # a crash in native code prints the stacks of all threads
    watchdog = Watchdog(progress, world.rank, world.size, config.engine.timeout_s)
    stop.is_failing = lambda: watchdog.is_failing
    watchdog.start()
    try:
        claim = claim_run(config, world, stop)
        watchdog.farewell = stop.farewell = partial(_say_farewell, claim)
        watchdog.log_file = claim.folder.logs / f"rank-{world.rank:05d}.log"
        try:
            setup_logging(world.rank, world.size, watchdog.log_file)
            with memory_explained(config, claim.folder.path, world):
                return _train(claim, world, stop, progress)
        except Exception as error:
            stop.arm()  # else a signal of the launcher ends this process before the report
            recovery = read_recovery()
            hang = _find_lost(error, watchdog, is_replaced=recovery.is_on)
            _note_failure(claim, hang or error)
            if hang is not None:
                raise hang from error
            code = error.exit_code if isinstance(error, PretrainError) else EXIT_BUG
            if not (recovery.is_on and code in MAY_REPEAT):  # else its peers would end before it
                watchdog.tell(code, str(error))
            raise
        finally:
            for store in claim.stores:
                store.close()
            if claim.lease is not None:
                claim.lease.release()
    finally:
        watchdog.close()


def _train(claim: Claim, world: World, stop: StopFlag, progress: Progress) -> int:
    recovery = read_recovery()
    if world.is_main:
        _warn(claim.config, world, recovery)
    parallel = claim.config.parallel
    world = replace(world, sequence=parallel.sequence, experts=parallel.experts, tensor=parallel.tensor)
    run, state = build_run(claim, world, stop, progress)
    try:
        state = train(run, state)
    except BaseException:
        # Other ranks may be gone, and the launcher is about to kill this one: no time for uploads
        # of trackers. One that replaces ranks waits longer.
        _close(run, claim, tracker_timeout_s=3.0 if recovery.is_on else 1.0, is_failing=True)
        raise
    progress.enter("close")
    target = run.config.train.last_step
    stopped = state.step < target
    reason = f"stopped by {stop.signal_name or 'a signal to another rank'}" if stopped else "done"
    code = EXIT_RESUME_ME if stopped else EXIT_OK
    # The outcome is written before the tracker is closed: after a stop there may be seconds until a
    # SIGKILL.
    _note_end(claim, code, reason)
    stop.disarm(code)
    if stopped and world.is_main:
        log.info("%s at step %d of %d; the same command continues the run", reason, state.step, target)
    _close(run, claim, tracker_timeout_s=STOPPED_TRACKER_S if stopped else FINISH_TIMEOUT_S)
    if world.is_main and not stopped:
        print("\n".join(_summarize(run, state)), flush=True)
    return code


def _warn(config: RunConfig, world: World, recovery: Recovery) -> None:
    for slow in config.parallel.across_nodes(world.size, ranks_of_node(world)):
        log.warning("%s; %s", *slow)
    recover = config.run.recover
    if recover != "off" and not recovery.is_on:
        text = "run.recover=%s is for `pretrain launch local` on one machine: a lost rank ends this job"
        log.warning(text, recover)


def _summarize(run: Run, state: TrainState) -> Iterator[str]:
    attempts: list[dict[str, Any]] = []
    ends: dict[str, list[str]] = {}
    try:
        attempts = run.folder.read_record()["attempts"]
        ends = {name: _ends_of(run.folder.metrics, name) for name in ("loss", "val_loss")}
    except (ConfigError, DataError) as error:  # a damaged record is no failure of the training
        log.warning("%s", error)
    num_recoveries = sum(RECOVERY in one for one in attempts)
    starts = plural(len(attempts) - num_recoveries, "start")
    starts += f" and {plural(num_recoveries, 'recovery')}" if num_recoveries else ""
    time = f"{time_of_starts(run.folder.metrics, attempts)} in {starts}"
    targets = OBJECTIVES[run.config.objective.kind].targets or run.config.model.head.record.targets
    empty = f" ({state.empty_steps:,} without a target)" if state.empty_steps else ""
    yield f"done: {plural(state.step, 'step')}{empty}, {state.tokens:,} {targets}, {time}"
    yield from (f"      {name} {', '.join(points)}" for name, points in ends.items() if points)
    yield f"next: {next_of_run(run.config, has_validation=bool(run.validation))}"
    yield f"      pretrain report {shlex.quote(str(run.folder.path))}"


def _ends_of(metrics: Path, name: str) -> list[str]:
    """Returns the first and the last value of a metric, one if a row has both. Raises: DataError."""
    ends = []
    for rows in (rows_with(metrics, name), newest_rows(metrics, name)):
        measured = (row for row in rows if row[name] is not None)
        ends += [row for row in islice(measured, 1) if row not in ends]
    return [f"{row[name]:.4f} at step {row['step']}" for row in ends]


def time_of_starts(metrics: Path, attempts: Sequence[dict[str, Any]]) -> str:
    """Returns the time of all starts, or of the steps if a start was killed, whose end is unknown."""
    if all("ended" in one for one in attempts):
        spans = [_instant(one["ended"]) - _instant(one["started"]) for one in attempts]
        return clock_time(sum(spans))
    resumed = [one["from_step"] for one in attempts if one.get("from_step")]
    course = make_course(read_tables(metrics, []), resumed)
    return f"about {clock_time(course.hours[-1] * 3600)}"


def _instant(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def next_of_run(config: RunConfig, has_validation: bool) -> str:
    """Returns the command that uses the model of a run, whose folder says whether it has a template."""
    template = None
    with contextlib.suppress(CheckpointError):  # a damaged file of the run is no failure of the training
        template, _ = read_texts(RunDir(config.folder))
    return next_command(config, has_template=template is not None, has_validation=has_validation)


def next_command(config: RunConfig, *, has_template: bool, has_validation: bool) -> str:
    """Returns the command that uses the model of a run.

    `has_template`: it was trained on conversations in one; `has_validation`: the data have that split.
    """
    path = shlex.quote(str(config.folder))
    kinds = [task.kind for task in config.objective.tasks]
    if has_template and config.stacks == ["decoder"]:
        return f"pretrain chat {path}"
    for kind in kinds:
        if OBJECTIVES[kind].next_command:
            return OBJECTIVES[kind].next_command.format(path=path)
    if not config.model.head.record.scores_words:
        # `classify` reads texts only, and there may be no split to evaluate.
        return f"pretrain evaluate {path}" if has_validation else f"pretrain inspect {path}"
    # A decoder alone begins a document without a prompt, be it of prose or of code.
    prompts = {"encoder": " --prompt 'Once upon a [MASK]'", "decoder": ""}
    prompt = " --prompt 'Once upon a time'" if len(config.stacks) > 1 else prompts[config.stacks[0]]
    return f"pretrain generate {path}{prompt}"


def _close(run: Run, claim: Claim, tracker_timeout_s: float, *, is_failing: bool = False) -> None:
    for store in claim.stores:  # first: the loader's threads may be waiting for a server of a store
        store.close()
    run.loader.close()
    if run.audit is not None:
        run.audit.close()
    run.tracker.close(tracker_timeout_s, is_failing=is_failing)


def _find_lost(error: Exception, watchdog: Watchdog, *, is_replaced: bool) -> HangError | None:
    """Returns the error that names the lost rank after a failed collective; else None.

    A rank that the launcher replaces is named by it, at once.
    """
    is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    if not (is_gloo or isinstance(error, td.DistError)):
        return None
    if is_replaced:
        return HangError("a rank is lost, and the launcher names it")
    verdict = watchdog.explain()
    hang = HangError(verdict.text)
    hang.exit_code = verdict.exit_code
    return hang


def _say_farewell(claim: Claim, exit_code: int, reason: str) -> None:
    """Notes the outcome and releases the lease before the process exits, from any thread."""
    with contextlib.suppress(PretrainError):  # a disk that refuses the note keeps no lease
        if reason:
            _note_end(claim, exit_code, reason)
    if claim.lease is not None:
        claim.lease.release()


def _note_failure(claim: Claim, error: Exception) -> None:
    reason = f"a bug: {type(error).__name__}"
    if isinstance(error, PretrainError):
        reason = error.what.splitlines()[0]
    try:
        _note_end(claim, error.exit_code if isinstance(error, PretrainError) else EXIT_BUG, reason)
    except DiskError as failure:  # most likely the full disk that ended the run
        log.warning("the end of this start is not in run.json: %s", failure)


def _note_end(claim: Claim, exit_code: int, reason: str) -> None:
    """Writes the outcome of this attempt, on rank 0, while it owns the run folder; a refused start has none."""
    if claim.folder.attempt is not None and claim.lease is not None and claim.lease.is_held():
        end_attempt(claim.folder, {"exit_code": exit_code, "reason": reason})
