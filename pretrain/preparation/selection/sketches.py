"""Word n-grams of texts as hashes, and MinHash values of documents (Broder 1997), by rensa.

    text -> words in lower case -> hashes of n-grams -> MinHash values -> a hash a band

Two documents of Jaccard similarity s have a band of r values in common with probability s**r, and
one of b bands with 1 - (1 - s**r)**b.
"""

import hashlib
import re
from collections.abc import Sequence

import numpy as np

from pretrain.config.prepare import NearDuplicatesConfig
from pretrain.preparation.filters import Document

# Share of pairs at the threshold that MinHash has to find.
RECALL = 0.995

_WORD = re.compile(r"\w+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case, without marks."""
    return _WORD.findall(text.lower())


def ngram_hashes(words: Sequence[str], size: int) -> np.ndarray:
    """Returns a hash of each run of `size` words, uint64; of fewer words, of the one run of all."""
    if not words:
        return np.empty(0, np.uint64)
    digests = {word: hashlib.blake2b(word.encode(), digest_size=8).digest() for word in set(words)}
    values = np.frombuffer(b"".join([digests[word] for word in words]), "<u8")
    size = min(size, len(words))
    num_runs = len(words) - size + 1
    hashes = np.zeros(num_runs, np.uint64)
    # A polynomial of the hashes of words, modulo 2**64.
    for place in range(size):
        hashes = hashes * _MULTIPLIER + values[place : place + num_runs]
    return hashes


def plan_bands(config: NearDuplicatesConfig) -> tuple[int, int]:
    """Returns (bands, MinHash values a band): the fewest pairs with RECALL at the threshold."""
    for rows in range(config.hashes, 1, -1):
        bands = config.hashes // rows
        if 1 - (1 - config.threshold**rows) ** bands >= RECALL:
            return bands, rows
    return config.hashes, 1


class Sketcher:
    """MinHash values of documents, in bands."""

    def __init__(self, config: NearDuplicatesConfig) -> None:
        self._config = config
        self._bands, self._rows = plan_bands(config)

    def digests(self, document: Document) -> list[bytes]:
        """Returns a 16-byte hash of each band of a document; none for one without words."""
        from rensa import RMinHash

        hashes = np.unique(ngram_hashes(words_of(document.text), self._config.ngram))
        if not len(hashes):
            return []
        offsets = np.array([0, len(hashes)], np.uint64)
        sizes = (self._config.hashes, self._config.seed)
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, *sizes)
        values = np.array(matrix.to_rows()[0], "<u4")[: self._bands * self._rows]
        bands = values.reshape(self._bands, self._rows)
        return [
            hashlib.blake2b(band.tobytes(), digest_size=16, salt=number.to_bytes(8, "big")).digest()
            for number, band in enumerate(bands)
        ]
