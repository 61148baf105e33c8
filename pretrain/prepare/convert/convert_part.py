"""Converts one part of the source into shards and a record: the unit of work and of restart.

    documents of the part -> split (by file, or by the hash of the tokens) -> SPLIT/part-00007-0000.tar, ...
      -> parts/part-00007.json, written last: with it the part is done, without it the part has not happened

The record has the fields of `prepare/part.py`, and the runs: the splits of the source's documents, in order, from which
the proof restores that order. The bytes are a pure function of the source and the settings.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from pretrain.prepare.convert.token_file import TokenFile
from pretrain.prepare.input_parts import InputPart
from pretrain.prepare.part import PartRecord, Report, SplitRecord, record_path
from pretrain.prepare.pool import Work
from pretrain.prepare.split import SPLITS, TRAIN, SplitRule, SplitWriter
from pretrain.shards.sidecars import TokenDocuments, ragged_of
from pretrain.shards.writer import MEMBER_TOKENS
from pretrain.tokenizer import load_tokenizer, tokenizer_hash, vocabulary_size
from pretrain.utils.io import write_json

DECODE_TOKENS = 2**16
"""Tokens that are decoded at once: an encoding takes a hundred bytes a token."""


class TextBytes:
    """Counts the UTF-8 bytes of tokens, for bits per byte; special tokens have none.

    Exact, a look-up a token, for byte-level tokenizers. Others decode: a few million tokens a second, and a byte more
    or less where a document of over DECODE_TOKENS is decoded in pieces.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = _byte_table(tokenizer) if _is_byte_level(tokenizer) else None

    def count(self, tokens: np.ndarray) -> int:
        """Returns the bytes of one document's tokens."""
        if self._bytes is not None:
            return int(self._bytes[tokens].sum())
        pieces = (tokens[start : start + DECODE_TOKENS] for start in range(0, len(tokens), DECODE_TOKENS))
        return sum(len(self._tokenizer.decode(piece.tolist()).encode()) for piece in pieces)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    while decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return decoder.get("type") == "ByteLevel"


def _byte_table(tokenizer: Tokenizer) -> np.ndarray:
    """Returns the bytes of each id, int64 [V]: a character of the alphabet of byte-level tokenizers is one."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    table = np.zeros(vocabulary_size(tokenizer), np.int64)
    for content, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if content not in special:
            table[number] = len(content) if alphabet.issuperset(content) else len(content.encode())
    return table


REPORT_DOCUMENTS = 4096


@dataclass(frozen=True, slots=True)
class ConversionSettings:
    """The task of converting parts.

    Attributes:
        folder: Shard folder.
        tokenizer_path: File of the tokenizer.
        files: Files of the source, by path.
        splits: Split by path, of files with a split in their name.
        rule: Split of the documents of other files.
        eos: End-of-document token, an array of one in the dtype of the shards.
        append_eos: True: documents that do not end with `eos` get it.
        shard_tokens: A shard is closed at the first document end at or past this many tokens.
    """

    folder: Path
    tokenizer_path: Path
    files: Mapping[str, TokenFile]
    splits: Mapping[str, str]
    rule: SplitRule
    eos: np.ndarray
    append_eos: bool
    shard_tokens: int

    def start(self) -> Work:
        """Loads the tokenizer, once a process."""
        tokenizer = load_tokenizer(self.tokenizer_path)
        return partial(write_part, self, TextBytes(tokenizer), tokenizer_hash(self.tokenizer_path))

    def split_of(self, path: str, document: np.ndarray) -> str:
        """Returns the split of a document of the file `path`."""
        if path in self.splits or not self.rule.fraction:
            return self.splits.get(path, TRAIN)
        return self.rule.split_of(document.astype("<u4").tobytes())


@dataclass(slots=True)
class Runs:
    """Consecutive documents of the source that went the same way.

    Attributes:
        rows: (split, whether the end-of-document token was appended, documents), in the source's order.
        num_open: Documents that do not end with that token, and were left so.
    """

    rows: list[tuple[str, bool, int]] = field(default_factory=list)
    num_open: int = 0

    def add(self, split: str, is_appended: bool) -> None:
        """Enters the next document."""
        if self.rows and self.rows[-1][:2] == (split, is_appended):
            self.rows[-1] = (split, is_appended, self.rows[-1][2] + 1)
        else:
            self.rows.append((split, is_appended, 1))

    @property
    def num_appended(self) -> int:
        """Tokens that the source does not have."""
        return sum(count for _, is_appended, count in self.rows if is_appended)


def load_runs(folder: Path, part: InputPart) -> Runs:
    """Returns the runs of a part that has a record."""
    raw = json.loads(record_path(folder, part).read_bytes())["runs"]
    return Runs([(split, is_appended, count) for split, is_appended, count in raw["rows"]], raw["num_open"])


def write_part(
    settings: ConversionSettings, text_bytes: TextBytes, tokenizer_sha256: str, part: InputPart, report: Report
) -> None:
    """Writes one part's documents into shards and commits its record.

    Raises:
        DataError: The source is unusable.
        DiskError: The disk refused. Like every other exception, it leaves no record and no temporary file.
    """
    record = PartRecord(tokenizer_sha256, {name: SplitRecord() for name in SPLITS})
    dtype = settings.eos.dtype.name
    writers = {
        name: SplitWriter(settings.folder / name, part.name, dtype, "text", settings.shard_tokens) for name in SPLITS
    }
    runs = Runs()
    pending: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}
    pending_tokens = 0
    try:
        for piece in part.slices:
            path, num_documents = piece.file.path, 0
            for document in settings.files[path].documents(piece.start, piece.stop):
                if not len(document):
                    record.num_empty += 1
                    continue
                split, is_open = settings.split_of(path, document), document[-1] != settings.eos[0]
                is_appended = bool(is_open) and settings.append_eos
                runs.add(split, is_appended)
                runs.num_open += bool(is_open) and not settings.append_eos
                record.splits[split].num_bytes_text += text_bytes.count(document)
                pending[split].append(np.concatenate([document, settings.eos]) if is_appended else document)
                num_documents, pending_tokens = num_documents + 1, pending_tokens + len(document)
                if num_documents % REPORT_DOCUMENTS == 0:
                    report(0, REPORT_DOCUMENTS)
                if num_documents % REPORT_DOCUMENTS == 0 or pending_tokens >= MEMBER_TOKENS:
                    _write(pending, writers)
                    pending_tokens = 0
            report(piece.num_bytes, num_documents % REPORT_DOCUMENTS)
        _write(pending, writers)
        for name, writer in writers.items():
            record.splits[name].shards = writer.close()
            record.splits[name].lengths = writer.lengths.as_json()
    finally:
        for writer in writers.values():
            writer.discard()
    write_json(record_path(settings.folder, part), {**asdict(record), "runs": asdict(runs)})


def _write(pending: dict[str, list[np.ndarray]], writers: Mapping[str, SplitWriter]) -> None:
    """Writes the documents of each split, and forgets them."""
    for split, documents in pending.items():
        if documents:
            writers[split].add(TokenDocuments(ragged_of(documents)))
            documents.clear()
