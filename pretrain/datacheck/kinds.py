"""What each token of a row is to its objective, in a word.

    ModelRows of one row  ->  kind of each token that the decoder, or the only stack, reads

`text`      learned all of it              `prefix`    read in both directions, not learned
`learned`   of a text that is not all      `context`   read, not learned
`source`    what a target is made from     `target`    learned after the source
`masked`    predicted, the mask token stands there; `replaced`: another token does; `kept`: the token itself does
`labelled`  the name of a label is predicted there
`prefix`, `middle`, `suffix`, `prefix+middle`          parts of a document that was rearranged
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from pretrain.config.objective import TaskConfig
from pretrain.rows import IGNORE_INDEX, ModelRows, Vocabulary

Kinds = list[str]

HIDDEN = ("masked", "replaced")
"""Another token stands there."""


def kinds_of_tokens(made: ModelRows, task: TaskConfig, vocabulary: Vocabulary) -> Kinds:
    """Returns the kind of each token [T].

    Args:
        made: One row.
        task: Its objective.
        vocabulary: Of the run.
    """
    if made.source is not None:
        return ["context" if target == IGNORE_INDEX else "target" for target in made.targets[0].tolist()]
    return KINDS.get(task.kind, _text)(made, task, vocabulary)


def borders(documents: np.ndarray | None, filled: int) -> list[tuple[int, int]]:
    """Returns the first token of each document of a row, and the one after its last; padding is left out.

    Args:
        documents: int32 [T]; None: one document.
        filled: Tokens that are not padding.
    """
    if not filled:
        return []
    numbers = np.zeros(filled, np.int32) if documents is None else documents[:filled]
    return list(pairwise([0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), filled]))


def _text(made: ModelRows, task: TaskConfig, vocabulary: Vocabulary) -> Kinds:
    return ["text"] * made.inputs.shape[1]


def _learned(made: ModelRows, task: TaskConfig, vocabulary: Vocabulary) -> Kinds:
    """A token is learned if the one before it predicts it."""
    predicted = [IGNORE_INDEX, *made.targets[0, :-1].tolist()]
    return ["context" if target == IGNORE_INDEX else "learned" for target in predicted]


def _masked(made: ModelRows, task: TaskConfig, vocabulary: Vocabulary) -> Kinds:
    kinds = []
    for stands, truth in zip(made.inputs[0].tolist(), made.targets[0].tolist(), strict=True):
        if truth == IGNORE_INDEX:
            kinds.append("text")
        elif stands == truth:
            kinds.append("kept")
        else:
            kinds.append("masked" if stands == vocabulary.mask else "replaced")
    return kinds


def _prefix(made: ModelRows, task: TaskConfig, vocabulary: Vocabulary) -> Kinds:
    assert made.prefix is not None, "a prefix language model's"
    others = _learned(made, task, vocabulary)
    return ["prefix" if before else other for before, other in zip(made.prefix[0].tolist(), others, strict=True)]


def _denoised(made: ModelRows, task: TaskConfig, vocabulary: Vocabulary) -> Kinds:
    """Source and target one after another."""
    assert made.prefix is not None, "a source is read in both directions"
    return ["source" if before else "target" for before in made.prefix[0].tolist()]


def _rearranged(made: ModelRows, task: TaskConfig, vocabulary: Vocabulary) -> Kinds:
    kinds = _text(made, task, vocabulary)
    prefix, suffix, middle = (vocabulary.named[token] for token in task.fim.tokens)
    ids = made.inputs[0].tolist()
    documents = None if made.documents is None else made.documents[0]
    for first, end in borders(documents, len(ids)):
        at = [place for place in range(first, end) if ids[place] in (prefix, suffix, middle)]
        if [ids[place] for place in at] != [prefix, suffix, middle] or at[0] != first:
            continue
        suffix_first = at[1] == first + 1  # what follows the middle's token is the text before it, unmarked, and it
        parts = ["suffix", "suffix", "prefix+middle"] if suffix_first else ["prefix", "suffix", "middle"]
        for part, (low, high) in zip(parts, pairwise([*at, end]), strict=True):
            kinds[low:high] = [part] * (high - low)
    return kinds


def _labelled(made: ModelRows, task: TaskConfig, vocabulary: Vocabulary) -> Kinds:
    return ["text" if target == IGNORE_INDEX else "labelled" for target in made.targets[0].tolist()]


KINDS: dict[str, Callable[[ModelRows, TaskConfig, Vocabulary], Kinds]] = {
    "masked": _masked,
    "prefix": _prefix,
    "ul2": _denoised,
    "fim": _rearranged,
    "supervised": _learned,
    "classify": _labelled,
    "tag": _labelled,
}
"""Of one stack, by `objective.kind`; others are learned all of it."""
