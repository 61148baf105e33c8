"""Tokenises one part of the input into shards and a record: the unit of work, of parallelism and of restart.

    documents of the part -> filters -> divide (train, validation) -> pieces -> encode_batch_fast, a batch at a time
      -> end-of-document token -> SPLIT/part-00007-0000.tar, -0001.tar, ...    (every `shard_tokens` tokens)
      -> parts/part-00007.json, written last: with it the part is done, without it the part has not happened

The bytes are a pure function of (slices, tokenizer, settings): no process number, time or neighbour enters.
Memory: one document and one batch. Not here: the cut into parts (`input_parts.py`), and processes (`pool.py`).
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pretrain.prepare.assembler import Assembler
from pretrain.prepare.duplicates import load_first
from pretrain.prepare.filters import EMPTY, UNDECODABLE, Document, FilterRule, select
from pretrain.prepare.input_parts import InputPart, Report, Work
from pretrain.prepare.labelling import LabelSet
from pretrain.prepare.part_record import PartWriter
from pretrain.prepare.readers.dispatch import Reader
from pretrain.prepare.split import SplitRule
from pretrain.prepare.text_pieces import TextPiece, cut_piece, divide
from pretrain.tokenizer import (
    BATCH_CHARS,
    PIECE_CHARS,
    Encoder,
    build_encoder,
    is_cut_safe,
    load_tokenizer,
)

BATCH_PIECES = 1024


@dataclass(frozen=True, slots=True)
class PartSettings:
    """The task of tokenising parts.

    Attributes:
        folder: Shard folder.
        tokenizer_path: File of the tokenizer.
        tokenizer_sha256: Hash of the tokenizer, hex; entered in each record.
        reader: Reader of the documents.
        rule: Split.
        shard_tokens: A shard is closed at the first document end at or past this many tokens.
        filters: Filters of documents.
        deduplicate: True: drop duplicates, which `duplicates.py` has found.
        end_of_document: True: a document ends with the tokenizer's end-of-document token.
        labels: Labels of labelled documents.
    """

    folder: Path
    tokenizer_path: Path
    tokenizer_sha256: str
    reader: Reader
    rule: SplitRule
    shard_tokens: int = 2**27
    filters: FilterRule = field(default_factory=FilterRule)
    deduplicate: bool = False
    end_of_document: bool = True
    labels: LabelSet | None = None

    def start(self) -> Work:
        """Loads the tokenizer; returns `write_part` of this task."""
        tokenizer = load_tokenizer(self.tokenizer_path)
        # Labels of tags have offsets in the whole text.
        can_cut = self.reader.kind != "tags" and is_cut_safe(tokenizer)
        longest = PIECE_CHARS if can_cut else sys.maxsize
        return partial(write_part, self, build_encoder(tokenizer), longest)


def write_part(settings: PartSettings, encoder: Encoder, longest: int, part: InputPart, report: Report) -> None:
    """Tokenises one part into shards and commits its record; texts over `longest` characters are cut.

    Raises:
        DataError: Malformed input.
        DiskError: The disk refused. Like every other exception, it leaves no record and no temporary file.
    """
    kind = settings.reader.kind
    left_out: Counter[str] = Counter()
    first = load_first(settings.folder, part) if settings.deduplicate else None
    documents = select(settings.reader.read(part.slices), settings.filters, first, left_out)
    assembler = Assembler(encoder, kind, settings.end_of_document, settings.labels)
    with PartWriter(
        settings.folder,
        part,
        settings.tokenizer_sha256,
        encoder.eos.dtype.name,
        kind,
        settings.shard_tokens,
    ) as writer:
        record = writer.record
        for batch in _batches(_pieces(documents, settings.rule, longest), report):
            for piece in batch:
                if not piece.is_source:
                    record.splits[piece.split].num_bytes_text += len(piece.text.encode())
            for split, ready in assembler.add(batch):
                writer.add(split, ready)
        record.num_empty += left_out.pop(EMPTY, 0)
        record.num_undecodable = left_out.pop(UNDECODABLE, 0)
        record.num_filtered = dict(left_out)
        writer.commit()


def _pieces(documents: Iterable[Document], rule: SplitRule, longest: int) -> Iterator[TextPiece]:
    """Divides documents and cuts the long ones."""
    for document in documents:
        for piece in divide(document, rule):
            if len(piece.text) <= longest:
                yield piece
            else:
                yield from cut_piece(piece)


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
            batch = []
            room = BATCH_CHARS
    if batch:
        yield batch
        _report_batch(batch, report)


def _report_batch(batch: list[TextPiece], report: Report) -> None:
    consumed_bytes = sum(piece.consumed_bytes for piece in batch)
    report(consumed_bytes, sum(piece.is_last for piece in batch))
