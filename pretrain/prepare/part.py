"""Tokenises one part of the input into shards and a record: the unit of work, of parallelism and of restart.

    documents of the part -> filters -> divide (train, validation) -> pieces -> encode_batch_fast, a batch at a time
      -> end-of-document token -> SPLIT/part-00007-0000.tar, -0001.tar, ...    (every `shard_tokens` tokens)
      -> parts/part-00007.json, written last: with it the part is done, without it the part has not happened

The bytes are a pure function of (slices, tokenizer, settings): no process number, time or neighbour enters.
Memory: one document and one batch. Not here: the cut into parts (`input_parts.py`), and processes (`pool.py`).
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.prepare.duplicates import load_first
from pretrain.prepare.filters import EMPTY, UNDECODABLE, Document, FilterRule, select
from pretrain.prepare.input_parts import InputPart
from pretrain.prepare.labelling import LabelSet, first_tokens, number_tokens
from pretrain.prepare.readers.dispatch import Reader
from pretrain.prepare.split import SPLITS, SplitRule, SplitWriter
from pretrain.prepare.text_pieces import TextPiece, cut_piece, divide
from pretrain.shards.index import LABELLED, ShardIndex, Sidecar
from pretrain.shards.sidecars import RaggedArrays, TokenDocuments, concatenate
from pretrain.tokenizer import BATCH_CHARS, PIECE_CHARS, Encoder, build_encoder, load_tokenizer
from pretrain.utils.io import write_json

PARTS_DIR = "parts"
BATCH_PIECES = 1024

Report = Callable[[int, int], None]
"""Called with the input bytes and documents since the last call, several times a second; may raise to stop."""


@dataclass(frozen=True, slots=True)
class PartSettings:
    """The task of tokenising parts.

    Attributes:
        folder: Shard folder.
        tokenizer_path: File of the tokenizer.
        rule: Split.
        reader: Reader of the documents.
        cut_long: True: the tokenizer allows `cut_text`. False: a document is encoded whole.
        shard_tokens: A shard is closed at the first document end at or past this many tokens.
        tokenizer_sha256: Hash of the tokenizer, hex; entered in each record.
        filters: Filters of documents.
        deduplicate: True: drop duplicates, which `duplicates.py` has found.
        end_of_document: True: a document ends with the tokenizer's end-of-document token.
        labels: Labels of labelled documents.
    """

    folder: Path
    tokenizer_path: Path
    rule: SplitRule
    reader: Reader
    cut_long: bool
    shard_tokens: int
    tokenizer_sha256: str
    filters: FilterRule = field(default_factory=FilterRule)
    deduplicate: bool = False
    end_of_document: bool = True
    labels: LabelSet | None = None

    def start(self) -> Callable[[InputPart, Report], None]:
        """Loads the tokenizer; returns `write_part` of this task."""
        return partial(write_part, self, build_encoder(load_tokenizer(self.tokenizer_path)))


@dataclass(slots=True)
class SplitRecord:
    """The output of a part in one split.

    Attributes:
        num_bytes_text: UTF-8 bytes of its text; of pairs, of the targets.
        shards: Shards of the part, in order.
        lengths: Lengths of its documents, by `LengthHistogram.as_json`; of pairs, of the targets.
        source_lengths: Lengths of the sources of its pairs.
        num_learned: Tokens of its records that have a loss.
        num_labelled: Tokens with each label, by its number as text.
    """

    num_bytes_text: int = 0
    shards: list[ShardIndex] = field(default_factory=list)
    lengths: dict[str, Any] = field(default_factory=dict)
    source_lengths: dict[str, Any] = field(default_factory=dict)
    num_learned: int = 0
    num_labelled: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class PartRecord:
    """The output of a part.

    Attributes:
        tokenizer_sha256: Hash of the tokenizer, hex.
        splits: Output in each split.
        num_empty: Documents without text, or without tokens.
        num_undecodable: Files of the default corpus that are not UTF-8.
        num_filtered: Documents left out, by reason.
    """

    tokenizer_sha256: str
    splits: dict[str, SplitRecord]
    num_empty: int = 0
    num_undecodable: int = 0
    num_filtered: dict[str, int] = field(default_factory=dict)

    @property
    def num_documents(self) -> int:
        """Documents in all splits."""
        return sum(shard.num_documents for split in self.splits.values() for shard in split.shards)


def record_path(folder: Path, part: InputPart) -> Path:
    """Returns the file of a part's record."""
    return folder / PARTS_DIR / f"{part.name}.json"


def load_record(folder: Path, part: InputPart, tokenizer_sha256: str) -> PartRecord | None:
    """Returns the record of a part; None: not finished with this tokenizer, or a file has another size."""
    try:
        raw = json.loads(record_path(folder, part).read_bytes())
        if raw["tokenizer_sha256"] != tokenizer_sha256:
            return None
        splits = {name: _parse_split(value) for name, value in raw["splits"].items()}
        for split in splits.values():
            for shard in split.shards:
                for name, size in shard.sizes.items():
                    if (folder / name).stat().st_size != size:
                        return None
        counts = (raw["num_empty"], raw["num_undecodable"], raw["num_filtered"])
        return PartRecord(tokenizer_sha256, splits, *counts)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _parse_split(raw: dict[str, Any]) -> SplitRecord:
    return SplitRecord(**{**raw, "shards": [_parse_shard(shard) for shard in raw["shards"]]})


def _parse_shard(raw: dict[str, Any]) -> ShardIndex:
    sidecars = {name: Sidecar(**raw[name]) for name in ("table", "lengths")}
    return ShardIndex(**{**raw, **sidecars})


def write_part(settings: PartSettings, encoder: Encoder, part: InputPart, report: Report) -> None:
    """Tokenises one part into shards and commits its record.

    Raises:
        DataError: Malformed input.
        DiskError: The disk refused. Like every other exception, it leaves no record and no temporary file.
    """
    record = PartRecord(settings.tokenizer_sha256, {name: SplitRecord() for name in SPLITS})
    kind, dtype = settings.reader.kind, encoder.eos.dtype.name
    writers = {
        name: SplitWriter(settings.folder / name, part.name, dtype, kind, settings.shard_tokens) for name in SPLITS
    }
    left_out: Counter[str] = Counter()
    first = load_first(settings.folder, part) if settings.deduplicate else None
    documents = select(settings.reader.read(part.slices), settings.filters, first, left_out)
    assembler = Assembler(encoder, kind, settings.end_of_document, settings.labels)
    try:
        for batch in _batches(_pieces(documents, settings), report):
            for split, num_bytes in _count_bytes(batch).items():
                record.splits[split].num_bytes_text += num_bytes
            for split, ready in assembler.add(batch):
                left_out[EMPTY] += writers[split].add(ready)
        for name, writer in writers.items():
            _enter(writer, record.splits[name])
    finally:
        for writer in writers.values():
            writer.discard()
    record.num_empty, record.num_undecodable = left_out.pop(EMPTY, 0), left_out.pop(UNDECODABLE, 0)
    record.num_filtered = {reason: left_out[reason] for reason in sorted(left_out)}
    write_json(record_path(settings.folder, part), asdict(record))


def _enter(writer: SplitWriter, record: SplitRecord) -> None:
    """Closes the last shard, and enters what was written."""
    record.shards = writer.close()
    record.lengths, record.num_learned = writer.lengths.as_json(), writer.num_learned
    record.num_labelled = {str(number): count for number, count in sorted(writer.labels.items())}
    if writer.source_lengths.bins:
        record.source_lengths = writer.source_lengths.as_json()


def _pieces(documents: Iterable[Document], settings: PartSettings) -> Iterator[TextPiece]:
    """Divides documents and cuts the long ones."""
    longest = PIECE_CHARS if settings.cut_long else sys.maxsize
    for document in documents:
        for piece in divide(document, settings.rule):
            if len(piece.text) <= longest:
                yield piece
            else:
                yield from cut_piece(piece)


def _count_bytes(batch: Iterable[TextPiece]) -> Counter[str]:
    """Returns the text of each split, as UTF-8; of pairs, the targets."""
    num_bytes: Counter[str] = Counter()
    for piece in batch:
        if not piece.is_source:
            num_bytes[piece.split] += len(piece.text.encode())
    return num_bytes


def _batches(pieces: Iterable[TextPiece], report: Report) -> Iterator[list[TextPiece]]:
    """Groups pieces up to BATCH_CHARS; reports a batch when the caller comes back for the next one."""
    batch: list[TextPiece] = []
    room = BATCH_CHARS
    for piece in pieces:
        batch.append(piece)
        room -= len(piece.text)
        if room <= 0 or len(batch) == BATCH_PIECES:
            yield batch
            _report_batch(batch, report)
            batch, room = [], BATCH_CHARS
    if batch:
        yield batch
        _report_batch(batch, report)


def _report_batch(batch: list[TextPiece], report: Report) -> None:
    report(sum(piece.consumed_bytes for piece in batch), sum(piece.is_last for piece in batch))


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Pieces, their tokens with begin and end tokens, and of tags the first token of each label, a row each."""

    pieces: list[TextPiece]
    tokens: RaggedArrays
    places: list[np.ndarray] = field(default_factory=list)

    def slice(self, start: int, stop: int) -> "_Encoded":
        return _Encoded(self.pieces[start:stop], self.tokens.slice(start, stop), self.places[start:stop])


class Assembler:
    """Encodes batches of pieces and joins them to documents.

    A document, and a source, ends with the end-of-document token where asked for; it has a loss if the token before it
    has one. Memory: one document and one batch.
    """

    def __init__(self, encoder: Encoder, kind: str, end_of_document: bool, labels: LabelSet | None) -> None:
        self._encoder, self._kind, self._labels = encoder, kind, labels
        self._begin = encoder.bos if kind in LABELLED else encoder.bos[:0]
        self._end = encoder.eos if end_of_document else encoder.eos[:0]
        self._unended: list[_Encoded] = []

    def add(self, batch: list[TextPiece]) -> Iterator[tuple[str, TokenDocuments]]:
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

    def _encode(self, pieces: list[TextPiece]) -> _Encoded:
        texts = [piece.text for piece in pieces]
        places: list[np.ndarray] = []
        if self._kind == "tags":
            tokens, offsets = self._encoder.encode_placed(texts)
            firsts = (first_tokens(piece.labels, own) for piece, own in zip(pieces, offsets, strict=True))
            begin, both = len(self._begin), len(self._begin) + len(self._end)
            # A word that the tokenizer left nothing of has its place behind the document.
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
        """Joins the pieces of whole documents."""
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


def _insert(tokens: RaggedArrays, is_given: np.ndarray, extra: np.ndarray, *, at_end: bool) -> RaggedArrays:
    """Inserts a token at the beginning or end of the arrays that `is_given` marks."""
    stops = np.cumsum(tokens.lengths)
    places = stops if at_end else stops - tokens.lengths
    return RaggedArrays(np.insert(tokens.values, places[is_given], extra), tokens.lengths + is_given)


def _join(parts: list[_Encoded]) -> _Encoded:
    pieces = list(chain.from_iterable(part.pieces for part in parts))
    places = list(chain.from_iterable(part.places for part in parts))
    return _Encoded(pieces, concatenate([part.tokens for part in parts]), places)
