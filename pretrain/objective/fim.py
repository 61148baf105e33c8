"""Fill in the middle (Bavarian et al. 2022): the middle of a document is moved to its end.

    PSM   <prefix> prefix <suffix> suffix <middle> middle        joint form of the paper's 3.1
    SPM   <prefix> <suffix> suffix <middle> prefix middle

Documents, not rows, are rearranged, each with probability `rate`; their start token stays at the
start, and the end-of-document token at the end. A raw row is shorter than a model row by the
special tokens of `max_documents` documents (config/lengths.py): nothing is cropped, and unused
room is padding.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pretrain.errors import ConfigError
from pretrain.kinds.objectives.fim import FimConfig
from pretrain.objective.causal import causal_rows
from pretrain.objective.row_maker import RowContext, inner_starts
from pretrain.objective.token_kinds import TokenKind
from pretrain.rows import TokenRows, Vocabulary
from pretrain.types import ModelRows, RowMaker
from pretrain.utils.rng import draw_uniform

LEAST_TOKENS = 3
"""Shortest rearranged document, without its end: one token each for prefix, middle and suffix."""


def build_fim(section: FimConfig, context: RowContext) -> RowMaker:
    """Raises: ConfigError: The tokenizer lacks one of the three special tokens."""
    missing = [token for token in section.tokens if token not in context.vocabulary.named]
    if missing:
        needed = f"the special tokens {', '.join(missing)}, which the tokenizer does not have"
        fix = "prepare with them among tokenizer.special_tokens, or name its own in objective.fim.tokens"
        raise ConfigError(f"objective.kind=fim needs {needed}", fix=fix)
    marks = np.array([context.vocabulary.named[token] for token in section.tokens])

    def make(rows: TokenRows) -> ModelRows:
        assert rows.source is None, "pairs need a model with an encoder"
        return causal_rows(rearrange(rows, section, marks, context), context.document_mask)

    return make


class _Pieces(NamedTuple):
    """Row, first column and size of each part of a document in a row, int64 [pieces], in order.

    The last column, target of the row's last token, is a piece of its own, and so is the start
    token of a document. `begins`: the piece is the beginning of a document.
    """

    row: np.ndarray
    first: np.ndarray
    size: np.ndarray
    begins: np.ndarray


class _Moves(NamedTuple):
    """Rearrangement of each piece; all but `moved` are offsets within the piece.

    Attributes:
        moved: bool [pieces]: the piece is rearranged.
        cuts: int64 [3, pieces]: begin of middle, suffix and end.
        shifts: int64 [4, pieces]: shift of prefix, middle, suffix and end.
        marks: int64 [3, pieces]: places of the three special tokens.
    """

    moved: np.ndarray
    cuts: np.ndarray
    shifts: np.ndarray
    marks: np.ndarray


def rearrange(rows: TokenRows, config: FimConfig, marks: np.ndarray, context: RowContext) -> TokenRows:
    """Returns rows that are wider by three tokens for each of `config.max_documents`.

    The last column stays the target of the row's last token, unless the last document was
    rearranged. `marks` are the ids that begin prefix, suffix and middle.
    """
    row_len = context.lengths.row
    num_rows, width = len(rows.tokens_BT), row_len + 3 * config.max_documents + 1
    pieces = _find_pieces(rows, row_len, context.vocabulary.bos)
    moves = _draw_moves(pieces, rows, config, context)
    is_needed = ~((pieces.first == row_len) & np.append(False, moves.moved[:-1]))
    pieces = _Pieces(*(values[is_needed] for values in pieces))
    moves = _Moves(*(values[..., is_needed] for values in moves))

    # Each piece is shifted by the special tokens of the pieces before it in its row.
    base = pieces.row * width + pieces.first + 3 * _sum_before(moves.moved, pieces.row)
    piece = np.repeat(np.arange(len(base)), pieces.size)
    offset = _sum_before(np.ones_like(piece), piece)
    part = (offset >= moves.cuts[:, piece]).sum(axis=0)
    result = np.full(num_rows * width, context.vocabulary.eos, dtype=np.int64)
    place = base[piece] + offset + moves.shifts[part, piece]
    result[place] = rows.tokens_BT[pieces.row[piece], pieces.first[piece] + offset]
    result[(base + moves.marks)[:, moves.moved]] = marks[:, None]

    filled = np.bincount(pieces.row, pieces.size + 3 * moves.moved, num_rows).astype(np.int64)
    (short,) = np.nonzero(filled < width - 1)
    starts = np.concatenate((base[pieces.begins], short * width + filled[short]))
    tokens = result.reshape(num_rows, width)
    return TokenRows(tokens, **rows.carried(), starts=np.sort(starts), num_tokens_B=filled)


def _find_pieces(rows: TokenRows, row_len: int, bos: int | None) -> _Pieces:
    num_rows, width = rows.tokens_BT.shape
    assert width == row_len + 1, "rows as they are read"
    real = np.full(num_rows, width) if rows.num_tokens_B is None else rows.num_tokens_B
    every = np.arange(num_rows)
    inner_row, inner_column = inner_starts(rows, row_len)
    row = np.concatenate((every, inner_row, every))
    column = np.concatenate((np.zeros_like(every), inner_column, np.full(num_rows, row_len)))
    after_bos = rows.starts[rows.tokens_BT.ravel()[rows.starts] == bos] + 1
    bos_row, bos_column = np.divmod(after_bos[after_bos % width > 0], width)
    row, column = np.concatenate((row, bos_row)), np.concatenate((column, bos_column))
    borders = np.unique((row * width + column)[column < real[row]])
    row, first = np.divmod(borders, width)
    is_last = np.diff(row, append=-1) != 0
    end = np.where(is_last, real[row], np.roll(first, -1))
    return _Pieces(row, first, end - first, np.isin(borders, rows.starts))


def _draw_moves(pieces: _Pieces, rows: TokenRows, config: FimConfig, context: RowContext) -> _Moves:
    """Draws the pieces to rearrange, and their cuts: each part has at least one token."""
    number = _sum_before(np.ones_like(pieces.row), pieces.row)
    drawn = draw_uniform("fim", context.seed, rows.sample_ids_B, 4 * (int(number.max(initial=0)) + 1))
    chance, left, right, which = drawn.reshape(len(drawn), -1, 4)[pieces.row, number].T
    ends = rows.tokens_BT[pieces.row, pieces.first + pieces.size - 1] == context.vocabulary.eos
    movable = pieces.size - ends
    wanted = (chance < config.rate) & (movable >= LEAST_TOKENS)
    moved = wanted & (_sum_before(wanted, pieces.row) < config.max_documents)
    # Two different cuts, uniform among the borders between tokens.
    one = (left * (movable - 1)).astype(np.int64)
    other = (right * (movable - 2)).astype(np.int64)
    other += other >= one
    low = np.minimum(one, other) + 1
    high = np.maximum(one, other) + 1
    num_suffix = movable - high
    zero = np.zeros_like(low)
    three = np.full_like(low, 3)
    # Shifts and marks of each form.
    psm = (zero + 1, num_suffix + 3, 2 - (high - low), three), (zero, low + 1, low + num_suffix + 2)
    spm = (num_suffix + 3, num_suffix + 3, 2 - high, three), (zero, zero + 1, num_suffix + 2)
    shifts, marks = (np.where(which < config.spm_rate, spm[k], psm[k]) for k in (0, 1))
    return _Moves(moved, np.stack((low, high, movable)), np.where(moved, shifts, 0), marks)


def _sum_before(values: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Returns, for each value, the sum of the values before it in its row; `row` is ascending."""
    before = np.cumsum(values) - values
    (first,) = np.nonzero(np.diff(row, prepend=-1))
    return before - np.repeat(before[first], np.diff(first, append=len(row)))


def rearranged_kinds(rows: ModelRows, section: FimConfig, vocabulary: Vocabulary) -> list[TokenKind]:
    """Returns the kinds of the tokens of a row, for `pretrain data show`: parts of rearranged documents."""
    marks = [vocabulary.named[token] for token in section.tokens]
    ids = rows.tokens_BT[0].tolist()
    kinds = [TokenKind.TEXT] * len(ids)
    for first, end in document_borders(rows):
        at = [place for place in range(first, end) if ids[place] in marks]
        if [ids[place] for place in at] != marks or at[0] != first:
            continue
        parts = [TokenKind.PREFIX, TokenKind.SUFFIX, TokenKind.MIDDLE]
        if at[1] == first + 1:  # prefix and middle follow the middle's token without a border
            parts = [TokenKind.SUFFIX, TokenKind.SUFFIX, TokenKind.PREFIX_AND_MIDDLE]
        for part, (low, high) in zip(parts, pairwise([*at, end]), strict=True):
            kinds[low:high] = [part] * (high - low)
    return kinds


def document_borders(rows: ModelRows) -> list[tuple[int, int]]:
    """Returns the range [first, end) of each document of one row."""
    length = rows.tokens_BT.shape[1]
    if rows.documents_BT is None:
        return [(0, length)]
    cuts = (np.flatnonzero(np.diff(rows.documents_BT[0])) + 1).tolist()
    return list(pairwise([0, *cuts, length]))
