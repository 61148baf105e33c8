"""What `guard.on_spike: rollback` does: back to the newest checkpoint, in the same process, and on behind the spike.

    run.json says so  ->  weights and moments loaded  ->  ledger and metrics rewound  ->  a loader that leaves out
    the samples from the checkpoint to the spike

It is the command `pretrain rollback` (rollback.py) without a restart. A crash at any moment is that of a run which went
back, or not yet: run.json is written first, and the next start finds there what this one would have done.
"""

import logging
from dataclasses import replace

from pretrain import dist
from pretrain.checkpoint.layout import list_checkpoints
from pretrain.checkpoint.state import TrainState
from pretrain.data.skips import SkipRanges
from pretrain.errors import CheckpointError, DivergedError
from pretrain.train.build import Run
from pretrain.train.guard import SpikeError
from pretrain.train.rollback import plan_rollback, record_rollback

log = logging.getLogger(__name__)


def go_back(run: Run, spike: SpikeError) -> TrainState:
    """Returns the state that the run goes on from. Collective.

    Without a checkpoint it goes on from where it is.

    Raises:
        DivergedError: The run went back by itself `guard.max_rollbacks` times already.
        CheckpointError: No checkpoint can be loaded.
    """
    run.progress.enter("load")
    skips = SkipRanges(spike.state.skips)
    decision = dist.broadcast_object(_decide(run, spike, skips) if run.world.is_main else None)
    if decision["exhausted"]:
        limit = run.config.guard.max_rollbacks
        raise DivergedError(f"{spike.what}; the run went back {limit} times already", fix=spike.fix)
    state = spike.state
    if decision["skips"] is None:
        _say(run, "%s; there is no checkpoint to go back to, training goes on", spike.what)
    else:
        skips = SkipRanges.of(decision["skips"])
        loaded = run.checkpoints.load_newest(run.engine.state)
        if loaded is None:
            raise CheckpointError("the checkpoint to go back to is gone", where=str(run.folder.checkpoints))
        ours = replace(loaded, data_hash=state.data_hash, tokenizer_hash=state.tokenizer_hash)
        state = ours.leaving_out(skips.ranges)
        run.tracker.rewind(state.step)
        if run.audit is not None:
            run.audit.rewind(state.step)
        _say(run, "%s; back to step %d, without the samples since then", spike.what, state.step)
    run.loader = run.loader.restarted(state.position, skips)
    return state


def _decide(run: Run, spike: SpikeError, skips: SkipRanges) -> dict[str, object]:
    """Writes to run.json what is to be done, if it is; returns it."""
    newest = list_checkpoints(run.folder.checkpoints)[-1:]
    done = sum(entry["automatic"] for entry in run.folder.read_record().get("rollbacks", []))
    exhausted = done >= run.config.guard.max_rollbacks
    if exhausted or not newest:
        return {"exhausted": exhausted, "skips": None}
    start = plan_rollback(newest[0], skips, 0).first
    num_samples = skips.place_of(spike.state.position) - skips.place_of(start)
    rollback = plan_rollback(newest[0], skips, num_samples, automatic=True)
    return {"exhausted": False, "skips": record_rollback(run.folder, rollback, skips).ranges}


def _say(run: Run, text: str, *values: object) -> None:
    if run.world.is_main:
        log.warning(text, *values)
