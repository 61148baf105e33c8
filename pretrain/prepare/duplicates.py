"""Exact deduplication over the whole input: the first document in input order stays.

    hash_part      each part, in any process: blake2b-128 of the kept documents, in sorted runs
                   duplicates/part-00007.hashes
    find_first     all parts: the runs merged -> one bit a document, set for the first of equal ones
                   duplicates/part-00007.first
    load_first     the bits of a part, when it is tokenised

The bits are a pure function of the input and the filters. Memory of `hash_part`: one run; of
`find_first`: one bit a document and BUCKET_ROWS hashes. A document that fills the corpus costs one
row a run, not one a time. Disk, until `find_first` is done: 24 bytes a document.
"""

import bisect
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from pretrain.config.prepare import PrepareConfig
from pretrain.prepare.filters import select
from pretrain.prepare.input_parts import InputPart, Report, Work
from pretrain.prepare.readers.dispatch import read_slices
from pretrain.prepare.text_pieces import document_key
from pretrain.utils.io import AtomicWriter, make_dir, write_file

DUPLICATES_DIR = "duplicates"
RUN_ROWS = 2**20
BUCKET_ROWS = 2**21
REPORT_DOCUMENTS = 1024


def hashes_path(folder: Path, part: InputPart) -> Path:
    """Returns the file of a part's hashes, which exists until the duplicates are known."""
    return folder / DUPLICATES_DIR / f"{part.name}.hashes"


def first_path(folder: Path, part: InputPart) -> Path:
    """Returns the file of a part's bits."""
    return folder / DUPLICATES_DIR / f"{part.name}.first"


def start_hashing(config: PrepareConfig) -> Work:
    """Returns `hash_part` of a config."""
    return partial(hash_part, config)


def hash_part(config: PrepareConfig, part: InputPart, report: Report) -> None:
    """Writes the hashes of a part; an exception leaves no file."""
    folder = Path(config.output)
    make_dir(folder / DUPLICATES_DIR)
    writer = AtomicWriter(hashes_path(folder, part))
    lengths: list[int] = []
    digests: list[bytes] = []
    done_bytes = 0
    num_documents = 0
    try:
        # A document that the filters leave out hides no other.
        for document in select(read_slices(config, part.slices), config.filter, None, Counter()):
            digests.append(hashlib.blake2b(document_key(document), digest_size=16).digest())
            num_documents += 1
            done_bytes += document.consumed_bytes
            if len(digests) == RUN_ROWS:
                lengths.append(_write_run(writer, digests, num_documents))
                digests.clear()
            if num_documents % REPORT_DOCUMENTS == 0:
                report(done_bytes, REPORT_DOCUMENTS)
                done_bytes = 0
        report(done_bytes, num_documents % REPORT_DOCUMENTS)
        lengths.append(_write_run(writer, digests, num_documents))
        writer.write(np.array([*lengths, len(lengths), num_documents], "<u8").tobytes())
        writer.commit()
    finally:
        writer.discard()


def _write_run(writer: AtomicWriter, digests: list[bytes], num_documents: int) -> int:
    """Writes rows (hash, hash, document) sorted by hash, of equal ones the first; returns how many."""
    hashes = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2)
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    rows = np.empty((len(order), 3), "<u8")
    rows[:, :2] = hashes[order]
    rows[:, 2] = order + (num_documents - len(order))
    rows = rows[_starts(rows)]
    writer.write(rows.tobytes())
    return len(rows)


def _starts(rows: np.ndarray) -> np.ndarray:
    """Returns a mask of sorted rows whose hash differs from the one before."""
    starts = np.ones(len(rows), bool)
    starts[1:] = (rows[1:, :2] != rows[:-1, :2]).any(axis=1)
    return starts


@dataclass(frozen=True, slots=True)
class _Hashes:
    """The hashes of a part; `bounds` are the first row of each run, and the end of the last."""

    path: Path
    bounds: list[int]
    num_documents: int
    first_bit: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its bits."""
        return -(-self.num_documents // 8)


def find_first(folder: Path, parts: Sequence[InputPart]) -> None:
    """Writes the bits of every part, once all are hashed. Raises: DiskError."""
    files: list[_Hashes] = []
    num_bytes = 0
    for part in parts:
        path = hashes_path(folder, part)
        values = np.memmap(path, "<u8", "r")
        num_runs, num_documents = (int(value) for value in values[-2:])
        bounds = np.cumsum([0, *values[-2 - num_runs : -2].tolist()]).tolist()
        # Each part's bits begin with a byte.
        files.append(_Hashes(path, bounds, num_documents, 8 * num_bytes))
        num_bytes += files[-1].num_bytes
    bits = np.zeros(num_bytes, np.uint8)
    for rows in _buckets(files):
        # Stable: equal hashes stay in the order of the input.
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        places = rows[_starts(rows), 2]
        masks = (1 << (places % np.uint64(8))).astype(np.uint8)
        np.bitwise_or.at(bits, places // np.uint64(8), masks)
    for part, file in zip(parts, files, strict=True):
        own = bits[file.first_bit // 8 :][: file.num_bytes]
        header = np.array([file.num_documents], "<u8").tobytes()
        write_file(first_path(folder, part), header + own.tobytes())


def remove_hashes(folder: Path) -> None:
    """Removes the hashes of all parts, whose bits are written."""
    for path in (folder / DUPLICATES_DIR).glob("*.hashes*"):
        path.unlink(missing_ok=True)


def _buckets(files: list[_Hashes]) -> Iterator[np.ndarray]:
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


def load_first(folder: Path, part: InputPart) -> np.ndarray:
    """Returns a mask of the documents that the filters keep: True where none like it came before."""
    content = first_path(folder, part).read_bytes()
    num_documents = int(np.frombuffer(content, "<u8", 1)[0])
    bits = np.frombuffer(content, np.uint8, offset=8)
    return np.unpackbits(bits, count=num_documents, bitorder="little").astype(bool)
