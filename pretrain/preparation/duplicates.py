"""Exact deduplication over the whole input: the first document in input order stays.

    hash_part      each part, in any process: blake2b-128 of the kept documents, in sorted runs
                   duplicates/part-00007.hashes
    find_first     all parts: the runs merged -> one bit a document, set for the first of equal ones
                   duplicates/part-00007.first
    load_bits      the bits of a part, when it is tokenised

The bits are a pure function of the input and the filters. Memory of `hash_part`: one run; of
`find_first`: one byte a document and BUCKET_ROWS hashes. A document that fills the corpus costs one
row a run, not one a time. Disk, until `find_first` is done: 24 bytes a document.
"""

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Self

import numpy as np

from pretrain.config.prepare import PrepareConfig
from pretrain.preparation.filters import Document, LeftOut, limit_of, select
from pretrain.preparation.input_parts import InputPart, Report, Work
from pretrain.preparation.readers.dispatch import read_slices
from pretrain.preparation.selection.judge import EvaluationTexts, Judge
from pretrain.preparation.selection.sketches import Sketcher
from pretrain.preparation.text_pieces import document_key
from pretrain.utils.io import AtomicWriter, make_dir, write_file

DUPLICATES_DIR = "duplicates"
Content = Literal["hashes", "first", "bands", "wanted", "ngrams", "near"]
"""Contents of the files of a part; bits are `first` and `near`, the others are of near_duplicates.py."""
RUN_ROWS = 2**20
BUCKET_ROWS = 2**21
REPORT_DOCUMENTS = 1024


def file_of(folder: Path, part: InputPart, content: Content) -> Path:
    """Returns a file of a part; all but the bits exist until the duplicates are known."""
    return folder / DUPLICATES_DIR / f"{part.name}.{content}"


def start_hashing(config: PrepareConfig, tested: EvaluationTexts) -> Work:
    """Returns `hash_part` of a config."""
    return partial(hash_part, config, Judge(config.filter, tested))


def hash_part(config: PrepareConfig, judge: Judge, part: InputPart, report: Report) -> None:
    """Writes the hashes and bands of a part; an exception leaves no file."""
    folder = Path(config.output)
    near = config.filter.near_duplicates
    make_dir(folder / DUPLICATES_DIR)
    done_bytes = 0
    num_documents = 0
    with ExitStack() as stack:
        exact = bands = None
        if config.filter.deduplicate:
            exact = stack.enter_context(RunWriter(file_of(folder, part, "hashes"), is_unique=True))
        if near is not None:
            bands = stack.enter_context(RunWriter(file_of(folder, part, "bands"), is_unique=False))
            sketcher = Sketcher(near)
        # A document that the filters leave out hides no other.
        for document in read_kept(config, judge, part):
            if exact is not None:
                digest = hashlib.blake2b(document_key(document), digest_size=16).digest()
                exact.add([digest], num_documents)
            if bands is not None:
                bands.add(sketcher.digests(document), num_documents)
            num_documents += 1
            done_bytes += document.consumed_bytes
            if num_documents % REPORT_DOCUMENTS == 0:
                report(done_bytes, REPORT_DOCUMENTS)
                done_bytes = 0
        report(done_bytes, num_documents % REPORT_DOCUMENTS)
        for writer in (bands, exact):
            if writer is not None:
                writer.commit(num_documents)


def read_kept(config: PrepareConfig, judge: Judge, part: InputPart) -> Iterator[Document]:
    """Yields the documents of a part that the filters keep, duplicates too."""
    limit = limit_of(config, part.input_bytes)
    return select(read_slices(config, part.slices), judge, None, LeftOut(), limit)


class RunWriter:
    """Writes rows (hash, hash, document) in runs that are sorted by hash; in memory is one run.

    With `is_unique`, of rows of a run with the same hash the first stays. Leaving its `with`
    discards what is not committed.
    """

    def __init__(self, path: Path, *, is_unique: bool) -> None:
        """Opens the file. Raises: DiskError."""
        self._writer = AtomicWriter(path)
        self._is_unique = is_unique
        self._lengths: list[int] = []
        self._digests: list[bytes] = []
        self._numbers: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._writer.discard()

    def add(self, digests: Sequence[bytes], number: int) -> None:
        """Adds 16-byte hashes of a document."""
        self._digests += digests
        self._numbers += [number] * len(digests)
        if len(self._digests) >= RUN_ROWS:
            self._write_run()

    def commit(self, num_documents: int) -> None:
        """Completes the file of a part with so many documents. Raises: DiskError."""
        self._write_run()
        footer = [*self._lengths, len(self._lengths), num_documents]
        self._writer.write(np.array(footer, "<u8").tobytes())
        self._writer.commit()

    def _write_run(self) -> None:
        hashes = np.frombuffer(b"".join(self._digests), ">u8").reshape(-1, 2)
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))
        rows = np.empty((len(order), 3), "<u8")
        rows[:, :2] = hashes[order]
        rows[:, 2] = np.array(self._numbers, np.uint64)[order]
        if self._is_unique:
            rows = rows[_starts(rows)]
        self._writer.write(rows.tobytes())
        self._lengths.append(len(rows))
        self._digests.clear()
        self._numbers.clear()


def _starts(rows: np.ndarray) -> np.ndarray:
    """Returns a mask of sorted rows whose hash differs from the one before."""
    starts = np.ones(len(rows), bool)
    starts[1:] = (rows[1:, :2] != rows[:-1, :2]).any(axis=1)
    return starts


@dataclass(frozen=True, slots=True)
class HashRuns:
    """The rows of a part; `bounds` are the first row of each run, and the end of the last."""

    path: Path
    bounds: list[int]
    num_documents: int
    first_bit: int  # number of its first document among all; each part's begins with a byte

    @property
    def num_bytes(self) -> int:
        """Bytes of its bits."""
        return -(-self.num_documents // 8)


def load_runs(paths: Sequence[Path]) -> list[HashRuns]:
    """Returns the runs of all parts, in order."""
    files: list[HashRuns] = []
    num_bytes = 0
    for path in paths:
        values = np.memmap(path, "<u8", "r")
        num_runs, num_documents = (int(value) for value in values[-2:])
        bounds = np.cumsum([0, *values[-2 - num_runs : -2].tolist()]).tolist()
        files.append(HashRuns(path, bounds, num_documents, 8 * num_bytes))
        num_bytes += files[-1].num_bytes
    return files


def find_first(folder: Path, parts: Sequence[InputPart]) -> None:
    """Writes the bits of every part, once all are hashed. Raises: DiskError."""
    files = load_runs([file_of(folder, part, "hashes") for part in parts])
    bits = np.zeros(8 * sum(file.num_bytes for file in files), bool)
    for rows in buckets(files):
        # Stable: equal hashes stay in the order of the input.
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        bits[rows[_starts(rows), 2].astype(np.int64)] = True
    write_bits(files, bits, [file_of(folder, part, "first") for part in parts])


def write_bits(files: Sequence[HashRuns], bits: np.ndarray, paths: Sequence[Path]) -> None:
    """Writes the bits of all parts, one a document. Raises: DiskError."""
    for file, path in zip(files, paths, strict=True):
        file_bits = bits[file.first_bit :][: file.num_documents]
        header = np.array([file.num_documents], "<u8").tobytes()
        write_file(path, header + np.packbits(file_bits, bitorder="little").tobytes())


def load_all_first(folder: Path, parts: Sequence[InputPart]) -> np.ndarray:
    """Returns the bits of all parts by the number of a document, with those between parts."""
    contents = [file_of(folder, part, "first").read_bytes()[8:] for part in parts]
    values = np.frombuffer(b"".join(contents), np.uint8)
    return np.unpackbits(values, bitorder="little").astype(bool)


def remove_hashes(folder: Path) -> None:
    """Removes the hashes of all parts, whose bits are written."""
    for pattern in ("*.hashes*", "*.bands*", "*.wanted*", "*.ngrams*", "pairs*"):
        for path in (folder / DUPLICATES_DIR).glob(pattern):
            path.unlink(missing_ok=True)


def buckets(files: list[HashRuns]) -> Iterator[np.ndarray]:
    """Yields the rows of all files, a range of hashes at a time, with bits for documents."""
    num_buckets = max(1, -(-sum(file.bounds[-1] for file in files) // BUCKET_ROWS))
    places = [file.bounds[:-1] for file in files]
    for bucket in range(1, num_buckets + 1):
        last = bucket * 2**64 // num_buckets - 1
        rows = [np.empty((0, 3), np.uint64)]
        for file, place in zip(files, places, strict=True):
            # Opened one by one, because there may be thousands.
            table = np.memmap(file.path, "<u8", "r")[: 3 * file.bounds[-1]].reshape(-1, 3)
            for run, (begin, end) in enumerate(zip(place, file.bounds[1:], strict=True)):
                place[run] = bisect.bisect_right(table[:, 0], last, begin, end)
                taken = np.array(table[begin : place[run]])
                taken[:, 2] += np.uint64(file.first_bit)
                rows.append(taken)
        yield np.concatenate(rows)


def load_bits(path: Path) -> np.ndarray:
    """Returns a mask of the documents that the filters keep, False for those that are left out."""
    content = path.read_bytes()
    num_documents = int(np.frombuffer(content, "<u8", 1)[0])
    bits = np.frombuffer(content, np.uint8, offset=8)
    return np.unpackbits(bits, count=num_documents, bitorder="little").astype(bool)
