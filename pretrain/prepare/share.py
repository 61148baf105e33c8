"""Which parts of the input one of several machines prepares: of `--part i/n`, those with number % n == i - 1."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.errors import ConfigError
from pretrain.prepare.sources import Part


@dataclass(frozen=True, slots=True)
class Share:
    """One of `of` commands that fill one folder together.

    Attributes:
        number: From 1. The first makes what all depend on: the tokenizer, and which documents came before.
        of: How many. 1: the whole input.
    """

    number: int = 1
    of: int = 1

    @property
    def is_whole(self) -> bool:
        """There are no others."""
        return self.of == 1

    @property
    def is_first(self) -> bool:
        """The others wait for what this one makes."""
        return self.number == 1

    def own(self, parts: Sequence[Part]) -> list[Part]:
        """Returns the parts that are this one's, in order."""
        return [part for part in parts if part.number % self.of == self.number - 1]

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


WHOLE = Share()


def parse_share(text: str) -> Share:
    """Reads `i/n` with 1 <= i <= n. Raises: ConfigError."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"part={text!r} is not a part", fix="use i/n with 1 <= i <= n, such as 1/4")
    return Share(int(match[1]), int(match[2]))
