"""One attempt at a run, from claim to exit code."""

import logging

from pretrain.config.run import RunConfig
from pretrain.control import StopFlag
from pretrain.dist import World
from pretrain.errors import EXIT_OK, EXIT_RESUME_ME, PretrainError
from pretrain.log import setup_logging
from pretrain.rundir import end_attempt
from pretrain.train.build import Run, build_run
from pretrain.train.claim import Claim, claim_run
from pretrain.train.loop import train

log = logging.getLogger(__name__)


def run_training(config: RunConfig, world: World) -> int:
    """Trains as one rank of the world; returns the exit code: 0 when the run is complete, 75 when it was stopped.

    Raises:
        PretrainError: What the user can mend; the attempt in run.json says so too.
    """
    setup_logging(world.rank, world.size)
    stop = StopFlag()
    stop.install()
    claim = claim_run(config, world, stop)
    try:
        setup_logging(world.rank, world.size, claim.folder.logs / f"rank-{world.rank:05d}.log")
        run, state = build_run(claim, world, stop)
        try:
            state = train(run, state)
        except BaseException:
            # Peers may be gone, and a launcher waits to kill us: what wandb still has on its way is not worth it.
            _close(run, claim, tracker_timeout_s=1.0)
            raise
        target = run.config.train.last_step
        stopped = state.step < target
        reason = f"stopped by {stop.signal_name or 'a signal to another rank'}" if stopped else "done"
        code = EXIT_RESUME_ME if stopped else EXIT_OK
        # The outcome is written before the tracker is closed: after a stop there may be seconds until a SIGKILL.
        _note_end(claim, code, reason)
        if stopped and world.is_main:
            log.info("%s at step %d of %d; the same command continues the run", reason, state.step, target)
        _close(run, claim, tracker_timeout_s=5.0 if stopped else 60.0)
    except PretrainError as error:
        _note_end(claim, error.exit_code, error.what)
        raise
    finally:
        for store in claim.stores:
            store.close()
        if claim.lease is not None:
            claim.lease.release()
    return code


def _close(run: Run, claim: Claim, tracker_timeout_s: float) -> None:
    for store in claim.stores:  # first: a thread that waits for a server ends with it
        store.close()
    run.loader.close()
    if run.audit is not None:
        run.audit.close()
    run.tracker.close(tracker_timeout_s)


def _note_end(claim: Claim, exit_code: int, reason: str) -> None:
    """Writes how this attempt ended, on rank 0, unless the run is another's by now."""
    if claim.lease is not None and claim.folder.exists() and claim.lease.is_held():
        end_attempt(claim.folder, {"exit_code": exit_code, "reason": reason})
