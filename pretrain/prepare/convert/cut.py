"""Chunks of tokens and the positions at which documents begin -> documents."""

from collections.abc import Iterable, Iterator

import numpy as np

from pretrain.errors import DataError
from pretrain.shards.writer import MAX_DOCUMENT_TOKENS

Chunk = tuple[int, np.ndarray, np.ndarray]
"""Position of the first token, tokens, and positions (ascending, in [position, position + length]) where one document
ends and the next begins. Position 0 is not among them, a document begins there anyway."""


def cut_documents(chunks: Iterable[Chunk], first: int, last: int, where: str) -> Iterator[np.ndarray]:
    """Yields the documents that begin in [first, last).

    Args:
        chunks: Consecutive, from a position at or before `first` that is past every boundary before `first`; to the
            end of the file. No more are taken than are needed.
        first: Documents that begin before are others'.
        last: Documents that begin here or later are others'.
        where: File, for messages.

    Raises:
        DataError: A document is larger than a shard can hold.
    """
    if first >= last:
        return
    pending: list[np.ndarray] = []
    num_pending, is_begun = 0, first == 0
    for position, tokens, cuts in chunks:
        taken = 0
        for cut in (cuts - position).tolist():
            if is_begun:
                yield _join([*pending, tokens[taken:cut]])
            pending, num_pending, taken, is_begun = [], 0, cut, True
            if position + cut >= last:
                return
        if is_begun:
            pending.append(tokens[taken:])
            num_pending += len(tokens) - taken
        elif position + len(tokens) >= last:
            return
        if num_pending > MAX_DOCUMENT_TOKENS:
            raise DataError(
                f"no end of a document in {MAX_DOCUMENT_TOKENS} tokens before position {position + len(tokens)}",
                where=where,
                fix="give the token that separates its documents",
            )
    if num_pending:
        yield _join(pending)


def _join(pieces: list[np.ndarray]) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def find_cuts(tokens: np.ndarray, position: int, eos_id: int, at_start: bool) -> np.ndarray:
    """Returns the positions at which documents begin in a chunk: after each `eos_id`, or `at_start` at it; not 0."""
    cuts = np.flatnonzero(tokens == eos_id) + position + (not at_start)
    return cuts[1:] if len(cuts) and cuts[0] == 0 else cuts
