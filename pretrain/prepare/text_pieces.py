"""Pieces of documents for the encoder: by split and side, and cut where they are long.

    Document -> divide -> [TextPiece], a span each -> cut_piece -> TextPiece, ... (the last one ends the document)

text       one span, or one in each split
pairs      the source, then the target
records    one span a segment
classes    one span
tags       one span, which is not cut: its labels have offsets in it
"""

from collections.abc import Iterator
from typing import NamedTuple

from pretrain.prepare.filters import Document, Label
from pretrain.prepare.split import SplitRule
from pretrain.tokenizer import cut_text


class TextPiece(NamedTuple):
    """A run of one document's text, encoded in one go. A tuple, because it is made for each document.

    Attributes:
        split: Split of the document.
        text: Characters.
        ends: True: the document ends with it, or the source of a pair.
        consumed_bytes: Input bytes to report when it is done.
        is_source: True: it belongs to the source of a pair, which comes before the target.
        is_learned: True: its tokens have a loss.
        labels: Labels of the document, with its first piece.
        is_marker: True: a template wrote it, and its special tokens are meant.
    """

    split: str
    text: str
    ends: bool
    consumed_bytes: int
    is_source: bool = False
    is_learned: bool = True
    labels: tuple[Label, ...] = ()
    is_marker: bool = False

    @property
    def is_last(self) -> bool:
        """True for the last piece of a document."""
        return self.ends and not self.is_source


def document_key(document: Document) -> bytes:
    """Returns the identity of a document: equal for two documents only if they are the same.

    For a labelled one that is its text: with another label, it must not be in the other split.
    """
    if document.source is not None:
        source = document.source.encode()
        return b"%d:%b%b" % (len(source), source, document.utf8)
    if not document.segments:
        return document.utf8
    key = bytearray()
    for text, is_learned in document.segments:
        utf8 = text.encode()
        key += b"%d%c%b" % (len(utf8), b"=" if is_learned else b":", utf8)
    return bytes(key)


def divide(document: Document, rule: SplitRule) -> list[TextPiece]:
    """Returns the pieces of a document that is not empty, one a span; with `tail`, of two documents."""
    consumed = document.consumed_bytes
    if rule.kind == "tail" and document.split is None:
        sides = rule.divide(document.text, document.utf8)
        pieces = [TextPiece(split, side, True, 0) for split, side in sides]
        return [pieces[0]._replace(consumed_bytes=consumed), *pieces[1:]]
    split = document.split or rule.split_of(document_key(document))
    if document.source is not None:
        return [
            TextPiece(split, document.source, True, consumed, is_source=True),
            TextPiece(split, document.text, True, 0),
        ]
    if not document.segments:
        return [TextPiece(split, document.text, True, consumed, labels=document.labels)]
    last = len(document.segments) - 1
    return [
        TextPiece(
            split,
            text,
            number == last,
            0 if number else consumed,
            is_learned=is_learned,
            is_marker=number in document.markers,
        )
        for number, (text, is_learned) in enumerate(document.segments)
    ]


def cut_piece(piece: TextPiece) -> Iterator[TextPiece]:
    """Yields a piece in pieces of about PIECE_CHARS, where the tokenizer allows `cut_text`."""
    first, *others = cut_text(piece.text)
    yield piece._replace(text=first, ends=piece.ends and not others)
    for number, text in enumerate(others, 1):
        is_end = piece.ends and number == len(others)
        yield piece._replace(text=text, ends=is_end, consumed_bytes=0, labels=())
