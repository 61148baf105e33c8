"""What `guard.on_spike: rollback` does: back to the newest checkpoint, in the same process, and on behind the spike.

    weights and moments loaded  ->  run.json says so  ->  ledger and metrics rewound  ->  a loader that leaves out
    the samples from the checkpoint to the spike

It is the command `pretrain rollback` (rollback.py) without a restart. A crash at any moment is that of a run which went
back, or not yet: one that had not written run.json meets the spike again, and goes back then.
"""

import logging
from dataclasses import replace

from pretrain.checkpoint.layout import list_checkpoints
from pretrain.checkpoint.state import TrainState
from pretrain.checkpoint.vote import agree
from pretrain.data.skips import SkipRanges
from pretrain.errors import CheckpointError, DivergedError
from pretrain.train.build import Run
from pretrain.train.guard import SpikeError
from pretrain.train.rollback import plan_rollback, record_rollback

log = logging.getLogger(__name__)


def go_back(run: Run, spike: SpikeError) -> TrainState:
    """Returns the state that the run goes on from. Collective.

    Without a checkpoint it goes on from where it is. A damaged checkpoint is set aside, as at a start.

    Raises:
        DivergedError: The run went back by itself `guard.max_rollbacks` times already.
        CheckpointError: No checkpoint can be loaded.
        DiskError: The checkpoints cannot be looked at, or run.json cannot be written.
    """
    run.progress.enter("load")
    limit, state, skips = run.config.guard.max_rollbacks, spike.state, SkipRanges(spike.state.skips)
    times, has_saved = agree(lambda: _look(run) if run.world.is_main else None)[0]
    if times >= limit:
        raise DivergedError(f"{spike.what}; the run went back {limit} times already", fix=spike.fix)
    if not has_saved:
        _say(run, "%s; there is no checkpoint to go back to, training goes on", spike.what)
    else:
        loaded = run.checkpoints.load_newest(run.engine.state)
        if loaded is None:
            raise CheckpointError("the checkpoint to go back to is gone", where=str(run.folder.checkpoints))
        skips = SkipRanges.of(agree(lambda: _record(run, loaded, spike) if run.world.is_main else None)[0])
        ours = replace(loaded, data_hash=state.data_hash, tokenizer_hash=state.tokenizer_hash)
        state = ours.leaving_out(skips.ranges)
        run.tracker.rewind(state.step)
        if run.audit is not None:
            run.audit.rewind(state.step)
        _say(run, "%s; back to step %d, without the samples since then", spike.what, state.step)
    run.loader = run.loader.restarted(state.position, skips)
    return state


def _look(run: Run) -> tuple[int, bool]:
    """Returns how often the run went back by itself, and whether there is a checkpoint."""
    times = sum(entry["automatic"] for entry in run.folder.read_record().get("rollbacks", []))
    return times, bool(list_checkpoints(run.folder.checkpoints))


def _record(run: Run, loaded: TrainState, spike: SpikeError) -> list[list[int]]:
    """Writes to run.json what is left out from now on; returns it."""
    skips = SkipRanges(spike.state.skips)
    num_samples = skips.place_of(spike.state.position) - skips.place_of(loaded.position)
    rollback = plan_rollback(loaded, skips, num_samples, automatic=True)
    return [list(pair) for pair in record_rollback(run.folder, rollback, skips).ranges]


def _say(run: Run, text: str, *values: object) -> None:
    if run.world.is_main:
        log.warning(text, *values)
