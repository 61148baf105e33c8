"""How full rows are, and what packing costs the documents: measured on their lengths alone."""

from dataclasses import dataclass

import numpy as np

from pretrain.data.bins import pack_documents, pack_pairs


@dataclass(frozen=True, slots=True)
class Packing:
    """Rows of one length.

    Attributes:
        seq_len: T; of pairs also S.
        concat_cut: Part of the documents that concat cuts, 0 to 1; its rows are always full. None: not text.
        bins_full: Part of the rows of bins that is not padding, 0 to 1; of pairs, of the target rows.
        bins_cut: Part of the documents that are longer than a row: cut, or, of pairs, left out.
        bins_source_full: Of pairs: as `bins_full`, of the source rows.
    """

    seq_len: int
    concat_cut: float | None
    bins_full: float
    bins_cut: float
    bins_source_full: float | None


class Packer:
    """Packs the shards of a split into rows of one length.

    Args:
        seq_len: T; of pairs also S.
        kind: Of the data.
    """

    def __init__(self, seq_len: int, kind: str) -> None:
        self._seq_len, self._kind = seq_len, kind
        self._documents = self._cut = self._too_long = self._rows = self._tokens = self._source_tokens = 0

    def add(self, lengths: np.ndarray, sources: np.ndarray | None) -> None:
        """Packs the documents of a shard."""
        room = self._seq_len
        ends = lengths.cumsum()
        self._documents += len(lengths)
        self._cut += int(((ends - lengths) // room != (ends - 1) // room).sum())
        if sources is None:
            bins = pack_documents(lengths, room)
            self._too_long += int((lengths > room).sum())
        else:
            bins = pack_pairs(sources, lengths, room, room)
            self._too_long += int(((lengths > room) | (sources > room)).sum())
            self._source_tokens += int(sources[bins.document].sum())
        self._rows += len(bins)
        self._tokens += int(bins.length.sum())

    def result(self) -> Packing:
        """Returns what was found."""
        room = max(self._rows * self._seq_len, 1)
        return Packing(
            seq_len=self._seq_len,
            concat_cut=self._cut / self._documents if self._kind == "text" else None,
            bins_full=self._tokens / room,
            bins_cut=self._too_long / self._documents,
            bins_source_full=self._source_tokens / room if self._kind == "pairs" else None,
        )
