"""Return to an earlier checkpoint of a run, without the samples that followed. Imports no torch.

    run.json       "skips": [[from, to], ...]   positions of the data order (data/order.py)
                   "rollbacks": [{...}, ...]    every return, by command or by the run itself
    checkpoints/   step-N.rolled-back           newer checkpoints: set aside, never removed

The order of the writes makes every moment a valid state: checkpoints are set aside newest first,
then the range is recorded. A command that was stopped in between is given again. The next start
rewinds ledger and metrics. Each checkpoint has the ranges too.

PaLM met loss spikes like this by hand (Chowdhery et al. 2022, section 5.1): back to some 100 steps
before the spike, and on without the 200 to 500 batches that were around it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format import list_checkpoints, load_manifest, set_aside, step_of
from pretrain.checkpoint.state import TrainState
from pretrain.config.data import BatchConfig
from pretrain.config.yaml_nodes import read_yaml
from pretrain.data.order import SkipRanges
from pretrain.errors import CheckpointError, ConfigError
from pretrain.run.folder import RunDir, change_record, check_new
from pretrain.run.lease import Lease
from pretrain.utils.io import check_file


@dataclass(frozen=True, slots=True)
class Rollback:
    """A return to a checkpoint, as run.json has it."""

    to: int  # step of the checkpoint
    first: int  # position of the first sample that is left out
    end: int  # position behind the last one; `first` where none is
    automatic: bool  # whether a spike led to it, and not a command
    set_aside: tuple[str, ...]  # names of the checkpoints that were newer
    at: str  # time, UTC


def read_skips(run: RunDir, record: dict[str, Any]) -> SkipRanges:
    """Returns the ranges in run.json. Raises: ConfigError."""
    try:
        return SkipRanges.of(record.get("skips", []))
    except (ValueError, TypeError) as error:
        where = str(run.record)
        raise ConfigError(f"skips: {error}", where=where, fix="restore the file") from None


def plan_rollback(
    state: TrainState, skips: SkipRanges, num_samples: int, *, automatic: bool = False, set_aside: Sequence[str] = ()
) -> Rollback:
    """Plans the return to a state without the `num_samples` that follow, besides `skips`."""
    place = skips.place_of(state.position)
    first = skips.position_of(place)
    end = skips.position_of(place + num_samples - 1) + 1 if num_samples else first
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Rollback(state.step, first, end, automatic, tuple(set_aside), now)


def record_rollback(run: RunDir, rollback: Rollback, skips: SkipRanges) -> SkipRanges:
    """Writes a rollback to run.json; returns all ranges to leave out. Raises: DiskError."""
    if rollback.end > rollback.first:
        skips = SkipRanges.of([*skips.ranges, (rollback.first, rollback.end)])

    def note(record: dict[str, Any]) -> None:
        record["skips"] = [list(pair) for pair in skips.ranges]
        record.setdefault("rollbacks", []).append(asdict(rollback))

    change_record(run, note)
    return skips


def roll_back(path: Path, to: int, *, samples: int | None = None, tokens: int | None = None) -> tuple[Rollback, int]:
    """Makes the next start of a run continue from an earlier checkpoint, without later samples.

    Left out are `samples`, or `tokens` with padding counted, rounded up to whole global batches,
    whose number is returned too.

    Raises:
        ConfigError: There is no run here.
        CheckpointError: It has no such checkpoint, or a damaged one.
        LockedError: The run is in use.
        DiskError: The disk refused; the same call completes it.
    """
    run = RunDir(path)
    run.read_record()
    lease = Lease(run.lease)
    try:
        batch = BatchConfig.model_validate(read_yaml(run.config).values["batch"])
        paths = {step_of(path): path for path in list_checkpoints(run.checkpoints)}
        if not paths:
            check_new(run)
        if to not in paths:
            listed = ", ".join(str(step) for step in paths) or "none"
            raise CheckpointError(
                f"no committed checkpoint of step {to}; there is {listed}",
                where=str(run.checkpoints),
                fix="give one of these as --to" if paths else "start the run again: it begins at step 0",
            )
        state = _check_whole(paths[to])
        wanted = -(-(tokens or 0) // batch.seq_len) if samples is None else samples
        done = batch.steps.before(to)
        batches = max(0, batch.steps.steps_for(done + wanted) - to)
        skips = SkipRanges.of([*read_skips(run, run.read_record()).ranges, *state.skips])
        names = [newer.name for step, newer in paths.items() if step is not None and step > to]
        rollback = plan_rollback(state, skips, batch.steps.before(to + batches) - done, set_aside=names)
        for name in reversed(names):
            set_aside(run.checkpoints / name, "rolled-back")
        lease.check()
        record_rollback(run, rollback, skips)
    finally:
        lease.release()
    return rollback, batches


def _check_whole(checkpoint: Path) -> TrainState:
    manifest = load_manifest(checkpoint)
    for file in manifest.files:
        problem = check_file(checkpoint / file.name, file)
        if problem is not None:
            where = str(checkpoint)
            raise CheckpointError(f"damaged: {problem}", where=where, fix="go back to another one")
    return TrainState.from_json(manifest.state, str(checkpoint))


def agree_on_skips(run: RunDir, record: dict[str, Any], state: TrainState, is_main: bool) -> SkipRanges:
    """Returns the ranges of run.json and of a checkpoint, and writes them to run.json.

    Raises: ConfigError, where run.json is damaged; DiskError.
    """
    recorded = read_skips(run, record)
    skips = SkipRanges.of([*recorded.ranges, *state.skips])
    if skips != recorded and is_main:
        change_record(run, lambda record: record.update(skips=[list(pair) for pair in skips.ranges]))
    return skips
