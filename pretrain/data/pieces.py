"""A document as what is encoded: its split, its sides, and pieces of these that are not too long.

    Document -> divide -> [(split, [Span])] -> cut_document -> Piece, Piece, ... (the last one ends the document)

text       one span, or one in each split
pairs      the source, then the target
records    one span a segment
classes    one span
tags       one span, which is not cut: its labels tell places in it
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pretrain.data.documents import Document, Label
from pretrain.data.split import SplitRule
from pretrain.data.tokenizer import PIECE_CHARS, cut_text


@dataclass(frozen=True, slots=True)
class Span:
    """Text of a document that is encoded by itself.

    Attributes:
        text: Its characters.
        is_source: It is the source of a pair.
        is_learned: Its tokens are learned.
        labels: Of a labelled document.
    """

    text: str
    is_source: bool = False
    is_learned: bool = True
    labels: tuple[Label, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one document's text, encoded in one go.

    Attributes:
        split: Where the document goes.
        text: Its characters.
        is_last: The document ends with it.
        consumed_bytes: Input bytes to report when it is done.
        is_source: It is of the source of a pair.
        is_learned: Its tokens are learned.
        labels: Of the document, with its first piece.
    """

    split: str
    text: str
    is_last: bool
    consumed_bytes: int
    is_source: bool = False
    is_learned: bool = True
    labels: tuple[Label, ...] = ()


def document_key(document: Document) -> bytes:
    """Returns the bytes that make a document what it is: equal for two documents only if they are the same.

    Of a labelled one that is its text: whatever its label, it is not to be in both splits.
    """
    if document.source is not None:
        source = document.source.encode()
        return b"%d:%b%b" % (len(source), source, document.utf8)
    if document.segments:
        parts = ((text.encode(), is_learned) for text, is_learned in document.segments)
        return b"".join(b"%d%c%b" % (len(text), b"=" if is_learned else b":", text) for text, is_learned in parts)
    return document.utf8


def divide(document: Document, rule: SplitRule) -> list[tuple[str, list[Span]]]:
    """Returns the splits that a document which is not empty goes to, with its spans there."""
    if document.source is not None:
        spans = [Span(document.source, is_source=True), Span(document.text)]
    elif document.segments:
        spans = [Span(text, is_learned=is_learned) for text, is_learned in document.segments]
    elif document.labels:
        spans = [Span(document.text, labels=document.labels)]
    elif document.split is None:
        return [(split, [Span(side)]) for split, side in rule.divide(document.text, document.utf8)]
    else:
        spans = [Span(document.text)]
    return [(document.split or rule.split_of(document_key(document)), spans)]


def cut_document(spans: list[Span], split: str, cut_long: bool, consumed_bytes: int) -> Iterator[Piece]:
    """Yields the pieces of a document's spans, at least one; the first tells the bytes that the document took.

    Args:
        spans: At least one.
        split: Where they go.
        cut_long: The tokenizer allows `cut_text`; without, a span is a piece.
        consumed_bytes: Of the input.
    """
    for number, span in enumerate(spans, 1):
        ends = number == len(spans)
        if not cut_long or len(span.text) <= PIECE_CHARS:
            yield Piece(split, span.text, ends, consumed_bytes, span.is_source, span.is_learned, span.labels)
            consumed_bytes = 0
            continue
        cuts = list(cut_text(span.text))
        for place, text in enumerate(cuts, 1):
            last, labels = ends and place == len(cuts), span.labels if place == 1 else ()
            yield Piece(split, text, last, consumed_bytes, span.is_source, span.is_learned, labels)
            consumed_bytes = 0
