"""Rows of a model in words: the text of each document of a row, its place, and the predicted parts.

    TokenRows  --objective, row by row-->  ModelRows  ->  stretches  ->  ShownRow

Ids, documents, positions and counts are those that the model gets. Kinds of stretches are
those of their tokens (`pretrain/objective/token_kinds.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pkgutil import resolve_name

import numpy as np
from tokenizers import Tokenizer

from pretrain.config.objective import ObjectiveConfig, TaskConfig
from pretrain.kinds.objectives import OBJECTIVES
from pretrain.objective import build_rows
from pretrain.objective.mixed import draw_parts
from pretrain.objective.row_maker import RowContext
from pretrain.objective.token_kinds import TokenKind, target_kinds
from pretrain.rows import IGNORE_INDEX, TokenRows, Vocabulary, select_rows
from pretrain.tokenizer.encoder import display_tokens
from pretrain.types import ModelRows

HIDDEN = (TokenKind.MASKED, TokenKind.REPLACED)
"""Kinds with another token in the place."""
CONTEXT_TOKENS = 16
"""Tokens decoded before a stretch, which decide its spaces and whole characters."""
_BROKEN = "\ufffd"
"""What bytes that are not a whole character decode to."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of one kind."""

    kind: TokenKind
    text: str  # special tokens by their names; of hidden tokens the truth
    special: tuple[tuple[int, int], ...]  # [first, end) of special tokens, without their space
    stands: str | None  # the model's input in the place of hidden tokens; None: the same
    label: str | None  # name of the label that is predicted there; None: nothing, or tokens
    inputs: tuple[int, ...]
    targets: tuple[int, ...]  # ids, or numbers of labels; -100: none. Empty for a source


@dataclass(frozen=True, slots=True)
class SidePart:
    """Part of a document that one stack reads."""

    first: int  # place of the first token in the row
    num_tokens: int
    position: int  # of the first token
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class ShownDocument:
    """Part of a document in a row."""

    source: SidePart | None  # input of the encoder of two stacks
    target: SidePart | None  # input of the decoder, or of the only stack
    goes_on: bool  # after the row


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row of T tokens; with two stacks, and a source of S tokens."""

    sample_id: int  # as in the ledger
    objective: str
    denoiser: str | None  # where the objective has several
    num_tokens: int  # T
    num_source_tokens: int | None  # S; None: one stack
    num_padding: int
    num_source_padding: int | None
    num_targets: int
    starts_inside: bool  # the first document began in an earlier row
    beyond: str | None  # target of the last token, which lies outside of the row; None: nothing
    starts_with: str | None  # first token of a decoder of two stacks; None: one stack
    documents: tuple[ShownDocument, ...]


def describe_rows(
    rows: TokenRows,
    config: ObjectiveConfig,
    context: RowContext,
    tokenizer: Tokenizer,
    names: Sequence[str] = (),
) -> list[ShownRow]:
    """Returns rows of a stream in words; `names` are the labels'.

    Raises:
        ConfigError: The tokenizer lacks a token that the objective needs.
    """
    make_rows = build_rows(config, context)
    ids = rows.sample_ids_B
    writer = _RowWriter(context, tokenizer, names)
    shown = []
    for number, kind in enumerate(draw_parts(config.weights, "objective", context.seed, ids)):
        # Objectives work row by row, so a row alone becomes what it becomes in a batch.
        raw = select_rows(rows, np.arange(len(ids)) == number)
        shown.append(writer.describe(raw, make_rows(raw), config.tasks[kind]))
    return shown


class _RowWriter:
    """Describes rows by the tokens of one vocabulary."""

    def __init__(self, context: RowContext, tokenizer: Tokenizer, names: Sequence[str]) -> None:
        self._context, self._tokenizer, self._names = context, tokenizer, names
        self._special = set(context.vocabulary.named.values())

    def describe(self, raw: TokenRows, made: ModelRows, task: TaskConfig) -> ShownRow:
        """Returns one row in words, as it came from the stream and as the objective made it."""
        kinds = kinds_of_tokens(made, task, self._context.vocabulary)
        target, source = _split_sides(raw, made, kinds)
        read = self._parts(target)
        sources = {} if source is None else self._parts(source)
        numbers = sorted(read.keys() | sources.keys())
        width = raw.tokens_BT.shape[1]
        filled = width if raw.num_tokens_B is None else int(raw.num_tokens_B[0])
        goes_on = filled == width and width - 1 not in raw.starts
        # Where the head is computed at some places only, a place predicts itself, not the next.
        predicts_next = source is None and made.target_positions_P is None
        beyond = target.targets[target.filled - 1 : target.filled] if predicts_next else []
        shown = display_tokens(self._tokenizer, [number for number in beyond if number >= 0])
        (start,) = display_tokens(self._tokenizer, [int(made.tokens_BT[0, 0])])
        return ShownRow(
            sample_id=made.sample_ids()[0],
            objective=task.kind,
            denoiser=_note_of(made, task, self._context.seed),
            num_tokens=len(target.tokens),
            num_source_tokens=None if source is None else len(source.tokens),
            num_padding=len(target.tokens) - target.filled,
            num_source_padding=None if source is None else len(source.tokens) - source.filled,
            num_targets=made.num_targets(),
            starts_inside=filled > 0 and 0 not in raw.starts,
            beyond="".join(shown) or None,
            starts_with=None if source is None else start,
            documents=tuple(ShownDocument(sources.get(n), read.get(n), goes_on and n == numbers[-1]) for n in numbers),
        )

    def _parts(self, side: "_Side") -> dict[int, SidePart]:
        """Returns the part of each document, by its number."""
        return {
            int(side.documents[first]): SidePart(
                first=first,
                num_tokens=end - first,
                position=int(side.positions[first]),
                stretches=tuple(self._stretches(side, first, end)),
            )
            for first, end in _borders(side.documents[: side.filled])
        }

    def _stretches(self, side: "_Side", first: int, end: int) -> Iterator[Stretch]:
        kinds = side.kinds
        places = range(first + 1, end)
        # Two labels next to each other are two stretches.
        cuts = [n for n in places if kinds[n] != kinds[n - 1] or kinds[n] == TokenKind.LABELLED]
        before: list[int] = []
        for low, high in pairwise([first, *cuts, end]):
            text = ""
            special = []
            for is_special, run in groupby(side.tokens[low:high], self._special.__contains__):
                ids = [number for number in run if number >= 0]
                word = self._spell(before, ids)
                before = (before + ids)[-CONTEXT_TOKENS:]
                text += word
                if is_special:
                    special.append((len(text) - len(word.lstrip()), len(text)))
            inputs = side.inputs[low:high]
            stands = "".join(display_tokens(self._tokenizer, inputs))
            yield Stretch(
                kind=kinds[low],
                text=text,
                special=tuple(special),
                stands=stands if kinds[low] in HIDDEN else None,
                label=self._names[side.targets[low]] if kinds[low] == TokenKind.LABELLED else None,
                inputs=tuple(inputs),
                targets=tuple(side.targets[low:high]),
            )

    def _spell(self, before: list[int], ids: list[int]) -> str:
        """Returns the text of ids behind others; a character on a border is broken on both sides."""
        beginning = self._tokenizer.decode(before, skip_special_tokens=False)
        text = self._tokenizer.decode(before + ids, skip_special_tokens=False)
        if text.startswith(beginning):
            text = text[len(beginning) :]
        else:
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
        if _BROKEN in text and len(ids) == 1:
            (text,) = display_tokens(self._tokenizer, ids)
        return text


def kinds_of_tokens(made: ModelRows, task: TaskConfig, vocabulary: Vocabulary) -> list[TokenKind]:
    """Returns the kind of each token [T] of one row that the decoder, or the only stack, reads."""
    if made.source is not None:
        return target_kinds(made)
    kinds: list[TokenKind] = resolve_name(OBJECTIVES[task.kind].token_kinds)(made, task.section, vocabulary)
    return kinds


def _note_of(made: ModelRows, task: TaskConfig, seed: int) -> str | None:
    note = OBJECTIVES[task.kind].row_note
    return str(resolve_name(note)(made, task.section, seed)) if note else None


def _borders(documents: np.ndarray) -> list[tuple[int, int]]:
    """Returns the range [first, end) of each document of a row without padding, int32 [T]."""
    cuts = (np.flatnonzero(np.diff(documents)) + 1).tolist()
    return list(pairwise([0, *cuts, len(documents)])) if len(documents) else []


@dataclass(frozen=True, slots=True)
class _Side:
    """One stack's part of a row."""

    tokens: list[int]  # to show [T]: the truth of hidden ones, the targets of two stacks
    inputs: list[int]
    targets: list[int]
    kinds: Sequence[TokenKind]
    documents: np.ndarray  # int32 [T]
    positions: np.ndarray  # int64 [T]
    filled: int  # tokens that are not padding


def _split_sides(raw: TokenRows, made: ModelRows, kinds: Sequence[TokenKind]) -> tuple[_Side, _Side | None]:
    """Returns the sides of the decoder (or the only stack) and of the encoder."""
    inputs = made.tokens_BT[0].tolist()
    targets = made.targets_BT[0].tolist()
    documents = _first(made.documents_BT, np.zeros(len(inputs), np.int32))
    positions = _first(made.positions_BT, np.arange(len(inputs)))
    if made.source is None:
        columns = zip(inputs, targets, kinds, strict=True)
        tokens = [target if kind in HIDDEN else token for token, target, kind in columns]
        filled = len(inputs) - made.num_padding
        return _Side(tokens, inputs, targets, kinds, documents, positions, filled), None
    # A token without a loss is seen where the next place of its document reads it.
    is_followed = np.diff(documents, append=-1) == 0
    following = np.where(is_followed, [*inputs[1:], IGNORE_INDEX], IGNORE_INDEX).tolist()
    tokens = [f if t == IGNORE_INDEX else t for t, f in zip(targets, following, strict=True)]
    filled = _count_filled(None if raw.source is None else raw, documents)
    target = _Side(tokens, inputs, targets, kinds, documents, positions, filled)
    read = made.source.tokens_BT[0].tolist()
    documents = _first(made.source.documents_BT, np.zeros(len(read), np.int32))
    positions = _first(made.source.positions_BT, np.arange(len(read)))
    filled = _count_filled(raw.source, documents)
    kinds = [TokenKind.SOURCE] * len(read)
    return target, _Side(read, read, [], kinds, documents, positions, filled)


def _first(array: np.ndarray | None, default: np.ndarray) -> np.ndarray:
    return default if array is None else array[0]


def _count_filled(side: TokenRows | None, documents: np.ndarray) -> int:
    """Returns the tokens of one of two sides that are no padding; `side` is None for no pairs."""
    if side is None:
        return int((documents >= 0).sum())
    assert side.num_tokens_B is not None, "rows of pairs are padded"
    return min(int(side.num_tokens_B[0]), len(documents))
