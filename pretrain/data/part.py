"""One part of the input -> its shards and its record: the unit of work, of parallelism and of restart.

    documents of the part -> divide (train, validation) -> cut into pieces -> encode_batch_fast, a batch at a time
      -> end-of-document token -> SPLIT/part-00007-0000.tar, -0001.tar, ...    (every `shard_tokens` tokens)
      -> parts/part-00007.json, written last: with it the part is done, without it the part has not happened

The bytes are a pure function of (slices, tokenizer, settings): no process number, time or neighbour enters.
Memory: one document and one batch. Not here: which parts there are (sources.py), who runs them (pool.py).
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.documents import Document
from pretrain.data.readers.reader import Reader
from pretrain.data.shards import ShardWriter
from pretrain.data.sources import Part
from pretrain.data.split import SPLITS, SplitRule
from pretrain.data.tokenizer import BATCH_CHARS, Encoder, cut_text
from pretrain.index import ShardIndex, TableFile
from pretrain.io import make_dir, write_json

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
    """

    folder: Path
    rule: SplitRule
    reader: Reader
    cut_long: bool
    shard_tokens: int
    tokenizer_sha256: str


@dataclass(slots=True)
class SplitRecord:
    """What a part wrote to one split."""

    num_bytes_text: int = 0
    shards: list[ShardIndex] = field(default_factory=list)


@dataclass(slots=True)
class PartRecord:
    """What a part wrote, and what it passed over."""

    tokenizer_sha256: str
    splits: dict[str, SplitRecord]
    num_empty: int = 0
    num_undecodable: int = 0

    @property
    def num_documents(self) -> int:
        """Documents in all splits."""
        return sum(shard.num_documents for split in self.splits.values() for shard in split.shards)


def record_path(folder: Path, part: Part) -> Path:
    """Where the record of `part` is."""
    return folder / PARTS_DIR / f"{part.name}.json"


def load_record(folder: Path, part: Part, tokenizer_sha256: str) -> PartRecord | None:
    """Returns the record of a part that was finished with this tokenizer and whose files have their sizes, or None."""
    try:
        raw = json.loads(record_path(folder, part).read_bytes())
        if raw["tokenizer_sha256"] != tokenizer_sha256:
            return None
        splits = {name: _parse_split(value) for name, value in raw["splits"].items()}
        for split in splits.values():
            for shard in split.shards:
                for name, size in ((shard.name, shard.num_bytes), (shard.table.name, shard.table_bytes)):
                    if (folder / name).stat().st_size != size:
                        return None
        return PartRecord(tokenizer_sha256, splits, raw["num_empty"], raw["num_undecodable"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _parse_split(raw: dict[str, Any]) -> SplitRecord:
    shards = [ShardIndex(**{**shard, "table": TableFile(**shard["table"])}) for shard in raw["shards"]]
    return SplitRecord(raw["num_bytes_text"], shards)


def write_part(settings: PartSettings, encoder: Encoder, part: Part, report: Report) -> None:
    """Tokenises one part into shards and commits its record.

    Raises:
        DataError: Malformed input.
        DiskError: The disk refused. Like every other exception, it leaves no record and no temporary file.
    """
    record = PartRecord(settings.tokenizer_sha256, {name: SplitRecord() for name in SPLITS})
    writers = {name: _SplitWriter(settings, part, name, encoder.eos.dtype.name) for name in SPLITS}
    document: list[np.ndarray] = []
    try:
        for batch in _batches(_pieces(settings.reader.read(part.slices), settings, record), report):
            for piece, tokens in zip(batch, encoder.encode([piece.text for piece in batch]), strict=True):
                document.append(tokens)
                if piece.is_last:
                    writers[piece.split].add(np.concatenate([*document, encoder.eos]))
                    document.clear()
        for name, writer in writers.items():
            record.splits[name].shards = writer.close()
    finally:
        for writer in writers.values():
            writer.discard()
    write_json(record_path(settings.folder, part), asdict(record))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of one document's text, encoded in one go.

    Attributes:
        split: Where the document goes.
        text: Its characters.
        is_last: The document ends with it.
        consumed_bytes: Input bytes to report when it is done.
    """

    split: str
    text: str
    is_last: bool
    consumed_bytes: int


def _pieces(documents: Iterable[Document], settings: PartSettings, record: PartRecord) -> Iterator[_Piece]:
    """Divides documents and cuts the long ones; enters text bytes and what is skipped in the record."""
    for document in documents:
        record.num_undecodable += document.is_undecodable
        record.num_empty += not document.text and not document.is_undecodable
        consumed = document.consumed_bytes
        for split, side in settings.rule.divide(document.text, document.utf8):
            record.splits[split].num_bytes_text += len(document.utf8) if side == document.text else len(side.encode())
            cuts = list(cut_text(side)) if settings.cut_long else [side]
            for number, text in enumerate(cuts, 1):
                yield _Piece(split, text, number == len(cuts), consumed)
                consumed = 0


def _batches(pieces: Iterable[_Piece], report: Report) -> Iterator[list[_Piece]]:
    """Groups pieces up to BATCH_CHARS; reports a batch when the caller comes back for the next one."""
    batch: list[_Piece] = []
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


def _report_batch(batch: list[_Piece], report: Report) -> None:
    report(sum(piece.consumed_bytes for piece in batch), sum(piece.is_last for piece in batch))


class _SplitWriter:
    """The shards of one part in one split: opened at the first document, a new one every `shard_tokens`."""

    def __init__(self, settings: PartSettings, part: Part, split: str, dtype: str) -> None:
        self._folder, self._stem, self._dtype = settings.folder / split, part.name, dtype
        self._shard_tokens = settings.shard_tokens
        self._shards: list[ShardIndex] = []
        self._open: ShardWriter | None = None

    def add(self, tokens: np.ndarray) -> None:
        """Appends one document, its end-of-document token included."""
        if self._open is None:
            make_dir(self._folder)
            self._open = ShardWriter(self._folder / f"{self._stem}-{len(self._shards):04d}.tar", self._dtype)
        self._open.add_document(tokens)
        if self._open.num_tokens >= self._shard_tokens:
            self._close_shard()

    def close(self) -> list[ShardIndex]:
        """Commits the last shard; returns all of them."""
        self._close_shard()
        return self._shards

    def discard(self) -> None:
        """Gives up the shard that is still open, if any."""
        if self._open is not None:
            self._open.discard()

    def _close_shard(self) -> None:
        if self._open is not None:
            self._shards.append(self._open.close())
            self._open = None
