"""Removal of leftovers and old checkpoints, and the marks of those that stay: the best, and bases of adapters.

best.json is a hint: a reader verifies the checkpoint that it names like any other.
"""

import hashlib
import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrain.checkpoint.format import MANIFEST, list_checkpoints, load_manifest, step_name, step_of
from pretrain.errors import CheckpointError, DiskError
from pretrain.utils.io import check_file, remove_dir, remove_tree, write_file, write_json
from pretrain.utils.log import printable
from pretrain.utils.safe_read import check_fields, read_json

log = logging.getLogger(__name__)

BEST = "best.json"
IN_USE = "in-use-{}.run"
"""A file in a checkpoint: the folder of another run, which cannot be used without it."""
RISING = ("val_accuracy",)
"""Metrics of which more is better."""
MIN_VALID = 2
"""Number of verified checkpoints that always remain."""


def remove_leftovers(folder: Path) -> None:
    """Removes unfinished checkpoints and removals from a folder of checkpoints. Raises: DiskError.

    An earlier owner may be a stopped process. If it is continued later, in a save or right before
    the rename of a commit, its temporary folder is gone, and it fails.
    """
    for leftover in folder.glob(".tmp-*"):
        try:
            remove_dir(leftover)
        except DiskError as error:
            # Where it is gone, its owner was continued, and has committed it.
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
    for leftover in folder.glob(".trash-*"):
        remove_tree(leftover)


def mark_in_use(checkpoint: Path, run: Path) -> None:
    """Keeps a checkpoint from removal for another run. Raises: DiskError."""
    content = os.fsencode(run.resolve())
    mark = checkpoint / IN_USE.format(hashlib.sha256(content).hexdigest()[:16])
    if not mark.is_file():
        write_file(mark, content)


def find_marks(checkpoint: Path) -> list[Path]:
    """Returns the marks of the runs that need a checkpoint.

    A run that is not where its mark says may have been moved: only the removal of the mark lets a
    checkpoint go.
    """
    return list(checkpoint.glob(IN_USE.format("*")))


@dataclass(frozen=True, slots=True)
class Best:
    """Content of best.json: validation metric, its value, and the step of the checkpoint."""

    metric: str
    value: float
    step: int


def read_best(folder: Path) -> Best | None:
    """Reads best.json of a folder of checkpoints; None without it or its checkpoint."""
    try:
        raw = check_fields(read_json(folder / BEST), {"metric": str, "step": int})
        best = Best(str(raw["metric"]), float(raw["value"]), int(raw["step"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return best if (folder / step_name(best.step) / MANIFEST).is_file() else None


class BestKeeper:
    """Finds the best checkpoint of a folder by a metric of the logs, in one process."""

    def __init__(self, folder: Path, metric: str) -> None:
        self._folder = folder
        self._metric = metric
        self._values: dict[int, float] = {}

    def note(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Notes the evaluation of a step; without the metric, the step is no candidate."""
        value = metrics.get(self._metric)
        self._values.pop(step, None)
        if value is not None and math.isfinite(value):
            self._values[step] = value

    def rank(self) -> list[int]:
        """Returns the steps whose evaluation is known, best first, the earlier of equals first."""
        sign = -1 if self._metric in RISING else 1
        return sorted(self._values, key=lambda step: (sign * self._values[step], step))

    def settle(self, found: list[Path], is_valid: Callable[[Path], bool]) -> Path | None:
        """Returns the best of the committed checkpoints, the earliest of equals; updates best.json.

        Those without an evaluation at their step take no part. `is_valid` is asked from the best
        on.
        """
        paths = {step_of(path): path for path in found}
        before = dict(self._values)
        marked = read_best(self._folder)
        if marked is not None and marked.metric == self._metric:
            before.setdefault(marked.step, marked.value)
        sign = -1 if self._metric in RISING else 1
        for step in sorted(before.keys() & paths.keys(), key=lambda step: (sign * before[step], step)):
            if not is_valid(paths[step]):
                continue
            best = Best(self._metric, before[step], step)
            if best != marked:
                try:
                    write_json(self._folder / BEST, asdict(best))
                    log.info("%s is the best so far: %s %.6g", step_name(step), best.metric, best.value)
                except DiskError as error:  # the checkpoint is kept all the same
                    log.warning("%s", error)
            return paths[step]
        return None


def find_obsolete(found: list[Path], keep: int, keep_every_steps: int, is_valid: Callable[[Path], bool]) -> list[Path]:
    """Returns checkpoints older than the `keep` newest, and than the `MIN_VALID` newest valid ones.

    A damaged one among these does not count, and stays; loading renames it. Only as many are
    verified as needed, as `is_valid` may read all of one. Those of steps that are a multiple of
    `keep_every_steps` stay. `found` is ascending.
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
    """Removes old checkpoints after a newer one was committed and read back, in one process."""

    def __init__(self, folder: Path, keep: int, keep_every_steps: int, best: BestKeeper | None = None) -> None:
        assert keep >= MIN_VALID
        self._folder = folder
        self._keep = keep
        self._every = keep_every_steps
        self._best = best
        self._valid: dict[str, bool] = {}
        self._told: set[Path] = set()
        self.uploading: Path | None = None
        """A checkpoint that stays until its upload has ended."""

    def note_valid(self, path: Path) -> None:
        """Notes a verified checkpoint, which is not read again."""
        self._valid[path.name] = True

    def rank_evaluated(self) -> list[int]:
        """Returns the evaluated steps, best first; none without a metric of the best."""
        return [] if self._best is None else self._best.rank()

    def _is_valid(self, path: Path) -> bool:
        if path.name not in self._valid:
            try:
                files = load_manifest(path).files
                self._valid[path.name] = all(check_file(path / record.name, record) is None for record in files)
            except CheckpointError:
                self._valid[path.name] = False
        return self._valid[path.name]

    def apply(self) -> None:
        """Removes obsolete checkpoints; a disk error is a warning: the new one is valid."""
        checkpoints = list_checkpoints(self._folder)
        best = None if self._best is None else self._best.settle(checkpoints, self._is_valid)
        for path in find_obsolete(checkpoints, self._keep, self._every, self._is_valid):
            marks = find_marks(path)
            self._tell_of_missing(marks)
            if path in (best, self.uploading) or marks:
                continue
            try:
                remove_dir(path)
            except DiskError as error:
                log.warning("%s", error)

    def _tell_of_missing(self, marks: list[Path]) -> None:
        """Says once which runs keep a checkpoint and are not where they were."""
        for mark in marks:
            with suppress(OSError):
                user = Path(os.fsdecode(mark.read_bytes()))
                if mark not in self._told and not user.is_dir():
                    text = "%s is kept for %s, which is not there: if it is not moved but gone, remove %s"
                    log.warning(text, mark.parent.name, printable(str(user)), mark)
                    self._told.add(mark)
