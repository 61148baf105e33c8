"""How many tokens the model reads: what speed is reported by."""

from dataclasses import replace

import numpy as np
import pytest

from pretrain.config.lengths import RowLengths
from pretrain.config.objective import ObjectiveConfig
from pretrain.objective import RowContext, build_rows
from pretrain.rows import TokenRows, Vocabulary

SPECIAL = np.isin(np.arange(100), (0, 1, 2, 90, 91, 92, 93, 94, 95, 96))
VOCABULARY = Vocabulary(100, eos=1, special=SPECIAL, pad=0, start=0, mask=2, sentinels=(90, 91, 92, 93))


def rows(num_rows: int, seq_len: int, num_tokens: list[int] | None) -> TokenRows:
    tokens = np.full((num_rows, seq_len + 1), 7, dtype=np.uint16)
    sizes = None if num_tokens is None else np.array(num_tokens)
    starts = np.arange(num_rows) * (seq_len + 1)
    return TokenRows(tokens, np.arange(num_rows), starts, sizes)


def make(raw, target, source=None, num_stacks=1, **objective):
    context = RowContext(3, VOCABULARY, RowLengths(target, target, source), num_stacks)
    return build_rows(ObjectiveConfig.model_validate(objective), context)(raw)


@pytest.mark.parametrize("kind", ["causal", "masked", "prefix", "supervised"])
def test_padding_is_not_read_and_positions_without_a_loss_are(kind):
    assert make(rows(3, 8, None), 8, kind=kind).num_tokens() == 24
    # The ninth token of a row is only ever a target.
    assert make(rows(3, 8, [9, 8, 3]), 8, kind=kind).num_tokens() == 8 + 8 + 3
    assert make(rows(2, 8, [0, 0]), 8, kind=kind).num_tokens() == 0


def test_source_and_target_of_a_pair_both_count():
    pairs = replace(rows(2, 8, [5, 9]), source=rows(2, 6, [6, 2]))
    assert make(pairs, 8, 6, num_stacks=2, kind="seq2seq").num_tokens() == (6 + 2) + (5 + 8)


def test_the_padding_of_a_mixture_is_not_read():
    mixture = [{"kind": "causal", "weight": 1}, {"kind": "prefix", "weight": 1}]
    assert make(rows(8, 8, [9, 8, 7, 6, 5, 4, 3, 0]), 8, mixture=mixture).num_tokens() == 8 + 8 + 7 + 6 + 5 + 4 + 3
    # Rows of 8 tokens where those of another objective have 10: two positions of each are padding.
    assert make(rows(8, 8, None), 10, mixture=mixture).num_tokens() == 64
