"""Documents of shards, put together of pieces: tokens, what begins and ends them, and what lies beside the tokens.

    [Piece] -> encoded, a batch at a time -> after those of a document not yet ended -> TokenDocuments of each split

Everything is done for a batch at a time, but for labels. Memory: one document and one batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, compress

import numpy as np

from pretrain.prepare.labelling import LabelSet, first_tokens, number_tokens
from pretrain.prepare.pieces import Piece
from pretrain.prepare.split import SPLITS
from pretrain.shards.index import LABELLED
from pretrain.shards.ragged import Ragged, TokenDocuments, concatenate
from pretrain.tokenizer import Encoder


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Pieces, their tokens with what begins and ends a text, and of tags the first token of each label, a row each."""

    pieces: list[Piece]
    tokens: Ragged
    places: list[np.ndarray] = field(default_factory=list)

    def slice(self, start: int, stop: int) -> "_Encoded":
        return _Encoded(self.pieces[start:stop], self.tokens.slice(start, stop), self.places[start:stop])


class Assembler:
    """Makes documents of pieces that come in batches."""

    def __init__(self, encoder: Encoder, kind: str, end_of_document: bool, labels: LabelSet | None) -> None:
        """Starts between two documents.

        Args:
            encoder: Encodes the pieces; has the tokens that begin labelled documents and that end all.
            kind: What a document is.
            end_of_document: A document, and a source, ends with that token; learned if what it follows is.
            labels: Of labelled documents.
        """
        self._encoder, self._kind, self._labels = encoder, kind, labels
        self._begin = encoder.bos if kind in LABELLED else encoder.bos[:0]
        self._end = encoder.eos if end_of_document else encoder.eos[:0]
        self._unended: list[_Encoded] = []

    def add(self, batch: list[Piece]) -> Iterator[tuple[str, TokenDocuments]]:
        """Encodes a batch and yields the documents that end in it, of each split where there are any, in order.

        Raises:
            DataError: A label is unknown.
        """
        encoded = self._encode(batch)
        stop = len(batch)
        while stop and not batch[stop - 1].is_last:
            stop -= 1
        if not stop:
            self._unended.append(encoded)
            return
        ended = [*self._unended, encoded.slice(0, stop)]
        self._unended = [encoded.slice(stop, len(batch))] if stop < len(batch) else []
        yield from self._divide(_join(ended))

    def _encode(self, pieces: list[Piece]) -> _Encoded:
        texts = [piece.text for piece in pieces]
        places: list[np.ndarray] = []
        if self._kind == "tags":
            tokens, offsets = self._encoder.encode_placed(texts)
            firsts = (first_tokens(piece.labels, own) for piece, own in zip(pieces, offsets, strict=True))
            begin, both = len(self._begin), len(self._begin) + len(self._end)
            # Of a word that the tokenizer left nothing of, behind the document.
            places = [
                first + np.where(first < num, begin, both) for first, num in zip(firsts, tokens.lengths, strict=True)
            ]
        else:
            markers = [number for number, piece in enumerate(pieces) if piece.is_marker]
            tokens = self._encoder.encode(texts, markers)
        if len(self._begin):
            tokens = _insert(tokens, np.array([bool(piece.labels) for piece in pieces]), self._begin, at_end=False)
        if len(self._end):
            tokens = _insert(tokens, np.array([piece.ends for piece in pieces]), self._end, at_end=True)
        return _Encoded(pieces, tokens, places)

    def _divide(self, encoded: _Encoded) -> Iterator[tuple[str, TokenDocuments]]:
        splits = np.array([SPLITS.index(piece.split) for piece in encoded.pieces])
        for number, split in enumerate(SPLITS):
            is_own = splits == number
            if is_own.all():
                yield split, self._assemble(encoded)
            elif is_own.any():
                pieces, places = list(compress(encoded.pieces, is_own)), list(compress(encoded.places, is_own))
                yield split, self._assemble(_Encoded(pieces, encoded.tokens.select(is_own), places))

    def _assemble(self, encoded: _Encoded) -> TokenDocuments:
        """Returns the documents that whole documents' pieces make."""
        pieces, tokens = encoded.pieces, encoded.tokens
        ends = np.array([piece.ends for piece in pieces])
        if self._kind == "pairs":
            is_source = np.array([piece.is_source for piece in pieces])
            target, source = (tokens.select(side).join(ends[side]) for side in (~is_source, is_source))
            return TokenDocuments(target, source=source)
        documents = tokens.join(ends)
        if self._kind == "records":
            is_learned = np.array([piece.is_learned for piece in pieces], np.uint8)
            return TokenDocuments(documents, loss=np.repeat(is_learned, tokens.lengths))
        if self._kind in LABELLED:
            return TokenDocuments(documents, labels=self._number(encoded, documents.lengths, ends))
        return TokenDocuments(documents)

    def _number(self, encoded: _Encoded, lengths: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Returns the number of each token's label, int16."""
        assert self._labels is not None, "labels are known before parts are written"
        rows = []
        for first, length in zip((0, *(np.flatnonzero(ends)[:-1] + 1)), lengths, strict=True):
            piece, places = encoded.pieces[first], encoded.places[first] if encoded.places else None
            rows.append(number_tokens(piece.labels, places, int(length), self._labels, piece.split, piece.text))
        return np.concatenate(rows)


def _insert(tokens: Ragged, is_given: np.ndarray, extra: np.ndarray, *, at_end: bool) -> Ragged:
    """Gives some arrays, by a bool for each, one more token: their first, or their last."""
    stops = np.cumsum(tokens.lengths)
    places = stops if at_end else stops - tokens.lengths
    return Ragged(np.insert(tokens.values, places[is_given], extra), tokens.lengths + is_given)


def _join(parts: list[_Encoded]) -> _Encoded:
    pieces = list(chain.from_iterable(part.pieces for part in parts))
    places = list(chain.from_iterable(part.places for part in parts))
    return _Encoded(pieces, concatenate([part.tokens for part in parts]), places)
