"""Labels of documents: their names, and the label numbers of tokens.

    labels of training documents -> sort_labels -> labels.json; or they are given, in any order
    document, tokens   -> number_tokens -> int16, as long as the tokens: a class at the first token of the document, a
                          tag at the first token of its word, IGNORE_INDEX elsewhere

A label is text or a number. A number is the name that it spells; where names are given and none is
a number, it is an index into them, as in data sets whose names are kept apart.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pretrain.errors import DataError
from pretrain.preparation.filters import Label
from pretrain.rows import IGNORE_INDEX
from pretrain.shards.writer import MAX_LABELS

LABELS_NAME = "labels.json"
_MAX_SHOWN = 20


@dataclass(frozen=True)
class LabelSet:
    """The labels of a shard folder."""

    names: tuple[str, ...]  # by number
    is_given: bool  # by the config; else found in the training split

    @cached_property
    def _numbers(self) -> dict[str | int, int]:
        """The number of each label, and of each index where an index can be a label."""
        numbers: dict[str | int, int] = {name: number for number, name in enumerate(self.names)}
        if self.is_given and not any(map(_is_number, self.names)):
            numbers |= {number: number for number in range(len(self.names))}
        return numbers

    def find(self, label: str | int) -> int | None:
        """Returns the number of a label; None: it is unknown."""
        return self._numbers.get(str(label), self._numbers.get(label))

    def number(self, label: str | int, split: str, text: str) -> int:
        """Returns the number of a label. Raises: DataError: unknown, with `split` and `text`."""
        number = self.find(label)
        if number is not None:
            return number
        more = ", ..." if len(self.names) > _MAX_SHOWN else ""
        names = ", ".join(self.names[:_MAX_SHOWN]) + more
        if self.is_given:
            sentence = f"label {label!r} is not one of labels"
            fix = "add it to labels, or correct it"
        else:
            sentence = f"label {label!r} of the {split} split is not one of the training split's"
            every = json.dumps(sort_labels([*self.names, str(label)]), ensure_ascii=False) if not more else "[...]"
            fix = f"correct it, or give the head a label that no text trains: labels={every}"
        where = f"the document that begins {text[:40]!r}"
        raise DataError(f"{sentence} ({names})", where=where, fix=fix)


def sort_labels(names: Iterable[str]) -> list[str]:
    """Returns the names sorted, numbers by their value. Raises: DataError: none, or too many."""
    distinct = set(names)
    check_labels(distinct)
    return sorted(distinct, key=int if all(map(_is_number, distinct)) else str)


def check_labels(names: Iterable[str]) -> None:
    """Checks that there are labels, and at most as many as a shard holds. Raises: DataError."""
    count = len(list(names))
    if not count:
        raise DataError(
            "there is no labelled document to train on",
            fix="give more data, or hold out less with --split",
        )
    if count > MAX_LABELS:
        raise DataError(
            f"{count} labels are more than {MAX_LABELS}",
            fix="is label_field (or tags_field) the right one?",
        )


def number_tokens(
    labels: Sequence[Label], places: np.ndarray | None, num_tokens: int, known: LabelSet, split: str, text: str
) -> np.ndarray:
    """Returns the number of each token's label, int16 [num_tokens].

    `places` are the tokens of the labels, int64, `num_tokens` for a label without one; None: the
    first. `split` and `text` are for errors. Raises: DataError: A label is unknown.
    """
    numbers = np.full(num_tokens + 1, IGNORE_INDEX, dtype=np.int16)
    labels_of_words = [known.number(label.name, split, text) for label in labels]
    if places is None:
        places = np.zeros(len(labels_of_words), dtype=np.int64)
    # Backwards: a token that begins with two words has the label of the first.
    numbers[places[::-1]] = labels_of_words[::-1]
    return numbers[:num_tokens]


def first_tokens(labels: Sequence[Label], offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns the first token of each labelled word, int64, by the tokens' character spans."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    word_starts = np.array([label.start for label in labels], dtype=np.int64)
    word_ends = np.array([label.end for label in labels], dtype=np.int64)
    first = np.searchsorted(ends, word_starts, side="right")
    begins = np.append(starts, np.iinfo(np.int64).max)[first] < word_ends
    # A word that the tokenizer left nothing of is behind the last token.
    return np.where(begins, first, len(starts))


def _is_number(name: str) -> bool:
    digits = name.removeprefix("-")
    return digits.isascii() and digits.isdecimal()
