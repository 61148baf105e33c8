"""Which checkpoints go when a newer one is committed and was read back."""

import logging
from collections.abc import Callable
from pathlib import Path

from pretrain.checkpoint.best import BestKeeper
from pretrain.checkpoint.layout import list_checkpoints, load_manifest, step_of
from pretrain.errors import CheckpointError, DiskError
from pretrain.utils.checksum import check_file
from pretrain.utils.io import remove_dir

log = logging.getLogger(__name__)

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
