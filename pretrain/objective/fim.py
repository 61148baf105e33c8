"""Fill in the middle (Bavarian et al. 2022): documents are cut in three, and the middle is learned last.

    PSM   <prefix> prefix <suffix> suffix <middle> middle        the paper's joint form of 3.1, on tokens
    SPM   <prefix> <suffix> suffix <middle> prefix middle

Documents, not rows, are rearranged, each with some probability; the end-of-document token stays at the end. A row is
read shorter than the model's by the special tokens of `max_documents` documents (config/lengths.py): nothing is
cropped, and what a row does not need of that room is padding.
"""

from itertools import pairwise

import numpy as np

from pretrain.config.objective import FimConfig, TaskConfig
from pretrain.draw import draw_uniform
from pretrain.errors import ConfigError
from pretrain.objective.causal import causal_rows
from pretrain.objective.contract import RowContext, RowMaker
from pretrain.rows import ModelRows, PairRows, TokenRows

LEAST_TOKENS = 3
"""Of a document that is rearranged, its end left out: one each for prefix, middle and suffix."""


def build_fim(config: TaskConfig, context: RowContext) -> RowMaker:
    """Raises: ConfigError: The tokenizer lacks one of the three special tokens."""
    missing = [token for token in config.fim.tokens if token not in context.vocabulary.named]
    if missing:
        raise ConfigError(
            f"objective.kind=fim needs the special tokens {', '.join(missing)}, which the tokenizer does not have",
            fix="prepare with them among tokenizer.special_tokens, or name its own in objective.fim.tokens",
        )
    prefix, suffix, middle = (context.vocabulary.named[token] for token in config.fim.tokens)

    def make(rows: TokenRows | PairRows) -> ModelRows:
        assert isinstance(rows, TokenRows), "pairs need a model with an encoder"
        moved = rearrange(rows, config.fim, (prefix, suffix, middle), context)
        return causal_rows(moved, context.document_mask)

    return make


def rearrange(rows: TokenRows, config: FimConfig, tokens: tuple[int, int, int], context: RowContext) -> TokenRows:
    """Returns rows of `context.lengths.target` tokens, some of whose documents are rearranged.

    Args:
        rows: From the stream, `context.lengths.row` + 1 tokens wide.
        config: Rates.
        tokens: Ids that begin prefix, suffix and middle.
        context: Seed, lengths, end-of-document token.
    """
    num_rows, width = rows.tokens.shape
    row_len, seq_len = context.lengths.row, context.lengths.target
    eos = context.vocabulary.eos
    moved = np.full((num_rows, seq_len + 1), eos, dtype=np.int64)
    filled = np.zeros(num_rows, dtype=np.int64)
    starts: list[int] = []
    numbers = draw_uniform("fim", context.seed, rows.sample_ids, 4 * width).reshape(num_rows, width, 4)
    borders = np.searchsorted(rows.starts, np.arange(num_rows + 1) * width)
    for row in range(num_rows):
        inside = rows.starts[borders[row] : borders[row + 1]] - row * width
        end = width if rows.num_tokens is None else int(rows.num_tokens[row])
        edges = [0, *inside[(inside > 0) & (inside < min(end, row_len))].tolist(), min(end, row_len)]
        room, at = config.max_documents, 0
        for first, last in pairwise(edges):
            if first in inside:
                starts.append(row * (seq_len + 1) + at)
            piece = rows.tokens[row, first:last].astype(np.int64)
            whether, *places = numbers[row, first]
            if room and whether < config.rate and _num_movable(piece, eos) >= LEAST_TOKENS:
                piece, room = _move(piece, places, config.spm_rate, tokens, eos), room - 1
                is_moved = True
            else:
                is_moved = False
            moved[row, at : at + len(piece)] = piece
            at += len(piece)
        if end > row_len and not is_moved:
            # The first token of the next row is still the target of this one's last, or the start of a document.
            moved[row, at] = rows.tokens[row, row_len]
            if row_len in inside:
                starts.append(row * (seq_len + 1) + at)
            at += 1
        filled[row] = at
        if at < seq_len:
            starts.append(row * (seq_len + 1) + at)
    return TokenRows(moved, np.array(starts, dtype=np.int64), filled, rows.sample_ids)


def _num_movable(piece: np.ndarray, eos: int) -> int:
    return len(piece) - int(piece[-1] == eos)


def _move(
    piece: np.ndarray, numbers: list[float], spm_rate: float, tokens: tuple[int, int, int], eos: int
) -> np.ndarray:
    """Rearranges a document; each of its three parts has at least one token."""
    size = _num_movable(piece, eos)
    # Two different cuts among the size - 1 places between tokens.
    low = int(numbers[0] * (size - 1))
    high = int(numbers[1] * (size - 2))
    high += high >= low
    low, high = sorted((low + 1, high + 1))
    prefix, middle, suffix, end = np.split(piece, (low, high, size))
    begin_prefix, begin_suffix, begin_middle = (np.array([token]) for token in tokens)
    is_spm = numbers[2] < spm_rate
    psm = (begin_prefix, prefix, begin_suffix, suffix, begin_middle, middle, end)
    spm = (begin_prefix, begin_suffix, suffix, begin_middle, prefix, middle, end)
    return np.concatenate(spm if is_spm else psm)
