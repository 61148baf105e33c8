"""One part of the source -> its shards and its record: the unit of work and of restart.

    documents of the part -> split (by file, or by the hash of the tokens) -> SPLIT/part-00007-0000.tar, ...
      -> parts/part-00007.json, written last: with it the part is done, without it the part has not happened

The record has, beside what `data/part.py` records, the runs: how the documents of the source were dealt out, in order.
With them the source's order is found again in the shards (proof.py). The bytes are a pure function of the source and
the settings.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from pretrain.data.convert.text_bytes import TextBytes
from pretrain.data.convert.token_file import TokenFile
from pretrain.data.part import PartRecord, SplitRecord, record_path
from pretrain.data.shards import ShardWriter
from pretrain.data.sources import Part
from pretrain.data.split import SPLITS, TRAIN, VALIDATION, SplitRule
from pretrain.index import ShardIndex
from pretrain.io import make_dir, write_json

Report = Callable[[int, int], None]
"""Called with the documents and bytes of the source since the last call."""

REPORT_DOCUMENTS = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """What every part of one conversion shares.

    Attributes:
        folder: The shard folder.
        files: The source, by path.
        splits: Split of each file whose name decides, by path.
        rule: Split of the documents of other files.
        eos: The end-of-document token, an array of one in the dtype of the shards.
        append_eos: It is appended to documents that do not end with it.
        shard_tokens: A shard is closed at the first document end at or past this many tokens.
        text_bytes: Counts the text of tokens.
        tokenizer_sha256: Of the tokenizer, hex; entered in each record.
    """

    folder: Path
    files: Mapping[str, TokenFile]
    splits: Mapping[str, str]
    rule: SplitRule
    eos: np.ndarray
    append_eos: bool
    shard_tokens: int
    text_bytes: TextBytes
    tokenizer_sha256: str

    def split_of(self, path: str, document: np.ndarray) -> str:
        """Returns the split of a document of the file `path`."""
        if path in self.splits or not self.rule.fraction:
            return self.splits.get(path, TRAIN)
        # The rule hashes bytes, of whatever; the text that it takes beside them is only handed back.
        return self.rule.divide("-", document.astype("<u4").tobytes())[0][0]


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


def load_runs(folder: Path, part: Part) -> Runs:
    """Returns the runs of a part that has a record."""
    raw = json.loads(record_path(folder, part).read_bytes())["runs"]
    return Runs([(split, is_appended, count) for split, is_appended, count in raw["rows"]], raw["num_open"])


def write_part(settings: Settings, part: Part, report: Report) -> None:
    """Writes one part's documents into shards and commits its record.

    Raises:
        DataError: The source cannot be used.
        DiskError: The disk refused. Like every other exception, it leaves no record and no temporary file.
    """
    record = PartRecord(settings.tokenizer_sha256, {name: SplitRecord() for name in SPLITS})
    writers = {name: ShardSeries(settings, part, name) for name in SPLITS}
    runs = Runs()
    try:
        for piece in part.slices:
            documents, path = settings.files[piece.file.path].documents(piece.start, piece.stop), piece.file.path
            num_documents = 0
            for document in documents:
                num_documents += 1
                if not len(document):
                    record.num_empty += 1
                    continue
                split = settings.split_of(path, document)
                is_open = document[-1] != settings.eos[0]
                runs.add(split, bool(is_open and settings.append_eos))
                runs.num_open += bool(is_open and not settings.append_eos)
                record.splits[split].num_bytes_text += settings.text_bytes.count(document)
                writers[split].add(np.concatenate([document, settings.eos]) if runs.rows[-1][1] else document)
                if num_documents % REPORT_DOCUMENTS == 0:
                    report(REPORT_DOCUMENTS, 0)
            report(num_documents % REPORT_DOCUMENTS, piece.num_bytes)
        for name, writer in writers.items():
            record.splits[name].shards = writer.close()
    finally:
        for writer in writers.values():
            writer.discard()
    write_json(record_path(settings.folder, part), {**asdict(record), "runs": asdict(runs)})


class ShardSeries:
    """The shards of one part in one split: opened at the first document, a new one every `shard_tokens`."""

    def __init__(self, settings: Settings, part: Part, split: str) -> None:
        assert split in (TRAIN, VALIDATION)
        self._folder, self._stem, self._dtype = settings.folder / split, part.name, settings.eos.dtype.name
        self._shard_tokens = settings.shard_tokens
        self._shards: list[ShardIndex] = []
        self._open: ShardWriter | None = None

    def add(self, tokens: np.ndarray) -> None:
        """Appends one document."""
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
