"""Near duplicates over the whole input: MinHash finds candidates, the Jaccard similarity decides.

    Sketcher         a document -> MinHash values of its word n-grams, in bands (sketches.py)
                     duplicates/part-00007.bands, written while the part is hashed (duplicates.py)
    find_pairs       all parts: documents with a band in common -> pairs, and the documents in them
                     duplicates/pairs, duplicates/part-00007.wanted
    hash_candidates  each part, in any process: the n-grams of its documents in pairs
                     duplicates/part-00007.ngrams
    find_near        all parts: pairs of at least the threshold -> one bit a document
                     duplicates/part-00007.near

A document is left out if its similarity with an earlier one that stays reaches the threshold, so
that chains of similar documents do not all fall to their first. The bits are a pure function of the
input and the filters. Memory of `find_pairs`: BUCKET_ROWS bands, one bit a document and 16 bytes a
pair; of `find_near`: 16 bytes a pair and the n-grams of two documents. Disk, until the bits are
written: 24 bytes a band and document, and 8 bytes an n-gram of a candidate.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from pretrain.config.prepare import NearDuplicatesConfig, PrepareConfig
from pretrain.preparation.duplicates import (
    DUPLICATES_DIR,
    REPORT_DOCUMENTS,
    HashRuns,
    buckets,
    file_of,
    load_runs,
    read_kept,
    write_bits,
)
from pretrain.preparation.input_parts import InputPart, Report, Work
from pretrain.preparation.selection.judge import EvaluationTexts, Judge
from pretrain.preparation.selection.sketches import ngram_hashes, words_of
from pretrain.utils.io import write_file

# In a band that many documents share, each is compared with so many before it.
WINDOW = 16

_SCALE = 10**9


def pairs_path(folder: Path) -> Path:
    """Returns the file of all pairs."""
    return folder / DUPLICATES_DIR / "pairs"


def find_pairs(folder: Path, parts: Sequence[InputPart], is_first: np.ndarray | None) -> None:
    """Writes the pairs of documents with a band in common, and the documents of each part in them.

    `is_first` has a bit a document: 0 for an exact duplicate, which needs no comparison.
    """
    files = load_runs([file_of(folder, part, "bands") for part in parts])
    pairs = np.empty((0, 2), np.uint64)
    for rows in buckets(files):
        if is_first is not None:
            rows = rows[is_first[rows[:, 2].astype(np.int64)]]
        rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
        blocks = [pairs]
        for step in range(1, min(WINDOW, len(rows) - 1) + 1):
            same = (rows[step:, :2] == rows[:-step, :2]).all(axis=1)
            if not same.any():
                break
            blocks.append(np.stack([rows[:-step, 2][same], rows[step:, 2][same]], axis=1))
        pairs = np.unique(np.concatenate(blocks), axis=0)
    # By the later document, which is the one that may be left out.
    pairs = pairs[np.lexsort((pairs[:, 0], pairs[:, 1]))]
    in_pairs = np.unique(pairs)
    for part, file in zip(parts, files, strict=True):
        stop = file.first_bit + 8 * file.num_bytes
        bits = in_pairs[(in_pairs >= file.first_bit) & (in_pairs < stop)]
        numbers = bits - np.uint64(file.first_bit)
        write_file(file_of(folder, part, "wanted"), numbers.astype("<u8").tobytes())
    write_file(pairs_path(folder), pairs.astype("<u8").tobytes())


def start_hashing_candidates(config: PrepareConfig, tested: EvaluationTexts) -> Work:
    """Returns `hash_candidates` of a config."""
    return partial(hash_candidates, config, Judge(config.filter, tested))


def hash_candidates(config: PrepareConfig, judge: Judge, part: InputPart, report: Report) -> None:
    """Writes the sorted n-grams of a part's documents in pairs. Raises: DiskError."""
    near = config.filter.near_duplicates
    assert near is not None, "this step belongs to it"
    folder = Path(config.output)
    wanted = np.frombuffer(file_of(folder, part, "wanted").read_bytes(), "<u8")
    hashes: list[np.ndarray] = []
    done_bytes = 0
    for number, document in enumerate(read_kept(config, judge, part) if len(wanted) else ()):
        done_bytes += document.consumed_bytes
        if number == wanted[len(hashes)]:
            hashes.append(np.unique(ngram_hashes(words_of(document.text), near.ngram)))
        if len(hashes) == len(wanted):
            break
        if number % REPORT_DOCUMENTS == 0:
            report(done_bytes, 0)
            done_bytes = 0
    lengths = np.array([len(one) for one in hashes], "<u8")
    values = np.concatenate([np.empty(0, np.uint64), *hashes]).astype("<u8")
    write_file(file_of(folder, part, "ngrams"), lengths.tobytes() + values.tobytes())


def find_near(folder: Path, parts: Sequence[InputPart], config: NearDuplicatesConfig) -> None:
    """Writes the bits of every part, once the n-grams of all are written. Raises: DiskError."""
    files = load_runs([file_of(folder, part, "bands") for part in parts])
    candidates = [_Candidates(folder, part, file) for part, file in zip(parts, files, strict=True)]
    starts = np.array([file.first_bit for file in files])
    pairs = np.fromfile(pairs_path(folder), "<u8").reshape(-1, 2)
    bits = np.ones(8 * sum(file.num_bytes for file in files), bool)
    threshold = round(config.threshold * _SCALE)
    last = -1
    for earlier, later in pairs.tolist():
        if not (bits[earlier] and bits[later]):
            continue
        if later != last:
            last = later
            ngrams = candidates[np.searchsorted(starts, later, "right") - 1].ngrams(later)
        other = candidates[np.searchsorted(starts, earlier, "right") - 1].ngrams(earlier)
        num_common = len(np.intersect1d(ngrams, other, assume_unique=True))
        # Exact: a similarity of 0.8 is not below a threshold of 0.8.
        if num_common * _SCALE >= threshold * (len(ngrams) + len(other) - num_common):
            bits[later] = False
    write_bits(files, bits, [file_of(folder, part, "near") for part in parts])


class _Candidates:
    """The n-grams of a part's documents in pairs."""

    def __init__(self, folder: Path, part: InputPart, file: HashRuns) -> None:
        self._path = file_of(folder, part, "ngrams")
        wanted = np.fromfile(file_of(folder, part, "wanted"), "<u8")
        self._numbers = wanted + np.uint64(file.first_bit)
        lengths = np.fromfile(self._path, "<u8", len(wanted)).astype(np.int64)
        self._stops = np.cumsum(lengths) + len(wanted)
        self._lengths = lengths

    def ngrams(self, number: int) -> np.ndarray:
        """Returns the sorted n-grams of a document by its number among all."""
        place = int(np.searchsorted(self._numbers, number))
        start = int(self._stops[place] - self._lengths[place])
        return np.fromfile(self._path, "<u8", int(self._lengths[place]), offset=8 * start)
