"""The rule that assigns documents to splits.

    hash:0.01   a document is held out when the hash of its bytes falls below the fraction
    tail:0.1    the last tenth of every document's characters is held out, for one long file

The split is a pure function of each document, not of its place in the corpus.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from pathlib import PurePosixPath

from pretrain.errors import ConfigError

TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)
_VALIDATION_NAME = re.compile(r"(?:^|[^a-z])(?:val|valid|validation)(?:[^a-z]|$)")


@dataclass(frozen=True, slots=True)
class SplitRule:
    """A split."""

    kind: str  # `hash` or `tail`
    fraction: Fraction  # exact: n x (1 - F) must not depend on binary rounding
    salt: bytes  # of the hash, 8 bytes
    threshold: bytes  # hashes below it are held out; 8 bytes, big-endian

    def divide(self, text: str, utf8: bytes) -> list[tuple[str, str]]:
        """Returns the non-empty (split, text) sides of a document whose text in UTF-8 is `utf8`."""
        if self.kind == "tail":
            cut = int(len(text) * (1 - self.fraction))
            sides = ((TRAIN, text[:cut]), (VALIDATION, text[cut:]))
            return [(split, side) for split, side in sides if side]
        return [(self.split_of(utf8), text)] if text else []

    def split_of(self, key: bytes) -> str:
        """Returns the split of a document under `hash`, by its `document_key`."""
        digest = blake2b(key, digest_size=8, salt=self.salt).digest()
        return VALIDATION if digest < self.threshold else TRAIN

    @property
    def larger(self) -> str:
        """A split by hash that holds out more than this one."""
        share = max(Fraction(1, 10), min(2 * self.fraction, (1 + self.fraction) / 2))
        return f"hash:{float(share):.4g}"


def is_validation(path: str) -> bool:
    """Returns whether a file is held out by its name, or its folder's."""
    names = PurePosixPath(path).parts[-2:]
    return any(_VALIDATION_NAME.search(name.lower()) for name in names)


def parse_split(text: str, seed: int) -> SplitRule:
    """Reads `hash:F` or `tail:F`, 0 <= F < 1. Raises: ConfigError, also for the seed."""
    kind, _, number = text.partition(":")
    try:
        fraction = Fraction(number)
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(-1)
    if kind not in ("hash", "tail") or not 0 <= fraction < 1:
        raise ConfigError(
            f"split={text!r} is not a split",
            fix="use hash:F or tail:F with 0 <= F < 1, such as hash:0.01",
        )
    if not 0 <= seed < 2**64:
        raise ConfigError(f"seed={seed} is not a seed", fix="use a number from 0 to 2**64 - 1")
    threshold = int(fraction * 2**64).to_bytes(8, "big")
    return SplitRule(kind, fraction, seed.to_bytes(8, "big"), threshold)
