"""Question with its only right answer, and the rule by which it is held out."""

import hashlib
from dataclasses import dataclass

UNKNOWN = "I do not know."
HELD_OUT_SHARE = 1 / 32


@dataclass(frozen=True, slots=True)
class Question:
    """Question of a kind: `number`, `text`, `fact`, or `unknown`, which nothing answers.

    `key` is what is held out: the numbers, the text with the question, the fact in its phrasing.
    """

    kind: str
    key: str
    asked: str
    answer: str
    text: str = ""  # what the question is about, in the conversation before it

    @property
    def is_held_out(self) -> bool:
        """True for a share of all keys, by their hash: no text of the training has one."""
        digest = hashlib.sha256(self.key.encode()).digest()
        return int.from_bytes(digest[:4]) < HELD_OUT_SHARE * 2**32


def words(text: str) -> list[str]:
    """Returns the words of a list."""
    return text.split()
