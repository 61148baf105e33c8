"""What saves and removals that were cut off have left, removed while whoever began them may yet wake up."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrain.checkpoint.format import MANIFEST, list_checkpoints, load_manifest, step_name, step_of
from pretrain.errors import CheckpointError, DiskError
from pretrain.utils.checksum import check_file
from pretrain.utils.io import remove_dir, remove_tree, write_json


def remove_leftovers(folder: Path) -> None:
    """Removes unfinished checkpoints, and what is left of removed ones.

    An owner before us that still lives was stopped. Where it wakes up right before a commit, it finds nothing to
    commit; in the middle of a save, nothing to write into.

    Args:
        folder: Of checkpoints.

    Raises:
        DiskError: The disk refused.
    """
    for leftover in folder.glob(".tmp-*"):
        try:
            remove_dir(leftover)
        except DiskError as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # else it woke up before that: it is a checkpoint
                raise
    for leftover in folder.glob(".trash-*"):
        remove_tree(leftover)


# Which checkpoint is the best by a metric of validation: `checkpoints/best.json` names it, and
# retention keeps it.
#
#     evaluated at a step  ->  its metric is noted  ->  the step is committed, and read back  ->  best.json
#
# best.json is a mark, no promise: whoever follows it verifies the checkpoint that it names as any
# other.


log = logging.getLogger(__name__)

BEST = "best.json"

RISING = ("val_accuracy",)

"""Metrics of which more is better."""


@dataclass(frozen=True, slots=True)
class Best:
    """What best.json says.

    Attributes:
        metric: Of validation.
        value: Of the checkpoint.
        step: Names the checkpoint.
    """

    metric: str
    value: float
    step: int


def read_best(folder: Path) -> Best | None:
    """Returns what best.json says; None where there is none, it is damaged, or its checkpoint is gone or set aside.

    Args:
        folder: Of checkpoints.
    """
    try:
        raw = json.loads((folder / BEST).read_text(encoding="utf-8"))
        found = Best(str(raw["metric"]), float(raw["value"]), int(raw["step"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if (folder / step_name(found.step) / MANIFEST).is_file() else None


class BestKeeper:
    """Finds the best checkpoint of a folder; one process does.

    Args:
        folder: Of checkpoints.
        metric: As it is logged.
    """

    def __init__(self, folder: Path, metric: str) -> None:
        self._folder, self._metric = folder, metric
        self._values: dict[int, float] = {}

    def note(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Takes note of what an evaluation has found; without the metric, the step is not known to be good."""
        value = metrics.get(self._metric)
        self._values.pop(step, None)
        if value is not None and math.isfinite(value):
            self._values[step] = value

    def settle(self, found: list[Path], is_valid: Callable[[Path], bool]) -> Path | None:
        """Returns the best of some checkpoints, the earliest of equals, and writes best.json where it says another.

        Args:
            found: Committed checkpoints. Those that were not evaluated at their step take no part.
            is_valid: Whether one is good; asked from the best on, until one is.
        """
        paths = {step_of(path): path for path in found}
        known, marked = dict(self._values), read_best(self._folder)
        if marked is not None and marked.metric == self._metric:
            known.setdefault(marked.step, marked.value)
        sign = -1 if self._metric in RISING else 1
        for step in sorted(known.keys() & paths.keys(), key=lambda step: (sign * known[step], step)):
            if is_valid(paths[step]):
                self._mark(Best(self._metric, known[step], step), marked)
                return paths[step]
        return None

    def _mark(self, best: Best, marked: Best | None) -> None:
        """Writes best.json; where that fails, the checkpoint is kept no less, and it is only said."""
        if best == marked:
            return
        try:
            write_json(self._folder / BEST, asdict(best))
        except DiskError as error:
            log.warning("%s", error)
            return
        log.info("%s is the best so far: %s %.6g", step_name(best.step), best.metric, best.value)


# Which checkpoints go when a newer one is committed and was read back.


MIN_VALID = 2

"""Checkpoints known to be good that must be left, whatever else is there."""


def find_obsolete(found: list[Path], keep: int, keep_every_steps: int, is_valid: Callable[[Path], bool]) -> list[Path]:
    """Returns those to remove: older than the `keep` newest, and than the two newest good ones.

    A bad one among these is not counted, and stays for loading to set aside. Only as many are asked about as the two
    good ones need.

    Args:
        found: Committed checkpoints, oldest first.
        keep: How many stay.
        keep_every_steps: Those whose step is a multiple stay for good; 0: none.
        is_valid: Whether a checkpoint is good; may read all of it.
    """
    num_kept = num_valid = 0
    obsolete = []
    for path in reversed(found):
        if num_kept >= keep and num_valid >= MIN_VALID:
            if not keep_every_steps or (step_of(path) or 0) % keep_every_steps:
                obsolete.append(path)
        elif num_valid < MIN_VALID:
            is_good = is_valid(path)
            num_valid += is_good
            num_kept += is_good
        else:
            num_kept += 1
    return obsolete[::-1]


class Retention:
    """Removes old checkpoints of a folder; one process does.

    Args:
        folder: Of checkpoints.
        keep: Newest ones kept, at least 2.
        keep_every_steps: Those whose step is a multiple of it are never removed; 0: none.
        best: Finds the one that is not removed as long as none is better. None: none is.
    """

    def __init__(self, folder: Path, keep: int, keep_every_steps: int, best: BestKeeper | None = None) -> None:
        assert keep >= MIN_VALID
        self._folder, self._keep, self._every, self._best = folder, keep, keep_every_steps, best
        self._valid: dict[str, bool] = {}

    def note_valid(self, path: Path) -> None:
        """Takes note of a checkpoint that has been read and found good: it will not be read again."""
        self._valid[path.name] = True

    def _is_valid(self, path: Path) -> bool:
        if path.name not in self._valid:
            self._valid[path.name] = is_whole(path)
        return self._valid[path.name]

    def apply(self) -> None:
        """Removes what is to go; where that fails, what has been saved is no less good, and it is only said."""
        found = list_checkpoints(self._folder)
        best = None if self._best is None else self._best.settle(found, self._is_valid)
        for path in find_obsolete(found, self._keep, self._every, self._is_valid):
            if path == best:
                continue
            try:
                remove_dir(path)
            except DiskError as error:
                log.warning("%s", error)


def is_whole(path: Path) -> bool:
    """Returns whether manifest, sizes and CRCs of a checkpoint are right. Reads all of it."""
    try:
        return all(check_file(path / record.name, record) is None for record in load_manifest(path).files)
    except CheckpointError:
        return False
