"""What the ranks tell each other about a save, so that all go on alike or fail alike."""

from collections.abc import Callable
from typing import Any

from pretrain import dist
from pretrain.errors import CheckpointError, DiskError, LockedError, PretrainError

KINDS: dict[str, type[PretrainError]] = {kind.__name__: kind for kind in (LockedError, CheckpointError, DiskError)}
"""Errors that travel between ranks; where several ranks fail, the kind that comes first here is raised."""


def agree(outcome: Callable[[], Any]) -> list[Any]:
    """Returns what `outcome` returned on every rank, by rank. Collective.

    Args:
        outcome: Returns something JSON-able, or raises. An error that is none of the user's is raised here and now, and
            ends this rank.

    Raises:
        PretrainError: It raised on some rank; the same one on every rank.
    """
    value: Any = None
    failure: dict[str, str] | None = None
    try:
        value = outcome()
    except PretrainError as error:
        kind = next((name for name, known in KINDS.items() if isinstance(error, known)), None)
        if kind is None:
            raise
        failure = {"kind": kind, "what": error.what, "where": error.where, "fix": error.fix}
    votes = dist.gather_objects([value, failure])
    failures = [failure for _, failure in votes if failure is not None]
    for name, known in KINDS.items():
        for failure in failures:
            if failure["kind"] == name:
                raise known(failure["what"], where=failure["where"], fix=failure["fix"])
    return [value for value, _ in votes]


def nothing() -> None:
    """The part of a rank that has none."""
