"""What each stack reads of a row, document by document.

ModelRows of one row  ->  Side of the decoder, or the only stack, and Side of the encoder  ->  Part of each document
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tokenizers import Tokenizer

from pretrain.datacheck.kinds import HIDDEN, borders
from pretrain.datacheck.spell import spell_stretches, split_special
from pretrain.rows import IGNORE_INDEX, ModelRows, PairRows, TokenRows
from pretrain.tokenizer import display_tokens


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
class Part:
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

    def parts(self, special: set[int], tokenizer: Tokenizer) -> dict[int, Part]:
        """Returns the part of each document, by its number."""
        return {
            0 if self.documents is None else int(self.documents[first]): Part(
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
