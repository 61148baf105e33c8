"""What saves and removals that were cut off have left, removed while whoever began them may yet wake up."""

from pathlib import Path

from pretrain.errors import DiskError
from pretrain.utils.io import remove_dir, remove_tree


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
