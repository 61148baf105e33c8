"""What is read from an input: documents, of one of these kinds.

text       `text`
pairs      `source` and, as its target, `text`
records    `segments`, each learned or not; `text` is what they are together
classes    `text`, and one of `labels`
tags       `text`, words with spaces between, and one of `labels` for each word
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Label(NamedTuple):
    """A label, and what has it: the characters of `text` from `start` to `end`."""

    name: str | int
    start: int
    end: int


@dataclass(slots=True)
class Document:
    """One document to tokenise.

    Attributes:
        text: Its characters; may be empty.
        utf8: The same in UTF-8.
        consumed_bytes: What it took from the input, as stored.
        is_undecodable: Stands for a file that is passed over; has no text.
        source: Pairs: the other side, which `text` answers. May be empty.
        segments: Records: (text, whether it is learned), in order.
        markers: Records: numbers of the segments that a template wrote; special tokens that they name are meant.
        labels: In the order of what they label.
        fields: The fields of its record that were asked for and that it has.
        split: Where it goes, if its input says so.
    """

    text: str
    utf8: bytes
    consumed_bytes: int
    is_undecodable: bool = False
    source: str | None = None
    segments: tuple[tuple[str, bool], ...] = ()
    markers: frozenset[int] = frozenset()
    labels: tuple[Label, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    split: str | None = None
