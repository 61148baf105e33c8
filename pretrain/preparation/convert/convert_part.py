"""Converts one part of the source into shards and a record: the unit of work and of restart.

    documents of the part -> split (by file, or hash of the tokens) -> SPLIT/part-00007-0000.tar, ...
      -> parts/part-00007.json, written last: with it the part is done

The record has the runs too: the splits of the source's documents, in order, from which the proof
restores that order. The bytes are a pure function of the source and the options.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from pretrain.preparation.convert.token_file import ReadOptions, TokenFile
from pretrain.preparation.input_parts import InputPart, Report, Work
from pretrain.preparation.part_record import PartWriter, record_path
from pretrain.preparation.pool import ShardJob
from pretrain.preparation.split import SPLITS, TRAIN, SplitRule
from pretrain.shards.ragged import TokenDocuments, ragged_of
from pretrain.shards.writer import MEMBER_TOKENS
from pretrain.tokenizer.file import load_tokenizer, tokenizer_hash
from pretrain.tokenizer.roles import vocabulary_size
from pretrain.utils.safe_read import parse_json

# Tokens that are decoded at once: an encoding takes a hundred bytes a token.
DECODE_TOKENS = 2**16
REPORT_DOCUMENTS = 4096
# A part starts a new shard there.
SHARD_TOKENS = 2**27


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Options of a conversion."""

    output: Path
    kind: str  # key of `FORMATS`
    source: tuple[str, ...]  # files, folders and globs of this machine
    tokenizer: str  # a tokenizer.json, a folder of Hugging Face, or a name on its hub
    # `hash:F`: by the hash of a document's tokens. None: files, or folders, named val, valid or
    # validation are held out where there are such and others, else `hash:0.01`.
    split: str | None = None
    dtype: str | None = None  # see ReadOptions


@dataclass(frozen=True)
class ConvertJob(ShardJob):
    """A checked source and its plan."""

    options: ConvertOptions
    tokenizer: bytes  # content of the tokenizer.json
    read: ReadOptions
    begin_id: int | None  # token that the tokenizer puts in front of a text
    files: dict[str, TokenFile]  # by path, in order
    splits: dict[str, str]  # by path, of files with a split in their name
    rule: SplitRule  # of the documents of the other files

    def split_of(self, path: str, document: np.ndarray) -> str:
        """Returns the split of a document of the file `path`."""
        if path in self.splits or not self.rule.fraction:
            return self.splits.get(path, TRAIN)
        return self.rule.split_of(document.astype("<u4").tobytes())


class TextBytes:
    """Counts the UTF-8 bytes of tokens, for bits per byte; special tokens have none.

    Exact, a look-up a token, for byte-level tokenizers. Others decode: a few million tokens a
    second, and a byte more or less where a document of over DECODE_TOKENS is decoded in pieces.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = _byte_table(tokenizer) if _is_byte_level(tokenizer) else None

    def count(self, tokens: np.ndarray) -> int:
        """Returns the bytes of one document's tokens."""
        if self._bytes is not None:
            return int(self._bytes[tokens].sum())
        starts = range(0, len(tokens), DECODE_TOKENS)
        texts = (self._tokenizer.decode(tokens[at : at + DECODE_TOKENS].tolist()) for at in starts)
        return sum(len(text.encode()) for text in texts)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = parse_json(tokenizer.to_str())["decoder"] or {}
    while decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return decoder.get("type") == "ByteLevel"


def _byte_table(tokenizer: Tokenizer) -> np.ndarray:
    """Returns the bytes of each id, int64 [V]: one a character of the byte-level alphabet."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    added = tokenizer.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    table = np.zeros(vocabulary_size(tokenizer), np.int64)
    for content, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if content not in special:
            is_bytes = alphabet.issuperset(content)
            table[number] = len(content) if is_bytes else len(content.encode())
    return table


def load_runs(folder: Path, part: InputPart) -> dict[str, Any]:
    """Returns the runs of a part that has a record: `rows`, `num_open`, `num_begun` (see `write_part`)."""
    runs: dict[str, Any] = parse_json(record_path(folder, part).read_bytes())["runs"]
    return runs


def start_converting(job: ConvertJob) -> Work:
    """Loads the tokenizer; returns `write_part` of a job."""
    text_bytes = TextBytes(load_tokenizer(job.tokenizer_path))
    return partial(write_part, job, text_bytes, tokenizer_hash(job.tokenizer_path))


def write_part(job: ConvertJob, text_bytes: TextBytes, tokenizer_sha256: str, part: InputPart, report: Report) -> None:
    """Writes one part's shards and commits its record; an exception leaves no file."""
    # Consecutive documents of the source: split, how many.
    rows: list[list[Any]] = []
    num_open = 0  # documents that do not end with the token
    num_begun = 0  # documents that begin with the token
    pending: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}
    pending_tokens = 0
    dtype = job.read.shard_dtype.name
    with PartWriter(job.folder, part, tokenizer_sha256, dtype, "text", SHARD_TOKENS) as writer:
        for piece in part.slices:
            path = piece.file.path
            num_documents = 0
            for document in job.files[path].documents(piece.start, piece.stop):
                if not len(document):
                    writer.record.num_empty += 1
                    continue
                split = job.split_of(path, document)
                if not rows or rows[-1][0] != split:
                    rows.append([split, 0])
                rows[-1][1] += 1
                num_open += bool(document[-1] != job.read.eos_id)
                num_begun += bool(document[0] == job.begin_id)
                writer.record.splits[split].num_bytes_text += text_bytes.count(document)
                pending[split].append(document)
                num_documents += 1
                pending_tokens += len(document)
                is_reported = num_documents % REPORT_DOCUMENTS == 0
                if is_reported:
                    report(0, REPORT_DOCUMENTS)
                if is_reported or pending_tokens >= MEMBER_TOKENS:
                    _write(pending, writer)
                    pending_tokens = 0
            report(piece.num_bytes, num_documents % REPORT_DOCUMENTS)
        _write(pending, writer)
        writer.commit(runs={"rows": rows, "num_open": num_open, "num_begun": num_begun})


def _write(pending: dict[str, list[np.ndarray]], writer: PartWriter) -> None:
    """Writes the documents of each split, and removes them from `pending`."""
    for split, documents in pending.items():
        if documents:
            writer.add(split, TokenDocuments(ragged_of(documents)))
            documents.clear()
