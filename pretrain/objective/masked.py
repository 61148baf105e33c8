"""Masked language modelling (Devlin et al. 2019, 3.1), and labels of documents, words or images.

    ordinary tokens  --drawn, by token or by word-->  targets
                     -->  mask token, random token, or unchanged

The draw is independent for each token (or word): the rate is exact on average only. The head is
computed at the target positions only.
"""

from functools import partial

import numpy as np

from pretrain.errors import ConfigError
from pretrain.kinds.objectives.masked import MaskedConfig
from pretrain.objective.row_maker import RowContext, count_padding, inner_starts, place_documents, real_tokens
from pretrain.objective.token_kinds import TokenKind
from pretrain.rows import IGNORE_INDEX, TokenRows, Vocabulary
from pretrain.types import Batch, ModelRows, RowMaker
from pretrain.utils.rng import draw_uniform


def build_masked(section: MaskedConfig, context: RowContext) -> RowMaker:
    """Raises: ConfigError: The tokenizer has no mask token."""
    find_mask("masked", context.vocabulary)
    return partial(
        masked_rows,
        config=section,
        vocabulary=context.vocabulary,
        seed=context.seed,
        document_mask=context.document_mask,
    )


def find_mask(kind: str, vocabulary: Vocabulary) -> int:
    """Returns the id of the mask token. Raises: ConfigError: There is none, and `objective.kind` needs it."""
    if vocabulary.mask is None:
        raise ConfigError(
            f"objective.kind={kind} needs a mask token, which the tokenizer does not have",
            fix="prepare with [MASK] among tokenizer.special_tokens",
        )
    return vocabulary.mask


def masked_rows(
    rows: TokenRows, config: MaskedConfig, vocabulary: Vocabulary, seed: int, document_mask: bool
) -> ModelRows:
    """Masks tokens of raw rows, whose last column belongs to other rows and is not read.

    The vocabulary has `mask`, and for whole words `find_words`; `seed` is that of the run.
    """
    assert rows.source is None, "pairs are not masked"
    seq_len = rows.tokens_BT.shape[1] - 1
    tokens = rows.tokens_BT[:, :-1].astype(np.int64)
    chosen = _draw_chosen(rows, tokens, config, vocabulary, seed)
    (ordinary,) = np.nonzero(~vocabulary.special)
    fate = draw_uniform("masked fate", seed, rows.sample_ids_B, seq_len)[chosen]
    other = draw_uniform("masked other", seed, rows.sample_ids_B, seq_len)[chosen]
    random_ids = ordinary[(other * len(ordinary)).astype(np.int64)]
    replaced = np.where(fate < config.random, random_ids, vocabulary.mask)
    inputs = tokens.copy()
    inputs[chosen] = np.where(fate >= 1 - config.keep, tokens[chosen], replaced)
    return _place(rows, inputs, np.where(chosen, tokens, IGNORE_INDEX), document_mask)


def _place(rows: TokenRows, inputs: np.ndarray, targets: np.ndarray, document_mask: bool) -> ModelRows:
    target_positions = np.flatnonzero(targets != IGNORE_INDEX)
    # Of images: one target a row.
    mixed = None if rows.mixed_B2 is None else rows.mixed_B2[target_positions // targets.shape[1]]
    positions, documents = place_documents(rows, document_mask)
    return Batch(
        inputs,
        targets,
        **rows.carried(),
        positions_BT=positions,
        documents_BT=documents,
        target_positions_P=target_positions,
        mixed_P2=mixed,
        num_padding=count_padding(rows, inputs.shape[1]),
    )


def _draw_chosen(
    rows: TokenRows, tokens: np.ndarray, config: MaskedConfig, vocabulary: Vocabulary, seed: int
) -> np.ndarray:
    seq_len = tokens.shape[1]
    number = draw_uniform("masked", seed, rows.sample_ids_B, seq_len)
    candidates = ~vocabulary.special[tokens]
    real = real_tokens(rows, seq_len)
    if real is not None:
        candidates &= real
    if config.whole_words:
        assert vocabulary.find_words is not None, "built with the vocabulary for whole_words"
        apart = np.zeros(tokens.shape, dtype=bool)
        apart[inner_starts(rows, seq_len)] = True
        begins = vocabulary.find_words(tokens, apart)
        # All tokens of a word share the number of its ordinal.
        number = np.take_along_axis(number, np.cumsum(begins, axis=1) - 1, axis=1)
    return candidates & (number < config.rate)


# Labels of documents (Devlin et al. 2019, 4.1), of words (5.3) or of images, by an encoder.
#
#     tokens [B, T+1]  ->  inputs, the last column dropped
#     labels [B, T+1]  ->  targets, at the first token of a document or of a word
#
# Documents do not see each other, and begin at position 0: packing does not change scores. An image
# is one document of as many tokens, all 0, as the model has vectors of it; the first has its class.


def build_labels(section: None, context: RowContext) -> RowMaker:
    """Labels of documents, of words or of images, at the positions given by the data."""
    return partial(label_rows, document_mask=context.document_mask)


def label_rows(rows: TokenRows, document_mask: bool) -> ModelRows:
    """Makes inputs and targets of labelled rows; with the mask, documents do not see each other."""
    assert rows.labels_BT is not None, "the data are labelled"
    inputs = rows.tokens_BT[:, :-1].astype(np.int64)
    return _place(rows, inputs, rows.labels_BT[:, :-1].astype(np.int64), document_mask)


def masked_kinds(rows: ModelRows, section: MaskedConfig, vocabulary: Vocabulary) -> list[TokenKind]:
    """Returns the kinds of the tokens of a masked row, for `pretrain data show`."""
    assert rows.target_positions_P is not None
    inputs, targets = rows.tokens_BT[0].tolist(), rows.targets_BT[0].tolist()
    kinds = [TokenKind.TEXT] * len(inputs)
    for place in rows.target_positions_P.tolist():
        if inputs[place] == targets[place]:
            kinds[place] = TokenKind.KEPT
        else:
            kinds[place] = TokenKind.MASKED if inputs[place] == vocabulary.mask else TokenKind.REPLACED
    return kinds


def label_kinds(rows: ModelRows, section: None, vocabulary: Vocabulary) -> list[TokenKind]:
    """Returns the kinds of the tokens of a labelled row, for `pretrain data show`."""
    return [TokenKind.TEXT if target == IGNORE_INDEX else TokenKind.LABELLED for target in rows.targets_BT[0].tolist()]
