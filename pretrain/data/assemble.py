"""A document of shards, put together of its pieces: tokens, what begins and ends it, and what lies beside the tokens.

[Piece] -> encode_pieces -> [Encoded] -> assemble -> tokens, source, what is learned, labels
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pretrain.data.labelling import LabelSet, first_tokens, number_tokens
from pretrain.data.pieces import Piece
from pretrain.data.tokenizer import Encoder


class Encoded(NamedTuple):
    """A piece, its tokens, and of tags the first token of each of its labels."""

    piece: Piece
    tokens: np.ndarray
    places: np.ndarray | None = None


def encode_pieces(batch: list[Piece], encoder: Encoder, kind: str) -> Iterator[Encoded]:
    """Encodes pieces together; words are found where they have labels."""
    texts = [piece.text for piece in batch]
    if kind != "tags":
        yield from map(Encoded, batch, encoder.encode(texts))
        return
    for piece, (tokens, offsets) in zip(batch, encoder.encode_placed(texts), strict=True):
        yield Encoded(piece, tokens, first_tokens(piece.labels, offsets))


def assemble(
    pieces: list[Encoded], kind: str, begin: np.ndarray, end: np.ndarray, labels: LabelSet | None
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Returns the tokens of a document, those of its source, which tokens are learned (uint8), and labels (int16).

    Args:
        pieces: All of the document.
        kind: What it is.
        begin: Tokens that begin a labelled document.
        end: Tokens that end every document; learned if what they follow is.
        labels: Of labelled documents.

    Raises:
        DataError: A label is unknown.
    """
    ids = [part.tokens for part in pieces]
    if kind == "text":
        return np.concatenate([*ids, end]), None, None, None
    if kind == "pairs":
        sides = ([part.tokens for part in pieces if part.piece.is_source == is_source] for is_source in (False, True))
        target, source = (np.concatenate([*side, end]) for side in sides)
        return target, source, None, None
    if kind == "records":
        lengths = [*map(len, ids), len(end)]
        flags = np.array([*(part.piece.is_learned for part in pieces), pieces[-1].piece.is_learned], np.uint8)
        return np.concatenate([*ids, end]), None, np.repeat(flags, lengths), None
    assert labels is not None, "labels are known before parts are written"
    tokens, first = np.concatenate([begin, *ids, end]), pieces[0]
    places = None
    if first.places is not None:
        # Of a word that the tokenizer left nothing of, behind the document.
        places = np.where(first.places < len(first.tokens), first.places + len(begin), len(tokens))
    piece = first.piece
    return tokens, None, None, number_tokens(piece.labels, places, len(tokens), labels, piece.split, piece.text)
