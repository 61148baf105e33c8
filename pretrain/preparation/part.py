"""Tokenises one part of the input into shards and a record: the unit of work and of restart.

    documents of the part -> filters -> divide (train, validation) -> pieces -> tokens, a batch at a time
      -> SPLIT/part-00007-0000.tar, -0001.tar, ...    (every `shard_tokens` tokens)
      -> parts/part-00007.json, written last: with it the part is done

The bytes are a pure function of (slices, tokenizer, config): no process number or time enters.
Memory: one document and one batch. Not here: the cut into parts, and processes (`pool.py`).
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import numpy as np

from pretrain.config.prepare import PrepareConfig
from pretrain.kinds.layouts import LAYOUTS
from pretrain.preparation.duplicates import file_of, load_bits
from pretrain.preparation.filters import (
    DUPLICATE,
    EMPTY,
    NEAR_DUPLICATE,
    UNDECODABLE,
    Document,
    LeftOut,
    limit_of,
    select,
)
from pretrain.preparation.input_parts import InputPart, Report, Work
from pretrain.preparation.labelling import LabelSet
from pretrain.preparation.output import TOKENIZER_NAME
from pretrain.preparation.part_record import PartWriter
from pretrain.preparation.readers.dispatch import read_slices
from pretrain.preparation.selection.judge import EvaluationTexts, Judge, reasons_of
from pretrain.preparation.split import parse_split
from pretrain.preparation.text_pieces import Assembler, TextPiece, cut_piece
from pretrain.tokenizer.encoder import BATCH_CHARS, Encoder, build_encoder
from pretrain.tokenizer.file import load_tokenizer, tokenizer_hash
from pretrain.tokenizer.roles import eos_id, special_tokens_of, start_id, unknown_id
from pretrain.tokenizer.words import PIECE_CHARS, is_cut_safe

BATCH_PIECES = 1024


def read_part(config: PrepareConfig, judge: Judge, part: InputPart, left_out: LeftOut) -> Iterator[Document]:
    """Yields the documents of a part that are kept; counts the others in `left_out`, by reason."""
    masks: dict[str, np.ndarray] = {}
    if config.filter.deduplicate:
        masks[DUPLICATE] = load_bits(file_of(Path(config.output), part, "first"))
    if config.filter.near_duplicates is not None:
        masks[NEAR_DUPLICATE] = load_bits(file_of(Path(config.output), part, "near"))
    limit = limit_of(config, part.input_bytes)
    return select(read_slices(config, part.slices), judge, masks, left_out, limit)


def start_tokenizing(config: PrepareConfig, tested: EvaluationTexts, labels: LabelSet | None) -> Work:
    """Loads the tokenizer of the folder; returns `write_part` of a config, with labels for labelled documents."""
    path = Path(config.output, TOKENIZER_NAME)
    tokenizer = load_tokenizer(path)
    layout = LAYOUTS[config.kind]
    # Labels of tags, and answers, have offsets in the whole text.
    can_cut = not (layout.labels_words or layout.most_mark) and is_cut_safe(tokenizer)
    longest = PIECE_CHARS if can_cut else sys.maxsize
    bos = start_id(tokenizer) if config.tokenizer.begin else None
    if layout.has_labels:
        bos = special_tokens_of(tokenizer).bos
    judge = Judge(config.filter, tested)
    encoder = build_encoder(tokenizer, eos_id(tokenizer, config.tokenizer.eos), bos)
    # A token that ends documents as well stands for no text: GPT-2 names one for both.
    unknown = unknown_id(tokenizer)
    unknown = None if unknown == encoder.eos[0] else unknown
    return partial(write_part, config, judge, labels, encoder, unknown, tokenizer_hash(path), longest)


def write_part(
    config: PrepareConfig,
    judge: Judge,
    labels: LabelSet | None,
    encoder: Encoder,
    unknown: int | None,
    tokenizer_sha256: str,
    longest: int,
    part: InputPart,
    report: Report,
) -> None:
    """Tokenises one part into shards and commits its record; an exception leaves no file.

    Texts over `longest` characters are cut.
    """
    folder = Path(config.output)
    rule = parse_split(config.split, config.seed)
    left_out = LeftOut()
    divide = partial(resolve_name(LAYOUTS[config.kind].pieces), rule=rule)
    pieces = _pieces(read_part(config, judge, part, left_out), divide, longest)
    rules = (config.end_of_document, labels, unknown, config.max_text_tokens)
    assembler = Assembler(encoder, config.kind, *rules)
    dtype = encoder.eos.dtype.name
    with PartWriter(folder, part, tokenizer_sha256, dtype, config.kind, config.shard_tokens, unknown) as writer:
        record = writer.record
        for batch in _batches(pieces, report):
            for piece in batch:
                if not piece.is_source or piece.marks or LAYOUTS[config.kind].two_sides:
                    record.splits[piece.split].num_bytes_text += len(piece.text.encode())
            for split, documents in assembler.add(batch):
                writer.add(split, documents)
        record.num_empty += left_out.documents.pop(EMPTY, 0)
        record.num_undecodable = left_out.documents.pop(UNDECODABLE, 0)
        record.num_filtered = dict.fromkeys(reasons_of(config.filter), 0) | left_out.documents
        record.filtered_bytes = {reason: n for reason, n in left_out.num_bytes.items() if n}
        record.bad = left_out.bad
        record.num_edited = left_out.num_edited
        record.edited_bytes = left_out.edited_bytes
        record.lost = list(assembler.lost)
        record.unused = dict(sorted(left_out.unused.items()))
        writer.commit()


def _pieces(
    documents: Iterable[Document], divide: Callable[[Document], list[TextPiece]], longest: int
) -> Iterator[TextPiece]:
    """Divides documents and cuts the long ones."""
    for document in documents:
        for piece in divide(document):
            # A chat template's text stays whole: its loss is found by places in it.
            if len(piece.text) <= longest or piece.spans is not None:
                yield piece
            else:
                yield from cut_piece(piece)


def _batches(pieces: Iterable[TextPiece], report: Report) -> Iterator[list[TextPiece]]:
    """Groups pieces up to BATCH_CHARS; reports a batch when the next one is asked for."""
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
