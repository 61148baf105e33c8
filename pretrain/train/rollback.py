"""Goes back to an earlier checkpoint of a run, and leaves out the samples that came after it.

    run.json       "skips": [[from, to], ...]     ranges of positions of the data order, for good (data/order.py)
                   "rollbacks": [{...}, ...]      each time that the run went back, by command or by itself
    checkpoints/   step-N.rolled-back             what is newer: set aside, never removed

The order in which it is written makes every moment a state to go on from: checkpoints are set aside newest first, then
the range is recorded. Whoever is stopped in between says the same again. The ledger and the metrics are rewound by the
next start, as after a crash. Each checkpoint holds the ranges too, so that neither is lost with the other.

Loss spikes are met like this by hand in PaLM (Chowdhery et al. 2022, section 5.1): back to some 100 steps before the
spike, and on without the 200 to 500 batches that were around it. Imports no torch.
"""

import logging
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
from pretrain.run.folder import RunDir, change_record
from pretrain.run.lease import Lease
from pretrain.utils.checksum import check_file

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rollback:
    """Where a run goes back to.

    Attributes:
        to: Step of the checkpoint that it goes on from.
        first: Position of the first sample that is left out.
        end: Position behind the last one; `first` where none is.
        automatic: Whether a spike led to it, and not a command.
        set_aside: Names of the checkpoints that were newer.
        at: When, UTC.
    """

    to: int
    first: int
    end: int
    automatic: bool
    set_aside: tuple[str, ...]
    at: str


def read_skips(run: RunDir, record: dict[str, Any]) -> SkipRanges:
    """Returns the ranges in run.json. Raises: ConfigError: They are none."""
    try:
        return SkipRanges.of(record.get("skips", []))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"skips: {error}", where=str(run.record), fix="restore the file") from None


def plan_rollback(
    state: TrainState, skips: SkipRanges, num_samples: int, *, automatic: bool = False, set_aside: Sequence[str] = ()
) -> Rollback:
    """Returns what going back to a checkpoint means, where samples that would come next are left out.

    Args:
        state: The state in it.
        skips: Ranges that are left out already; these samples are not counted again.
        num_samples: To leave out.
        automatic: See `Rollback`.
        set_aside: See `Rollback`.
    """
    place = skips.place_of(state.position)
    first = skips.position_of(place)
    end = skips.position_of(place + num_samples - 1) + 1 if num_samples else first
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Rollback(state.step, first, end, automatic, tuple(set_aside), now)


def record_rollback(run: RunDir, rollback: Rollback, skips: SkipRanges) -> SkipRanges:
    """Writes a rollback to run.json; returns all ranges that the run leaves out now. Raises: DiskError."""
    if rollback.end > rollback.first:
        skips = SkipRanges.of([*skips.ranges, (rollback.first, rollback.end)])

    def note(record: dict[str, Any]) -> None:
        record["skips"] = [list(pair) for pair in skips.ranges]
        record.setdefault("rollbacks", []).append(asdict(rollback))

    change_record(run, note)
    return skips


def roll_back(path: Path, to: int, *, samples: int | None = None, tokens: int | None = None) -> tuple[Rollback, int]:
    """Makes the next start of a run go on from an earlier checkpoint, without the samples that came then.

    Args:
        path: The run folder.
        to: Step of the checkpoint.
        samples: To leave out; rounded up to whole global batches. Or
        tokens: To leave out, padding counted; likewise. 0: none.

    Returns:
        What was done, and how many global batches are left out.

    Raises:
        ConfigError: There is no run here.
        CheckpointError: It has no such checkpoint, or not whole.
        LockedError: The run is in use.
        DiskError: The disk refused; saying the same again goes on.
    """
    run = RunDir(path)
    run.read_record()
    lease = Lease(run.lease)
    try:
        batch = BatchConfig.model_validate(read_yaml(run.config).values["batch"])
        found = {step_of(checkpoint): checkpoint for checkpoint in list_checkpoints(run.checkpoints)}
        if to not in found:
            listed = ", ".join(str(step) for step in found) or "none"
            raise CheckpointError(
                f"no committed checkpoint of step {to}; there is {listed}",
                where=str(run.checkpoints),
                fix="give one of these as --to",
            )
        state = _check_whole(found[to])
        batches = -(-samples // batch.rows) if samples is not None else -(-(tokens or 0) // batch.global_tokens)
        skips = SkipRanges.of([*read_skips(run, run.read_record()).ranges, *state.skips])
        names = [checkpoint.name for step, checkpoint in found.items() if step is not None and step > to]
        rollback = plan_rollback(state, skips, batches * batch.rows, set_aside=names)
        for name in reversed(names):
            set_aside(run.checkpoints / name, "rolled-back")
        lease.check()
        record_rollback(run, rollback, skips)
    finally:
        lease.release()
    return rollback, batches


def _check_whole(checkpoint: Path) -> TrainState:
    """Reads all of a checkpoint: what is newer must not be set aside for one that will not be loaded."""
    manifest = load_manifest(checkpoint)
    for file in manifest.files:
        problem = check_file(checkpoint / file.name, file)
        if problem is not None:
            raise CheckpointError(f"damaged: {problem}", where=str(checkpoint), fix="go back to another one")
    return TrainState.from_json(manifest.state, str(checkpoint))


def agree_on_skips(run: RunDir, record: dict[str, Any], state: TrainState, is_main: bool) -> SkipRanges:
    """Returns what a starting attempt leaves out: what run.json and its checkpoint say. Rank 0 writes it to run.json.

    Raises:
        ConfigError: The ranges in run.json are none.
        DiskError: run.json cannot be written.
    """
    recorded = read_skips(run, record)
    skips = SkipRanges.of([*recorded.ranges, *state.skips])
    if skips != recorded and is_main:
        change_record(run, lambda record: record.update(skips=[list(pair) for pair in skips.ranges]))
    return skips
