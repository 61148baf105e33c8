"""What each token of a row is to its objective, in a word.

    ModelRows of one row  ->  kind of each token that the decoder, or the only stack, reads

`text`      learned all of it              `prefix`    read in both directions, not learned
`learned`   of a text that is not all      `context`   read, not learned
`source`    what a target is made from     `target`    learned after the source
`masked`    predicted, the mask token stands there; `replaced`: another token does; `kept`: the token itself does
`labelled`  the name of a label is predicted there
`prefix`, `middle`, `suffix`, `prefix+middle`          parts of a document that was rearranged
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from tokenizers import Tokenizer

from pretrain.config.objective import TaskConfig
from pretrain.rows import IGNORE_INDEX, ModelRows, PairRows, TokenRows, Vocabulary
from pretrain.tokenizer import display_tokens

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


# Tokens in words: stretches of a text whose words together are the text, special tokens told from
# what spells them.


CONTEXT_TOKENS = 16

"""Before a stretch, which decide its spaces and whole characters; so that long rows are not decoded again and again."""


def spell_stretches(stretches: Iterable[Sequence[int]], tokenizer: Tokenizer) -> Iterator[str]:
    """Yields what consecutive stretches of one text say.

    A character whose bytes are cut by the border of two stretches is shown as broken on both sides.

    Args:
        stretches: Ids; negative ones say nothing.
        tokenizer: Of the data.
    """
    before: list[int] = []
    for stretch in stretches:
        ids = [number for number in stretch if number >= 0]
        known, whole = _decode(tokenizer, before), _decode(tokenizer, before + ids)
        text = whole[len(known) :] if whole.startswith(known) else _decode(tokenizer, ids)
        if _BROKEN in text and len(ids) == 1:
            (text,) = display_tokens(tokenizer, ids)
        yield text
        before = (before + ids)[-CONTEXT_TOKENS:]


def split_special(ids: Sequence[int], special: Collection[int]) -> list[list[int]]:
    """Returns runs of ids that are all special tokens, or all not; at least one run."""
    return [list(run) for _, run in groupby(ids, key=lambda number: number in special)] or [[]]


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


_BROKEN = "\ufffd"

"""What bytes that are not a whole character decode to."""


# What each stack reads of a row, document by document.
#
# ModelRows of one row  ->  Side of the decoder, or the only stack, and Side of the encoder  ->
# Part of each document


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens that are the same to the objective.

    Attributes:
        kind: One of data_kinds.py.
        text: What they say, special tokens by their names; of hidden tokens the truth.
        special: Where special tokens lie in it, [first, end), without the space that a tokenizer puts before them.
        stands: Of hidden tokens: what the model reads instead. None: the same.
        label: Name of what is predicted in the place of a token. None: nothing, or tokens.
        inputs: Ids that are read at these places.
        targets: Ids that are predicted there, or numbers of labels; -100: none. Of a source: none at all.
    """

    kind: str
    text: str
    special: tuple[tuple[int, int], ...]
    stands: str | None
    label: str | None
    inputs: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SidePart:
    """What one stack reads of a document.

    Attributes:
        first: Its first token in the row.
        num_tokens: Tokens in the row.
        position: Position of the first token, as the model counts them.
        stretches: In order.
    """

    first: int
    num_tokens: int
    position: int
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """What one stack reads of a row, and what is shown of it.

    Attributes:
        tokens: What is shown, [T]: what is there, the truth of what is hidden, of two stacks the targets.
        inputs: [T].
        targets: [T], or nothing.
        kinds: [T], of data_kinds.py.
        documents: [T], or None: one document.
        positions: [T], or None: 0..T-1.
        filled: Tokens that are not padding.
        names: Of labels.
    """

    tokens: list[int]
    inputs: list[int]
    targets: list[int]
    kinds: Sequence[str]
    documents: np.ndarray | None
    positions: np.ndarray | None
    filled: int
    names: Sequence[str] = ()

    def _is_cut(self, place: int) -> bool:
        """Whether a stretch begins at a token; two labels side by side are two."""
        return self.kinds[place] != self.kinds[place - 1] or self.kinds[place] == "labelled"

    def parts(self, special: set[int], tokenizer: Tokenizer) -> dict[int, SidePart]:
        """Returns the part of each document, by its number."""
        return {
            0 if self.documents is None else int(self.documents[first]): SidePart(
                first=first,
                num_tokens=end - first,
                position=first if self.positions is None else int(self.positions[first]),
                stretches=tuple(self._stretches(first, end, special, tokenizer)),
            )
            for first, end in borders(self.documents, self.filled)
        }

    def _stretches(self, first: int, end: int, special: set[int], tokenizer: Tokenizer) -> Iterator[Stretch]:
        cuts = [place for place in range(first + 1, end) if self._is_cut(place)]
        spans = list(pairwise([first, *cuts, end]))
        runs = [split_special(self.tokens[low:high], special) for low, high in spans]
        spelled = spell_stretches((run for of_stretch in runs for run in of_stretch), tokenizer)
        for (low, high), of_stretch in zip(spans, runs, strict=True):
            text, places = "", []
            for run in of_stretch:
                said = next(spelled)
                if run and run[0] in special:
                    places.append((len(text + said) - len(said.lstrip()), len(text + said)))
                text += said
            inputs, is_hidden = self.inputs[low:high], self.kinds[low] in HIDDEN
            yield Stretch(
                kind=self.kinds[low],
                text=text,
                special=tuple(places),
                stands="".join(display_tokens(tokenizer, inputs)) if is_hidden else None,
                label=self.names[self.targets[low]] if self.kinds[low] == "labelled" else None,
                inputs=tuple(inputs),
                targets=tuple(self.targets[low:high]),
            )


def split_sides(
    raw: TokenRows | PairRows, made: ModelRows, kinds: Sequence[str], names: Sequence[str]
) -> tuple[Side, Side | None]:
    """Returns the target's side, or that of the only stack, and the source's.

    Args:
        raw: One row.
        made: What the objective made of it.
        kinds: Of the tokens of `made.inputs`.
        names: Of labels.
    """
    inputs, targets = made.inputs[0].tolist(), made.targets[0].tolist()
    documents, positions = _first(made.documents), _first(made.positions)
    if made.source is None:
        tokens = [t if kind in HIDDEN else i for i, t, kind in zip(inputs, targets, kinds, strict=True)]
        filled = len(inputs) - made.num_padding
        return Side(tokens, inputs, targets, kinds, documents, positions, filled, names), None
    # A token without a loss is seen where the next place reads it.
    following = np.array([*inputs[1:], IGNORE_INDEX])
    if documents is not None:
        following = np.where(np.diff(documents, append=-1) == 0, following, IGNORE_INDEX)
    tokens = [f if t == IGNORE_INDEX else t for t, f in zip(targets, following.tolist(), strict=True)]
    target = Side(tokens, inputs, targets, kinds, documents, positions, _count(raw, "target", documents, len(inputs)))
    read, documents = made.source.tokens[0].tolist(), _first(made.source.documents)
    filled = _count(raw, "source", documents, len(read))
    source = Side(read, read, [], ["source"] * len(read), documents, _first(made.source.positions), filled)
    return target, source


def _first(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else array[0]


def _count(raw: TokenRows | PairRows, side: str, documents: np.ndarray | None, width: int) -> int:
    """Returns the tokens of one side of two that are not padding: pairs tell them, corrupted rows mark the others."""
    if isinstance(raw, PairRows):
        num_tokens = getattr(raw, side).num_tokens
        assert num_tokens is not None, "rows of pairs are padded"
        return min(int(num_tokens[0]), width)
    return width if documents is None else int((documents >= 0).sum())
