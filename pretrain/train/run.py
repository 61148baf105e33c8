"""One attempt at a run, from claim to exit code."""

import logging

from pretrain import dist
from pretrain.config.run import RunConfig
from pretrain.control import StopFlag
from pretrain.dist import World
from pretrain.errors import EXIT_OK, EXIT_RESUME_ME, PretrainError
from pretrain.log import quiet_libraries, setup_logging
from pretrain.rundir import RunDir, end_attempt
from pretrain.train.build import build_run, claim_run
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
    claim = claim_run(config, world)
    setup_logging(world.rank, world.size, claim.folder.logs / f"rank-{world.rank:05d}.log")
    try:
        run, state = build_run(claim, world, stop)
        quiet_libraries()
        try:
            state = train(run, state)
        finally:
            run.loader.close()
            run.tracker.close()
            if run.audit is not None:
                run.audit.close()
    except PretrainError as error:
        _note_end(claim.folder, world, error.exit_code, error.what)
        raise
    finally:
        if claim.lock is not None:
            claim.lock.release()
    target = min(claim.config.train.stop_after or claim.config.train.steps, claim.config.train.steps)
    stopped = state.step < target
    code = EXIT_RESUME_ME if stopped else EXIT_OK
    reason = f"stopped by {stop.signal_name or 'a signal to another rank'}" if stopped else "done"
    _note_end(claim.folder, world, code, reason)
    if stopped and world.is_main:
        log.info("%s at step %d of %d; the same command continues the run", reason, state.step, target)
    dist.shut_down()
    return code


def _note_end(folder: RunDir, world: World, exit_code: int, reason: str) -> None:
    if world.is_main and folder.exists():
        end_attempt(folder, {"exit_code": exit_code, "reason": reason})
