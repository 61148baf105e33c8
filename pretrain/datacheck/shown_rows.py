"""Rows of a model in words: what each document of a row says, where it lies, and what of it is predicted.

    TokenRows or PairRows  --objective, row by row-->  ModelRows  ->  documents, stretches  ->  ShownRow

Ids, documents, positions and counts are those that the model gets. Not here: what tokens are to an objective
(data_kinds.py), stacks
and stretches (data_sides.py), colours and terminals (data_show_text.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from pretrain.config.lengths import RowLengths
from pretrain.config.objective import DenoiserConfig, ObjectiveConfig, TaskConfig
from pretrain.datacheck.sides import SidePart, kinds_of_tokens, split_sides
from pretrain.objective import build_rows
from pretrain.objective.contract import RowContext, RowMaker
from pretrain.objective.mixed import mix
from pretrain.rows import ModelRows, PairRows, TokenRows, select_rows
from pretrain.tokenizer import display_tokens


@dataclass(frozen=True, slots=True)
class ShownDocument:
    """A document, or what a row holds of it.

    Attributes:
        source: What the encoder of two stacks reads of it. None: nothing.
        target: What the decoder, or the only stack, reads of it. None: nothing.
        goes_on: It goes on after the row.
    """

    source: SidePart | None
    target: SidePart | None
    goes_on: bool


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row.

    Attributes:
        sample_id: As in the ledger.
        objective: Its kind.
        denoiser: Which of the objective's, where it has several.
        num_tokens: T.
        num_source_tokens: S. None: one stack.
        num_padding: Of T, behind the last document.
        num_source_padding: Of S.
        num_targets: Predicted tokens.
        starts_inside: The first document began in an earlier row.
        beyond: What the last token predicts, which is read in another row or never. None: nothing.
        starts_with: What a decoder of two stacks reads before each document's target. None: one stack.
        documents: In order.
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
    """Returns rows in words.

    Args:
        rows: From a stream.
        config: What makes the model's rows of them.
        context: Likewise.
        tokenizer: Of the data.
        names: Of its labels.

    Raises:
        ConfigError: The tokenizer lacks a token that the objective needs.
    """
    make_rows = build_rows(config, context)
    ids = (rows.target if isinstance(rows, PairRows) else rows).sample_ids
    shown = []
    for number, (task, denoiser) in enumerate(draw_objectives(config, context, ids)):
        # What becomes of a row does not depend on those beside it.
        raw = _select(rows, np.arange(len(ids)) == number)
        shown.append(_describe(raw, make_rows(raw), task, denoiser, context, tokenizer, names))
    return shown


def _select(rows: TokenRows | PairRows, chosen: np.ndarray) -> TokenRows | PairRows:
    if isinstance(rows, PairRows):
        return PairRows(select_rows(rows.source, chosen), select_rows(rows.target, chosen))
    return select_rows(rows, chosen)


def _describe(
    raw: TokenRows | PairRows,
    made: ModelRows,
    task: TaskConfig,
    denoiser: DenoiserConfig | None,
    context: RowContext,
    tokenizer: Tokenizer,
    names: Sequence[str],
) -> ShownRow:
    target, source = split_sides(raw, made, kinds_of_tokens(made, task, context.vocabulary), names)
    special = set(context.vocabulary.named.values())
    read = target.parts(special, tokenizer)
    sources = {} if source is None else source.parts(special, tokenizer)
    numbers = sorted(read.keys() | sources.keys())
    starts_inside, goes_on = _cut_documents(raw.target if isinstance(raw, PairRows) else raw)
    # Where the head is computed at some places only, a place predicts itself, not the next.
    predicts_next = source is None and made.target_positions is None
    beyond = target.targets[target.filled - 1 : target.filled] if predicts_next else []
    return ShownRow(
        sample_id=int(made.sample_ids[0]),
        objective=task.kind,
        denoiser=None if denoiser is None else _name(denoiser),
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


def _name(denoiser: DenoiserConfig) -> str:
    mode = f"{denoiser.mode}: " if denoiser.mode else ""
    if denoiser.prefix:
        return f"{mode}prefix, the last {denoiser.density:.0%}"
    return f"{mode}spans, {denoiser.density:.0%} in spans of {denoiser.mean_length:g}"


def _cut_documents(raw: TokenRows) -> tuple[bool, bool]:
    """Returns whether the first document began in an earlier row, and whether the last one goes on in a later."""
    width = raw.tokens.shape[1]
    filled = width if raw.num_tokens is None else int(raw.num_tokens[0])
    starts = raw.starts.tolist()
    return bool(filled) and 0 not in starts, filled == width and width - 1 not in starts


# Which objective, and which of its denoisers, a row is of: the draw that mixes rows is asked to mix
# their numbers.


def draw_objectives(
    config: ObjectiveConfig, context: RowContext, sample_ids: np.ndarray
) -> list[tuple[TaskConfig, DenoiserConfig | None]]:
    """Returns the objective of each row, and its denoiser where the objective has several.

    Args:
        config: Of the run.
        context: Of the run.
        sample_ids: int64 [B].
    """
    tasks = [config.tasks[number] for number in _draw(config.weights, "objective", context, sample_ids)]
    kinds: list[tuple[TaskConfig, DenoiserConfig | None]] = []
    for place, task in enumerate(tasks):
        denoiser = None
        if task.kind == "ul2":
            weights = [denoiser.weight for denoiser in task.ul2.denoisers]
            (number,) = _draw(weights, "denoiser", context, sample_ids[place : place + 1])
            denoiser = task.ul2.denoisers[number]
        kinds.append((task, denoiser))
    return kinds


def _draw(weights: Sequence[float], purpose: str, context: RowContext, sample_ids: np.ndarray) -> list[int]:
    rows = TokenRows(np.zeros((len(sample_ids), 2), np.int64), np.empty(0, np.int64), None, sample_ids)
    makers = [_say(number) for number in range(len(weights))]
    mixed = mix(makers, weights, purpose, context.seed, RowLengths(1, 1), 0)(rows)
    return [int(number) for number in mixed.inputs[:, 0]]


def _say(number: int) -> RowMaker:
    """Returns what makes rows of one token, a number."""

    def make(rows: TokenRows | PairRows) -> ModelRows:
        assert isinstance(rows, TokenRows), "made here"
        numbers = np.full((len(rows.sample_ids), 1), number)
        return ModelRows(numbers, numbers, len(numbers), rows.sample_ids)

    return make
