"""What a tokenizer is trained on: text of the training split, spread over the whole input, the same on every run."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pretrain.errors import DataError
from pretrain.prepare.filters import FilterRule, select
from pretrain.prepare.pieces import divide
from pretrain.prepare.progress import Progress
from pretrain.prepare.readers.reader import Reader
from pretrain.prepare.sources import Part
from pretrain.prepare.split import TRAIN, SplitRule


def train_texts(
    parts: Sequence[Part],
    reader: Reader,
    rule: SplitRule,
    filters: FilterRule,
    first_of: Callable[[Part], np.ndarray | None],
    sample_bytes: int | None,
    progress: Progress,
) -> Iterator[str]:
    """Yields training text: the beginning of each part, in proportion to its size; both sides of pairs.

    Args:
        parts: The whole input.
        reader: Reads it.
        rule: The split; what it holds out is not seen here either.
        filters: What they leave out is not seen.
        first_of: Of a part, which documents came first (see `select`); the others are not seen.
        sample_bytes: About how much text in all, UTF-8. None: all of it.
        progress: Called after each part.

    Raises:
        DataError: There is none, or malformed input.
    """
    total_bytes = sum(part.num_bytes for part in parts)
    done_bytes = num_documents = 0
    for part in parts:
        room = sys.maxsize if sample_bytes is None else -(-sample_bytes * part.num_bytes // total_bytes)
        for document in select(reader.read(part.slices), filters, first_of(part), Counter()):
            pieces = [piece for piece in divide(document, rule) if piece.split == TRAIN]
            if pieces:
                yield from (piece.text[:room] for piece in pieces if piece.text)
                num_documents += 1
                room -= len(document.utf8) + len((document.source or "").encode())
            if room <= 0:
                break
        done_bytes += part.num_bytes
        progress("reading for the tokenizer", done_bytes, total_bytes, num_documents)
    if not num_documents:
        raise DataError("there is no text to train on", fix="give more text, or hold out less with --split")
