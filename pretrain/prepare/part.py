"""One part of the input -> its shards and its record: the unit of work, of parallelism and of restart.

    documents of the part -> filters -> divide (train, validation) -> pieces -> encode_batch_fast, a batch at a time
      -> end-of-document token -> SPLIT/part-00007-0000.tar, -0001.tar, ...    (every `shard_tokens` tokens)
      -> parts/part-00007.json, written last: with it the part is done, without it the part has not happened

The bytes are a pure function of (slices, tokenizer, settings): no process number, time or neighbour enters.
Memory: one document and one batch. Not here: which parts there are (sources.py), who runs them (pool.py).
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
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
from pretrain.tokenizer import BATCH_CHARS, PIECE_CHARS, Encoder
from pretrain.utils.io import write_json

PARTS_DIR = "parts"

BATCH_PIECES = 1024

Report = Callable[[int, int], None]

"""Called with the input bytes and documents since the last call, several times a second; may raise to stop."""


@dataclass(frozen=True, slots=True)
class PartSettings:
    """What every part of one `prepare` shares.

    Attributes:
        folder: The shard folder.
        rule: The split.
        reader: Reads the documents.
        cut_long: The tokenizer allows `cut_text`; without, a document is encoded whole.
        shard_tokens: A shard is closed at the first document end at or past this many tokens.
        tokenizer_sha256: Of the tokenizer, hex; entered in each record.
        filters: Which documents are left out.
        deduplicate: So are those that came before; duplicates.py has found them.
        end_of_document: A document ends with the tokenizer's end-of-document token.
        labels: Of labelled documents.
    """

    folder: Path
    rule: SplitRule
    reader: Reader
    cut_long: bool
    shard_tokens: int
    tokenizer_sha256: str
    filters: FilterRule = field(default_factory=FilterRule)
    deduplicate: bool = False
    end_of_document: bool = True
    labels: LabelSet | None = None


@dataclass(slots=True)
class SplitRecord:
    """What a part wrote to one split.

    Attributes:
        num_bytes_text: UTF-8 bytes of its text; of pairs, of the targets.
        shards: In order.
        lengths: Of its documents, as `Lengths.as_json` gives them; of pairs, of the targets.
        source_lengths: Of the sources of its pairs.
        num_learned: Learned tokens of its records.
        num_labelled: Tokens that have each label, by its number as text.
    """

    num_bytes_text: int = 0
    shards: list[ShardIndex] = field(default_factory=list)
    lengths: dict[str, Any] = field(default_factory=dict)
    source_lengths: dict[str, Any] = field(default_factory=dict)
    num_learned: int = 0
    num_labelled: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class PartRecord:
    """What a part wrote, and what it passed over.

    Attributes:
        tokenizer_sha256: Of the tokenizer, hex.
        splits: What it wrote.
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
    """Where the record of `part` is."""
    return folder / PARTS_DIR / f"{part.name}.json"


def load_record(folder: Path, part: InputPart, tokenizer_sha256: str) -> PartRecord | None:
    """Returns the record of a part that was finished with this tokenizer and whose files have their sizes, or None."""
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


# Documents of shards, put together of pieces: tokens, what begins and ends them, and what lies
# beside the tokens.
#
#     [Piece] -> encoded, a batch at a time -> after those of a document not yet ended -> TokenDocuments of each split
#
# Everything is done for a batch at a time, but for labels. Memory: one document and one batch.


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Pieces, their tokens with what begins and ends a text, and of tags the first token of each label, a row each."""

    pieces: list[TextPiece]
    tokens: RaggedArrays
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


def _insert(tokens: RaggedArrays, is_given: np.ndarray, extra: np.ndarray, *, at_end: bool) -> RaggedArrays:
    """Gives some arrays, by a bool for each, one more token: their first, or their last."""
    stops = np.cumsum(tokens.lengths)
    places = stops if at_end else stops - tokens.lengths
    return RaggedArrays(np.insert(tokens.values, places[is_given], extra), tokens.lengths + is_given)


def _join(parts: list[_Encoded]) -> _Encoded:
    pieces = list(chain.from_iterable(part.pieces for part in parts))
    places = list(chain.from_iterable(part.places for part in parts))
    return _Encoded(pieces, concatenate([part.tokens for part in parts]), places)
