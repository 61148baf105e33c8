"""The shards of one part in one split: opened at the first document, a new one every `shard_tokens`."""

from collections import Counter
from pathlib import Path

import numpy as np

from pretrain.prepare.lengths import Lengths
from pretrain.rows import IGNORE_INDEX
from pretrain.shards.index import ShardIndex
from pretrain.shards.ragged import TokenDocuments
from pretrain.shards.writer import ShardWriter
from pretrain.utils.io import make_dir


class SplitWriter:
    """Writes SPLIT/STEM-0000.tar, -0001.tar, ... Memory: one member."""

    def __init__(self, folder: Path, stem: str, dtype: str, kind: str, shard_tokens: int) -> None:
        """Starts with no shard. What was written so far is in `lengths`, `source_lengths`, `num_learned`, `labels`.

        Args:
            folder: DIR/SPLIT; made when there is something to write.
            stem: Of the shards' names.
            dtype: `uint16` or `uint32`.
            kind: What a document is.
            shard_tokens: A shard is closed at the first document end at or past this many tokens.

        Raises:
            DiskError: From every method.
        """
        self._folder, self._stem, self._dtype, self._kind = folder, stem, dtype, kind
        self._shard_tokens = shard_tokens
        self._shards: list[ShardIndex] = []
        self._open: ShardWriter | None = None
        self.lengths, self.source_lengths, self.num_learned = Lengths(), Lengths(), 0
        self.labels = Counter[int]()

    def add(self, documents: TokenDocuments) -> int:
        """Appends documents, their ends included; returns how many have no tokens, of pairs on one of the sides.

        Those are not written: a tokenizer may drop white space, and nothing need end a document.
        """
        has_tokens = documents.tokens.lengths > 0
        if documents.source is not None:
            has_tokens &= documents.source.lengths > 0
        num_empty = int(np.count_nonzero(~has_tokens))
        if num_empty:
            documents = documents.select(has_tokens)
        self._count(documents)
        while documents.num_documents:
            if self._open is None:
                make_dir(self._folder)
                path = self._folder / f"{self._stem}-{len(self._shards):04d}.tar"
                self._open = ShardWriter(path, self._dtype, kind=self._kind)
            num_fitting = documents.tokens.count_up_to(self._shard_tokens - self._open.num_tokens)
            self._open.add(documents.slice(0, num_fitting))
            documents = documents.slice(num_fitting, documents.num_documents)
            if self._open.num_tokens >= self._shard_tokens:
                self._close_shard()
        return num_empty

    def _count(self, documents: TokenDocuments) -> None:
        self.lengths.add(documents.tokens.lengths)
        if documents.source is not None:
            self.source_lengths.add(documents.source.lengths)
        if documents.loss is not None:
            self.num_learned += int(np.count_nonzero(documents.loss))
        if documents.labels is not None:
            self.labels.update(documents.labels[documents.labels != IGNORE_INDEX].tolist())

    def close(self) -> list[ShardIndex]:
        """Commits the last shard; returns all of them."""
        self._close_shard()
        return self._shards

    def discard(self) -> None:
        """Gives up the shard that is still open, if any."""
        if self._open is not None:
            self._open.discard()

    def _close_shard(self) -> None:
        if self._open is not None:
            self._shards.append(self._open.close())
            self._open = None
