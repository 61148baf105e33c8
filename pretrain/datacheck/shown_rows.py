"""Rows of a model in words: what each document of a row says, its place, and what of it is predicted.

    TokenRows or PairRows  --objective, row by row-->  ModelRows  ->  documents, stretches  ->  ShownRow

Ids, documents, positions and counts are those that the model gets. Kinds of stretches:

`text`      all of it predicted            `prefix`    read in both directions, not predicted
`learned`   predicted, of a text in part   `context`   read, not predicted
`source`    source of a target             `target`    predicted after the source
`masked`    predicted, the mask token in its place; `replaced`: another token; `kept`: the token itself
`labelled`  the name of a label is predicted there
`prefix`, `middle`, `suffix`, `prefix+middle`          parts of a document that was rearranged
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from tokenizers import Tokenizer

from pretrain.config.objective import DenoiserConfig, ObjectiveConfig, TaskConfig
from pretrain.objective import build_rows
from pretrain.objective.contract import RowContext
from pretrain.objective.mixed import draw_parts
from pretrain.rows import IGNORE_INDEX, ModelRows, PairRows, TokenRows, Vocabulary, select_rows
from pretrain.tokenizer import display_tokens

HIDDEN = ("masked", "replaced")
"""Kinds with another token in the place."""
CONTEXT_TOKENS = 16
"""Tokens decoded before a stretch, which decide its spaces and whole characters."""
_BROKEN = "\ufffd"
"""What bytes that are not a whole character decode to."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of one kind.

    Attributes:
        kind: See the module.
        text: Text of the tokens, special ones by their names; of hidden tokens the truth.
        special: Ranges [first, end) of special tokens in it, without the space that a tokenizer puts before them.
        stands: Text that the model reads in the place of hidden tokens; None: the same.
        label: Name of the label that is predicted there; None: nothing, or tokens.
        inputs: Ids that are read.
        targets: Ids that are predicted, or numbers of labels; -100: none. Empty for a source.
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
    """Part of a document that one stack reads: first token in the row, tokens, position of the first, stretches."""

    first: int
    num_tokens: int
    position: int
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class ShownDocument:
    """Part of a document in a row: what the encoder of two stacks reads, what the decoder or only stack reads.

    `goes_on`: the document continues after the row.
    """

    source: SidePart | None
    target: SidePart | None
    goes_on: bool


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row.

    Attributes:
        sample_id: Id of the sample, as in the ledger.
        objective: Kind of its objective.
        denoiser: Denoiser of the objective, where it has several.
        num_tokens: Tokens of the row, T.
        num_source_tokens: Tokens of the source row, S; None: one stack.
        num_padding: Padding in T.
        num_source_padding: Padding in S.
        num_targets: Predicted tokens.
        starts_inside: The first document began in an earlier row.
        beyond: Target of the last token, which lies outside of the row; None: nothing.
        starts_with: First token of a decoder of two stacks; None: one stack.
        documents: Documents in order.
    """

    sample_id: int
    objective: str
    denoiser: str | None
    num_tokens: int
    num_source_tokens: int | None
    num_padding: int
    num_source_padding: int | None
    num_targets: int
    starts_inside: bool
    beyond: str | None
    starts_with: str | None
    documents: tuple[ShownDocument, ...]


def describe_rows(
    rows: TokenRows | PairRows,
    config: ObjectiveConfig,
    context: RowContext,
    tokenizer: Tokenizer,
    names: Sequence[str] = (),
) -> list[ShownRow]:
    """Returns rows of a stream in words; `names` are those of the labels.

    Raises:
        ConfigError: The tokenizer lacks a token that the objective needs.
    """
    make_rows = build_rows(config, context)
    ids = (rows.target if isinstance(rows, PairRows) else rows).sample_ids
    shown = []
    for number, kind in enumerate(draw_parts(config.weights, "objective", context.seed, ids)):
        # Objectives work row by row, so a row alone becomes what it becomes in a batch.
        chosen = np.arange(len(ids)) == number
        if isinstance(rows, PairRows):
            raw: TokenRows | PairRows = PairRows(select_rows(rows.source, chosen), select_rows(rows.target, chosen))
        else:
            raw = select_rows(rows, chosen)
        shown.append(_describe(raw, make_rows(raw), config.tasks[kind], context, tokenizer, names))
    return shown


def _describe(
    raw: TokenRows | PairRows,
    made: ModelRows,
    task: TaskConfig,
    context: RowContext,
    tokenizer: Tokenizer,
    names: Sequence[str],
) -> ShownRow:
    target, source = _split_sides(raw, made, kinds_of_tokens(made, task, context.vocabulary))
    special = set(context.vocabulary.named.values())
    read = _parts(target, special, names, tokenizer)
    sources = {} if source is None else _parts(source, special, names, tokenizer)
    numbers = sorted(read.keys() | sources.keys())
    starts_inside, goes_on = _cut_documents(raw.target if isinstance(raw, PairRows) else raw)
    # Where the head is computed at some places only, a place predicts itself, not the next.
    predicts_next = source is None and made.target_positions is None
    beyond = target.targets[target.filled - 1 : target.filled] if predicts_next else []
    return ShownRow(
        sample_id=int(made.sample_ids[0]),
        objective=task.kind,
        denoiser=_denoiser_of(made, task, context),
        num_tokens=len(target.tokens),
        num_source_tokens=None if source is None else len(source.tokens),
        num_padding=len(target.tokens) - target.filled,
        num_source_padding=None if source is None else len(source.tokens) - source.filled,
        num_targets=made.num_targets,
        starts_inside=starts_inside,
        beyond="".join(display_tokens(tokenizer, [number for number in beyond if number >= 0])) or None,
        starts_with=None if source is None else display_tokens(tokenizer, [int(made.inputs[0, 0])])[0],
        documents=tuple(
            ShownDocument(sources.get(number), read.get(number), goes_on and number == numbers[-1])
            for number in numbers
        ),
    )


def _denoiser_of(made: ModelRows, task: TaskConfig, context: RowContext) -> str | None:
    """Returns which of UL2's denoisers a row was drawn for, in words."""
    if task.kind != "ul2":
        return None
    weights = [denoiser.weight for denoiser in task.ul2.denoisers]
    (number,) = draw_parts(weights, "denoiser", context.seed, made.sample_ids)
    denoiser: DenoiserConfig = task.ul2.denoisers[number]
    mode = f"{denoiser.mode}: " if denoiser.mode else ""
    if denoiser.prefix:
        return f"{mode}prefix, the last {denoiser.density:.0%}"
    return f"{mode}spans, {denoiser.density:.0%} in spans of {denoiser.mean_length:g}"


def _cut_documents(raw: TokenRows) -> tuple[bool, bool]:
    """Returns whether the first document began in an earlier row, and whether the last one continues in a later."""
    width = raw.tokens.shape[1]
    filled = width if raw.num_tokens is None else int(raw.num_tokens[0])
    starts = raw.starts.tolist()
    return bool(filled) and 0 not in starts, filled == width and width - 1 not in starts


# Kinds of tokens.


def kinds_of_tokens(made: ModelRows, task: TaskConfig, vocabulary: Vocabulary) -> list[str]:
    """Returns the kind of each token [T] of one row that the decoder, or the only stack, reads."""
    inputs, targets = made.inputs[0].tolist(), made.targets[0].tolist()
    if made.source is not None:
        return ["context" if target == IGNORE_INDEX else "target" for target in targets]
    prefix = [False] * len(inputs) if made.prefix is None else made.prefix[0].tolist()
    if task.kind == "ul2":
        return ["source" if is_read else "target" for is_read in prefix]
    if task.kind in ("classify", "tag"):
        return ["text" if target == IGNORE_INDEX else "labelled" for target in targets]
    if task.kind == "masked":
        return [_masked_kind(*pair, vocabulary.mask) for pair in zip(inputs, targets, strict=True)]
    if task.kind == "fim":
        return _rearranged_kinds(made, task, vocabulary)
    if task.kind not in ("prefix", "supervised"):
        return ["text"] * len(inputs)
    # A token has a loss if the one before it predicts it.
    kinds = ["context" if target == IGNORE_INDEX else "learned" for target in [IGNORE_INDEX, *targets[:-1]]]
    return ["prefix" if is_read else kind for is_read, kind in zip(prefix, kinds, strict=True)]


def _masked_kind(stands: int, truth: int, mask: int | None) -> str:
    if truth == IGNORE_INDEX:
        return "text"
    if stands == truth:
        return "kept"
    return "masked" if stands == mask else "replaced"


def _rearranged_kinds(made: ModelRows, task: TaskConfig, vocabulary: Vocabulary) -> list[str]:
    prefix, suffix, middle = (vocabulary.named[token] for token in task.fim.tokens)
    ids = made.inputs[0].tolist()
    kinds = ["text"] * len(ids)
    documents = None if made.documents is None else made.documents[0]
    for first, end in _borders(documents, len(ids)):
        at = [place for place in range(first, end) if ids[place] in (prefix, suffix, middle)]
        if [ids[place] for place in at] != [prefix, suffix, middle] or at[0] != first:
            continue
        suffix_first = at[1] == first + 1  # then prefix and middle follow the middle's token without a border
        parts = ["suffix", "suffix", "prefix+middle"] if suffix_first else ["prefix", "suffix", "middle"]
        for part, (low, high) in zip(parts, pairwise([*at, end]), strict=True):
            kinds[low:high] = [part] * (high - low)
    return kinds


def _borders(documents: np.ndarray | None, filled: int) -> list[tuple[int, int]]:
    """Returns the range [first, end) of each document of a row (int32 [T]; None: one document), without padding."""
    if not filled:
        return []
    numbers = np.zeros(filled, np.int32) if documents is None else documents[:filled]
    return list(pairwise([0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), filled]))


# What each stack reads of a row.


@dataclass(frozen=True, slots=True)
class _Side:
    """Tokens to show [T] (the truth of hidden ones, the targets of two stacks), what is read, predicted, and kinds.

    `documents` and `positions` are [T]; None: one document, and 0..T-1. `filled` tokens are not padding.
    """

    tokens: list[int]
    inputs: list[int]
    targets: list[int]
    kinds: Sequence[str]
    documents: np.ndarray | None
    positions: np.ndarray | None
    filled: int


def _split_sides(raw: TokenRows | PairRows, made: ModelRows, kinds: Sequence[str]) -> tuple[_Side, _Side | None]:
    """Returns the side of the decoder, or of the only stack, and that of the encoder, of one row."""
    inputs, targets = made.inputs[0].tolist(), made.targets[0].tolist()
    documents, positions = _first(made.documents), _first(made.positions)
    if made.source is None:
        tokens = [t if kind in HIDDEN else i for i, t, kind in zip(inputs, targets, kinds, strict=True)]
        return _Side(tokens, inputs, targets, kinds, documents, positions, len(inputs) - made.num_padding), None
    # A token without a loss is seen where the next place reads it.
    following = np.array([*inputs[1:], IGNORE_INDEX])
    if documents is not None:
        following = np.where(np.diff(documents, append=-1) == 0, following, IGNORE_INDEX)
    tokens = [f if t == IGNORE_INDEX else t for t, f in zip(targets, following.tolist(), strict=True)]
    filled = _count_filled(raw, "target", documents, len(inputs))
    target = _Side(tokens, inputs, targets, kinds, documents, positions, filled)
    read, documents = made.source.tokens[0].tolist(), _first(made.source.documents)
    filled = _count_filled(raw, "source", documents, len(read))
    return target, _Side(read, read, [], ["source"] * len(read), documents, _first(made.source.positions), filled)


def _first(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else array[0]


def _count_filled(raw: TokenRows | PairRows, side: str, documents: np.ndarray | None, width: int) -> int:
    """Returns the tokens of one of two sides that are not padding: pairs have lengths, corrupted rows documents."""
    if isinstance(raw, PairRows):
        num_tokens = getattr(raw, side).num_tokens
        assert num_tokens is not None, "rows of pairs are padded"
        return min(int(num_tokens[0]), width)
    return width if documents is None else int((documents >= 0).sum())


def _parts(side: _Side, special: set[int], names: Sequence[str], tokenizer: Tokenizer) -> dict[int, SidePart]:
    """Returns the part of each document, by its number."""
    return {
        0 if side.documents is None else int(side.documents[first]): SidePart(
            first=first,
            num_tokens=end - first,
            position=first if side.positions is None else int(side.positions[first]),
            stretches=tuple(_stretches(side, first, end, special, names, tokenizer)),
        )
        for first, end in _borders(side.documents, side.filled)
    }


def _stretches(
    side: _Side, first: int, end: int, special: set[int], names: Sequence[str], tokenizer: Tokenizer
) -> Iterator[Stretch]:
    kinds = side.kinds
    # Two labels next to each other are two stretches.
    cuts = [n for n in range(first + 1, end) if kinds[n] != kinds[n - 1] or kinds[n] == "labelled"]
    spans = list(pairwise([first, *cuts, end]))
    runs = [[list(run) for _, run in groupby(side.tokens[low:high], special.__contains__)] for low, high in spans]
    spelled = _spell((run for of_span in runs for run in of_span), tokenizer)
    for (low, high), of_span in zip(spans, runs, strict=True):
        text = ""
        places = []
        for run in of_span:
            word = next(spelled)
            text += word
            if run[0] in special:
                places.append((len(text) - len(word.lstrip()), len(text)))
        inputs = side.inputs[low:high]
        yield Stretch(
            kind=kinds[low],
            text=text,
            special=tuple(places),
            stands="".join(display_tokens(tokenizer, inputs)) if kinds[low] in HIDDEN else None,
            label=names[side.targets[low]] if kinds[low] == "labelled" else None,
            inputs=tuple(inputs),
            targets=tuple(side.targets[low:high]),
        )


def _spell(runs: Iterable[Sequence[int]], tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the text of consecutive runs of ids; negative ids have none.

    A character whose bytes are cut by a border is shown as broken on both sides.
    """
    before: list[int] = []
    for run in runs:
        ids = [number for number in run if number >= 0]
        known = tokenizer.decode(before, skip_special_tokens=False)
        whole = tokenizer.decode(before + ids, skip_special_tokens=False)
        fits = whole.startswith(known)
        text = whole[len(known) :] if fits else tokenizer.decode(ids, skip_special_tokens=False)
        if _BROKEN in text and len(ids) == 1:
            (text,) = display_tokens(tokenizer, ids)
        yield text
        before = (before + ids)[-CONTEXT_TOKENS:]
