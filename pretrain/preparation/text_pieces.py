"""Pieces of documents for the encoder, by split and side, cut where they are long, and joined again.

    Document -> `pieces` of its layout -> [TextPiece], a span each -> cut_piece -> TextPiece, ...
    batch of TextPiece -> Assembler: encoded, joined to documents with the arrays of their kind

text       one span, or one in each split
pairs      the source, then the target
records    one span a segment; of a chat template, the whole text
preferences  the spans of two records, of the chosen and of the rejected answer
feedback   those of a record
classes    one span
tags       one span, which is not cut: its labels have offsets in it
answers    the question, then the text, which is not cut either
choices    the spans of each choice: the question, then the answer
triples    the query, its positive, and each hard negative, which are not cut either
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from typing import NamedTuple

import numpy as np

from pretrain.errors import DataError
from pretrain.kinds.layouts import LAYOUTS
from pretrain.kinds.layouts.answers import ANSWER_BEGINS, ANSWER_ENDS
from pretrain.kinds.layouts.triples import group_marks
from pretrain.preparation.filters import Document, Label
from pretrain.preparation.labelling import LabelSet, first_tokens, number_tokens
from pretrain.preparation.split import SPLITS, SplitRule
from pretrain.rows import IGNORE_INDEX
from pretrain.shards.index import REJECTED
from pretrain.shards.ragged import RaggedArrays, TokenDocuments, concatenate
from pretrain.tokenizer.chat_template import ChatPart, join_segments
from pretrain.tokenizer.encoder import Encoder
from pretrain.tokenizer.roles import separator_ids, special_ids
from pretrain.tokenizer.words import cut_text

MAX_LOST = 8
MAX_LOST_CHARS = 20
MAX_SEARCHED = 64
"""Pieces of a part that are encoded once more, to find texts that became unknown tokens."""
_NO_MASK = np.empty(0, np.uint8)


class TextPiece(NamedTuple):
    """A run of one document's text, encoded in one go. A tuple, because there are many."""

    split: str
    text: str
    ends: bool  # the document, or the first of its two sides
    consumed_bytes: int  # input bytes to report when it is done
    is_source: bool = False  # of a pair, before the target; else, of several sides, all but the last
    is_learned: bool = True  # its tokens have a loss
    is_rejected: bool = False  # of the second side of a preference, or of an unwanted record
    labels: tuple[Label, ...] = ()  # with the first piece of a document
    is_marker: bool = False  # a template wrote it: its special tokens are meant
    begins: bool = False  # the document
    spans: tuple[tuple[int, int], ...] | None = None  # characters with a loss, of a chat template's text
    marks: tuple[int, ...] = ()  # of the first tokens of a text that is compared with others

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
    if document.rejected is not None:
        sides = (replace(document, rejected=None), document.rejected)
        return b"".join(b"%d:%b" % (len(key), key) for key in map(document_key, sides))
    if not document.segments:
        return document.utf8
    key = bytearray()
    for text, is_learned in document.segments:
        utf8 = text.encode()
        key += b"%d%c%b" % (len(utf8), b"=" if is_learned else b":", utf8)
    return bytes(key)


def _split_of(document: Document, rule: SplitRule) -> str:
    return document.split or rule.split_of(document_key(document))


def text_pieces(document: Document, rule: SplitRule) -> list[TextPiece]:
    """Returns the piece of a text that is not empty, or one a side of `tail`."""
    consumed = document.consumed_bytes
    if rule.kind == "tail" and document.split is None:
        sides = rule.divide(document.text, document.utf8)
        pieces = [TextPiece(split, side, True, 0, begins=True) for split, side in sides]
        return [pieces[0]._replace(consumed_bytes=consumed), *pieces[1:]]
    split = _split_of(document, rule)
    return [TextPiece(split, document.text, True, consumed, labels=document.labels, begins=True)]


def pair_pieces(document: Document, rule: SplitRule) -> list[TextPiece]:
    """Returns the source and the target of a pair."""
    split = _split_of(document, rule)
    source = TextPiece(split, document.source or "", True, document.consumed_bytes, is_source=True)
    return [source, TextPiece(split, document.text, True, 0)]


def answer_pieces(document: Document, rule: SplitRule) -> list[TextPiece]:
    """Returns a question and the text that has the answer."""
    assert document.source is not None
    # By the text: questions about one text are in one split.
    split = document.split or rule.split_of(document.utf8)
    labels = document.labels
    question = TextPiece(split, document.source, False, document.consumed_bytes, labels=labels, begins=True)
    return [question, TextPiece(split, document.text, True, 0, labels=labels)]


def choice_pieces(document: Document, rule: SplitRule) -> list[TextPiece]:
    """Returns the question and the answer of each choice."""
    assert document.source is not None
    split = _split_of(document, rule)
    question = TextPiece(split, document.source, False, 0, begins=True)
    pieces = []
    for label in document.labels:
        answer = document.text[label.start : label.end]
        pieces.append(question._replace(labels=(label,)))
        pieces.append(TextPiece(split, answer, True, 0, is_source=True))
    first, *rest, last = pieces
    return [first._replace(consumed_bytes=document.consumed_bytes), *rest, last._replace(is_source=False)]


def triple_pieces(document: Document, rule: SplitRule) -> list[TextPiece]:
    """Returns the query and its texts. Records of a group, or of a query, are in one split."""
    assert document.source is not None
    group, *labels = document.labels
    assert isinstance(group.name, int)
    key = b"%d" % group.name if group.name else document.source.encode()
    split = document.split or rule.split_of(key)
    query = TextPiece(split, document.source, True, document.consumed_bytes, is_source=True)
    query = query._replace(begins=True, marks=group_marks(group.name))
    pieces = [query]
    for mark, start, end in labels:
        assert isinstance(mark, int)
        text = document.text[start:end]
        pieces.append(query._replace(text=text, consumed_bytes=0, marks=(mark,)))
    return [*pieces[:-1], pieces[-1]._replace(is_source=False)]


def record_pieces(document: Document, rule: SplitRule) -> list[TextPiece]:
    """Returns the pieces of a record, one a segment, or of a chat template's text."""
    return _segment_pieces(document, _split_of(document, rule))


def preference_pieces(document: Document, rule: SplitRule) -> list[TextPiece]:
    """Returns the pieces of two records, of the chosen and of the rejected answer."""
    assert document.rejected is not None
    split = _split_of(document, rule)
    chosen = [piece._replace(is_source=True) for piece in _segment_pieces(document, split)]
    rejected = [piece._replace(is_rejected=True) for piece in _segment_pieces(document.rejected, split)]
    return [*chosen, *rejected]


def feedback_pieces(document: Document, rule: SplitRule) -> list[TextPiece]:
    """Returns the pieces of a record that is wanted, or is not."""
    return [piece._replace(is_rejected=document.is_unwanted) for piece in record_pieces(document, rule)]


def _segment_pieces(document: Document, split: str) -> list[TextPiece]:
    if document.spelled is not None:
        return list(_conversation_pieces(document, document.spelled, split))
    last = len(document.segments) - 1
    return [
        TextPiece(
            split,
            text,
            number == last,
            0 if number else document.consumed_bytes,
            is_learned=is_learned,
            is_marker=number in document.markers,
            begins=number == 0,
        )
        for number, (text, is_learned) in enumerate(document.segments)
    ]


def _conversation_pieces(document: Document, spelled: frozenset[int], split: str) -> Iterator[TextPiece]:
    """Yields a chat template's text in one piece, but for special tokens that its turns spell."""
    parts = [ChatPart(*segment, number in spelled) for number, segment in enumerate(document.segments)]
    joined = list(join_segments(parts))
    for number, (text, spans, is_spelled) in enumerate(joined):
        ends = number == len(joined) - 1
        consumed = 0 if number else document.consumed_bytes
        yield TextPiece(split, text, ends, consumed, is_marker=not is_spelled, begins=number == 0, spans=spans)


def cut_piece(piece: TextPiece) -> Iterator[TextPiece]:
    """Yields a piece in pieces of about PIECE_CHARS, where the tokenizer allows `cut_text`."""
    first, *rest = cut_text(piece.text)
    yield piece._replace(text=first, ends=piece.ends and not rest)
    for number, text in enumerate(rest, 1):
        is_end = piece.ends and number == len(rest)
        yield piece._replace(text=text, ends=is_end, consumed_bytes=0, labels=(), begins=False)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Pieces, and their tokens with begin and end tokens.

    `places`: of tags, the first token of each label; of records, the loss of each token that a
    chat template wrote, as long as the tokens, or empty; of answers, the mark of each token.
    """

    pieces: list[TextPiece]
    tokens: RaggedArrays
    places: list[np.ndarray] = field(default_factory=list)

    def slice(self, start: int, stop: int) -> "_Encoded":
        tokens = self.tokens.slice(start, stop)
        return _Encoded(self.pieces[start:stop], tokens, self.places[start:stop])

    def select(self, is_kept: np.ndarray) -> "_Encoded":
        pieces = list(compress(self.pieces, is_kept))
        return _Encoded(pieces, self.tokens.select(is_kept), list(compress(self.places, is_kept)))


class Assembler:
    """Encodes batches of pieces and joins them to documents.

    A document, and a source, ends with the end-of-document token where asked for; it has a loss if
    the token before it has one. The text of a chat template ends with it only where the template
    ends a document with no special token, and begins as the template says. `lost` are up to
    MAX_LOST different texts that became the `unknown` token, in their order. Memory: one document
    and one batch.
    """

    def __init__(
        self,
        encoder: Encoder,
        kind: str,
        end_of_document: bool,
        labels: LabelSet | None,
        unknown: int | None,
        max_text_tokens: int | None = None,
    ) -> None:
        self.lost: dict[str, None] = {}
        self._unknown = unknown
        self._num_searched = 0
        self._encoder = encoder
        self._layout = LAYOUTS[kind]
        self._labels = labels
        self._begin = encoder.bos
        self._end = encoder.eos if end_of_document else encoder.eos[:0]
        self._between = encoder.eos[:0]
        if self._layout.most_mark:
            between = separator_ids(encoder.tokenizer)
            self._between = np.array(between, encoder.eos.dtype) if between else encoder.eos
        around = len(self._begin) + len(self._end)
        self._most = None if max_text_tokens is None else max_text_tokens - around
        self._special = tuple(special_ids(encoder.tokenizer))
        self._unended: list[_Encoded] = []

    def add(self, batch: list[TextPiece]) -> Iterator[tuple[str, TokenDocuments]]:
        """Encodes a batch and yields the documents that end in it, by split. Raises: DataError."""
        encoded = self._encode(batch)
        stop = len(batch)
        while stop and not batch[stop - 1].is_last:
            stop -= 1
        if not stop:
            self._unended.append(encoded)
            return
        ended = _join([*self._unended, encoded.slice(0, stop)])
        self._unended = [encoded.slice(stop, len(batch))] if stop < len(batch) else []
        splits = np.array([SPLITS.index(piece.split) for piece in ended.pieces])
        for number, split in enumerate(SPLITS):
            is_own = splits == number
            if is_own.all():
                yield split, self._assemble(ended)
            elif is_own.any():
                yield split, self._assemble(ended.select(is_own))

    def _encode(self, pieces: list[TextPiece]) -> _Encoded:
        texts = [piece.text for piece in pieces]
        is_ended = np.array([piece.ends and not self._is_closed(piece) for piece in pieces])
        places: list[np.ndarray] = []
        if self._layout.labels_words:
            tokens, offsets = self._encoder.encode_placed(texts)
            places = list(map(self._word_places, pieces, offsets, tokens.lengths))
        elif self._layout.most_mark:
            tokens, places = self._encode_marked(pieces, texts)
        else:
            tokens, masks = self._encode_segments(pieces, texts)
            if self._layout.loss_mask:
                # The end-of-document token has a loss if the one before it has.
                ends = is_ended if len(self._end) else np.zeros_like(is_ended)
                places = [np.append(mask, mask[-1:]) if end else mask for mask, end in zip(masks, ends, strict=True)]
        self._find_lost(texts, tokens)
        if len(self._begin):
            is_begun = np.array([piece.begins and piece.spans is None for piece in pieces])
            tokens = _insert(tokens, is_begun, self._begin, at_end=False)
        for token in self._between:
            tokens = _insert(tokens, ~is_ended, token, at_end=True)
        if len(self._end):
            tokens = _insert(tokens, is_ended, self._end, at_end=True)
        return _Encoded(pieces, tokens, places)

    def _word_places(self, piece: TextPiece, offsets: list[tuple[int, int]], num_tokens: int) -> np.ndarray:
        """Returns the first token of each labelled word, special tokens counted."""
        first = first_tokens(piece.labels, offsets)
        begin = len(self._begin)
        # A word that the tokenizer left nothing of has its place behind the document.
        return first + np.where(first < num_tokens, begin, begin + len(self._end))

    def _encode_segments(self, pieces: list[TextPiece], texts: list[str]) -> tuple[RaggedArrays, list[np.ndarray]]:
        """Returns the tokens of each piece, and the loss mask of the text of a chat template."""
        masks = [_NO_MASK] * len(pieces)
        conversations = {}
        for number, piece in enumerate(pieces):
            if piece.spans is not None:
                ids, masks[number] = self._encoder.encode_conversation(
                    piece.text, piece.spans, has_special=piece.is_marker
                )
                conversations[number] = ids
        markers = [number for number, piece in enumerate(pieces) if piece.is_marker and piece.spans is None]
        return self._encoder.encode(texts, markers, conversations), masks

    def _encode_marked(
        self,
        pieces: list[TextPiece],
        texts: list[str],
    ) -> tuple[RaggedArrays, list[np.ndarray]]:
        """Returns the tokens of each piece, as many as it may have, and their marks."""
        tokens, offsets = self._encoder.encode_placed(texts)
        if self._most is not None:
            tokens, offsets = tokens.cut(self._most), [one[: self._most] for one in offsets]
        return tokens, list(map(self._mark, pieces, offsets))

    def _mark(self, piece: TextPiece, offsets: list[tuple[int, int]]) -> np.ndarray:
        """Returns the mark of each token of a piece and of those around it (`rows`), int16.

        Raises: DataError: A question or an answer has no token.
        """
        if piece.marks:
            if not offsets:
                text = f"the tokenizer leaves nothing of the text {piece.text[:40]!r}"
                raise DataError(text, fix="leave the record out")
            marks = np.zeros(len(self._begin) + len(offsets) + len(self._end), np.int16)
            marks[: len(piece.marks)] = piece.marks
            return marks
        number, start, end = piece.labels[0] if piece.labels else ("", 0, 0)
        has_answer = start < end
        if not piece.ends:
            length = len(self._begin) + len(offsets) + len(self._between)
            marks = np.full(length, IGNORE_INDEX, np.int16)
            if isinstance(number, int):  # of a choice
                marks[0] = number
            elif not has_answer:
                marks[0] = ANSWER_BEGINS | ANSWER_ENDS
            return marks
        marks = np.zeros(len(offsets) + len(self._end), np.int16)
        if has_answer:
            first = int(first_tokens(piece.labels, offsets)[0])
            last = sum(token_start < end for token_start, _ in offsets) - 1
            if first > last:
                where = f"the text that begins {piece.text[:40]!r}"
                raise DataError(
                    f"the tokenizer leaves nothing of the answer {piece.text[start:end][:40]!r}",
                    where=where,
                    fix="leave the record out",
                )
            marks[first] |= ANSWER_BEGINS
            marks[last] |= ANSWER_ENDS
        return marks

    def _is_closed(self, piece: TextPiece) -> bool:
        """True if a chat template wrote the piece, and ends it with a special token."""
        return piece.spans is not None and piece.is_marker and piece.text.rstrip().endswith(self._special)

    def _find_lost(self, texts: list[str], tokens: RaggedArrays) -> None:
        """Enters texts that became unknown tokens in `lost`, from the first pieces with any."""
        if self._unknown is None or self._num_searched == MAX_SEARCHED:
            return
        owners = np.repeat(np.arange(len(texts)), tokens.lengths)[tokens.values == self._unknown]
        for number in np.unique(owners)[: MAX_SEARCHED - self._num_searched]:
            self._num_searched += 1
            # Offsets take time, so the batch was encoded without them.
            encoding = self._encoder.tokenizer.encode(texts[number], add_special_tokens=False)
            for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
                text = texts[number][start:stop].strip()[:MAX_LOST_CHARS]
                if token == self._unknown and text and len(self.lost) < MAX_LOST:
                    self.lost[text] = None

    def _assemble(self, encoded: _Encoded) -> TokenDocuments:
        pieces = encoded.pieces
        tokens = encoded.tokens
        joined = self._layout.many_choices
        ends = np.array([piece.is_last if joined else piece.ends for piece in pieces])
        if self._layout.has_source:
            is_source = np.array([piece.is_source for piece in pieces])
            source = tokens.select(is_source).join(ends[is_source])
            return TokenDocuments(tokens.select(~is_source).join(ends[~is_source]), source=source)
        documents = tokens.join(ends)
        if self._layout.loss_mask:
            loss = np.repeat(np.array([piece.is_learned for piece in pieces], np.uint8), tokens.lengths)
            stops = np.cumsum(tokens.lengths)
            for number, piece in enumerate(pieces):
                if piece.spans is not None:
                    loss[stops[number] - tokens.lengths[number] : stops[number]] = encoded.places[number]
            is_rejected = np.array([piece.is_rejected for piece in pieces])
            loss |= np.repeat(is_rejected, tokens.lengths).astype(np.uint8) * REJECTED
            if self._layout.two_sides:
                sides = documents.lengths.reshape(-1, 2)
                documents = RaggedArrays(documents.values, sides.sum(axis=1))
            return TokenDocuments(documents, loss=loss)
        if self._layout.most_mark:
            return TokenDocuments(documents, labels=np.concatenate(encoded.places))
        if self._layout.labelled:
            return TokenDocuments(documents, labels=self._number(encoded, documents.lengths, ends))
        return TokenDocuments(documents)

    def _number(self, encoded: _Encoded, lengths: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Returns the number of each token's label, int16."""
        assert self._labels is not None, "labels are known before parts are written"
        rows = []
        for first, length in zip((0, *(np.flatnonzero(ends)[:-1] + 1)), lengths, strict=True):
            piece = encoded.pieces[first]
            places = encoded.places[first] if encoded.places else None
            labels = number_tokens(piece.labels, places, int(length), self._labels, piece.split, piece.text)
            rows.append(labels)
        return np.concatenate(rows)


def _insert(tokens: RaggedArrays, is_given: np.ndarray, extra: np.ndarray | int, *, at_end: bool) -> RaggedArrays:
    """Inserts a token at the beginning or end of the arrays that `is_given` marks."""
    stops = np.cumsum(tokens.lengths)
    places = stops if at_end else stops - tokens.lengths
    values = np.insert(tokens.values, places[is_given], extra)
    return RaggedArrays(values, tokens.lengths + is_given)


def _join(parts: list[_Encoded]) -> _Encoded:
    pieces = list(chain.from_iterable(part.pieces for part in parts))
    places = list(chain.from_iterable(part.places for part in parts))
    return _Encoded(pieces, concatenate([part.tokens for part in parts]), places)
