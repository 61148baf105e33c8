"""Which text is trained on and which is held out: a pure function of each document, not of its place in the corpus.

hash:0.01   a document is held out when the hash of its bytes falls below the fraction; duplicates stay together
tail:0.1    the last tenth of every document's characters is held out; what a corpus of one long file needs
"""

from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b

from pretrain.errors import ConfigError

TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How documents are divided.

    Attributes:
        kind: `hash` or `tail`.
        fraction: Held out, exact: floor(n x (1 - F)) must not depend on binary rounding.
        salt: Of the hash, 8 bytes.
        threshold: Hashes below it are held out; 8 bytes, as they are, the most significant first.
    """

    kind: str
    fraction: Fraction
    salt: bytes
    threshold: bytes

    def divide(self, text: str, utf8: bytes) -> list[tuple[str, str]]:
        """Returns the non-empty (split, text) sides of a document whose text in UTF-8 is `utf8`."""
        if self.kind == "tail":
            cut = int(len(text) * (1 - self.fraction))
            return [(split, side) for split, side in ((TRAIN, text[:cut]), (VALIDATION, text[cut:])) if side]
        return [(self.split_of(utf8), text)] if text else []

    def split_of(self, key: bytes) -> str:
        """Returns where a `hash` split puts a document, by the bytes that make it what it is."""
        return VALIDATION if blake2b(key, digest_size=8, salt=self.salt).digest() < self.threshold else TRAIN


def parse_split(text: str, seed: int) -> SplitRule:
    """Reads `hash:F` or `tail:F` with 0 <= F < 1.

    Raises:
        ConfigError: Anything else, or a seed outside 0..2**64-1.
    """
    kind, _, number = text.partition(":")
    try:
        fraction = Fraction(number)
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(-1)
    if kind not in ("hash", "tail") or not 0 <= fraction < 1:
        raise ConfigError(
            f"split={text!r} is not a split", fix="use hash:F or tail:F with 0 <= F < 1, such as hash:0.01"
        )
    if not 0 <= seed < 2**64:
        raise ConfigError(f"seed={seed} is not a seed", fix="use a number from 0 to 2**64 - 1")
    return SplitRule(kind, fraction, seed.to_bytes(8, "big"), int(fraction * 2**64).to_bytes(8, "big"))
