"""Masking against a slow reference, one token at a time, and the shares of what it does over many tokens."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.lengths import RowLengths
from pretrain.config.objective import ObjectiveConfig
from pretrain.errors import ConfigError
from pretrain.kinds.objectives.masked import MaskedConfig
from pretrain.objective import RowContext, build_rows
from pretrain.objective.masked import masked_rows
from pretrain.rows import IGNORE_INDEX, TokenRows, Vocabulary, select_rows
from pretrain.types import Batch
from pretrain.utils.rng import draw_uniform
from tests.unit.model.tiny import build, encoder_config

SIZE, EOS, MASK, SPECIAL = 61, 3, 4, (0, 1, 2, 3, 4, 60)
IS_SPECIAL = np.isin(np.arange(SIZE), SPECIAL)
ORDINARY = [number for number in range(SIZE) if number not in SPECIAL]


def find_words(ids_BT: np.ndarray, apart_BT: np.ndarray) -> np.ndarray:
    """Words of a made-up tokenizer: an id that three divides begins one, and special tokens stand alone."""
    special = IS_SPECIAL[ids_BT]
    begins = (ids_BT % 3 == 0) | apart_BT | special
    begins[:, 1:] |= special[:, :-1]
    begins[:, 0] = True
    return begins


VOCABULARY = Vocabulary(SIZE, eos=EOS, special=IS_SPECIAL, mask=MASK, find_words=find_words)


def random_rows(num_rows: int, seq_len: int, *, seed: int = 0, first_id: int = 0, padded: bool = False) -> TokenRows:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, SIZE, (num_rows, seq_len + 1)).astype(np.uint16)
    starts = np.flatnonzero(rng.random(tokens.size) < 0.1)
    sizes = rng.integers(0, seq_len + 2, num_rows) if padded else None
    return TokenRows(tokens, first_id + np.arange(num_rows), starts, sizes)


def draw(purpose: str, seed: int, sample_id: int, place: int) -> float:
    return float(draw_uniform(purpose, seed, np.array([sample_id]), place + 1)[0, place])


def mask_slowly(rows: TokenRows, config: MaskedConfig, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns inputs and targets."""
    inputs, targets = [], []
    width = rows.tokens_BT.shape[1]
    for row, (tokens, sample) in enumerate(zip(rows.tokens_BT.tolist(), rows.sample_ids_B.tolist(), strict=True)):
        real = width if rows.num_tokens_B is None else int(rows.num_tokens_B[row])
        inputs.append([])
        targets.append([])
        word = -1
        for place, token in enumerate(tokens[:-1]):
            after_special = place > 0 and tokens[place - 1] in SPECIAL
            starts = place == 0 or row * width + place in rows.starts
            word += starts or token % 3 == 0 or token in SPECIAL or after_special
            number = draw("masked", seed, sample, word if config.whole_words else place)
            if token in SPECIAL or place >= real or number >= config.rate:
                inputs[-1].append(token)
                targets[-1].append(IGNORE_INDEX)
                continue
            targets[-1].append(token)
            fate, other = (draw(f"masked {name}", seed, sample, place) for name in ("fate", "other"))
            if fate < config.random:
                inputs[-1].append(ORDINARY[int(other * len(ORDINARY))])
            else:
                inputs[-1].append(token if fate >= 1 - config.keep else MASK)
    return inputs, targets


CONFIGS = st.builds(
    MaskedConfig,
    rate=st.sampled_from([0.15, 0.5, 0.9]),
    random=st.sampled_from([0.0, 0.1, 0.5]),
    keep=st.sampled_from([0.0, 0.1, 0.5]),
    whole_words=st.booleans(),
)


@settings(max_examples=60)
@given(CONFIGS, st.integers(1, 4), st.integers(1, 14), st.integers(0, 99), st.booleans())
def test_masking_equals_the_slow_reference(config, num_rows, seq_len, seed, padded):
    rows = random_rows(num_rows, seq_len, seed=seed, first_id=1000 * seed, padded=padded)
    found = masked_rows(rows, config, VOCABULARY, seed, document_mask=True)
    inputs, targets = mask_slowly(rows, config, seed)
    assert found.tokens_BT.tolist() == inputs
    assert found.targets_BT.tolist() == targets
    flat = [place for place, target in enumerate(itertools.chain(*targets)) if target != IGNORE_INDEX]
    assert found.target_positions_P is not None and found.target_positions_P.tolist() == flat
    assert found.num_targets() == len(flat)
    assert [found.tokens_BT.dtype, found.targets_BT.dtype, found.target_positions_P.dtype] == [np.int64] * 3


def deviations(count: int, total: int, share: float) -> float:
    """How far a count of independent draws is from what is expected, in standard deviations."""
    return abs(count - share * total) / np.sqrt(total * share * (1 - share))


@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize(("rate", "random", "keep"), [(0.15, 0.1, 0.1), (0.3, 0.0, 0.0), (0.4, 0.25, 0.5)])
def test_rate_and_fates_have_their_shares_over_many_tokens(rate, random, keep, whole_words):
    rows = random_rows(400, 500)
    config = MaskedConfig(rate=rate, random=random, keep=keep, whole_words=whole_words)
    found = masked_rows(rows, config, VOCABULARY, 11, document_mask=True)
    tokens = rows.tokens_BT[:, :-1]
    candidates = int((~IS_SPECIAL[tokens]).sum())
    chosen = found.targets_BT != IGNORE_INDEX
    total = int(chosen.sum())
    # Words are chosen whole: their mean length of at most three makes the count of tokens vary more.
    assert deviations(total, candidates, rate) < (8 if whole_words else 4)
    assert not IS_SPECIAL[tokens[chosen]].any()
    assert np.array_equal(found.targets_BT[chosen], tokens[chosen])
    assert np.array_equal(found.tokens_BT[~chosen], tokens[~chosen])
    masked = int((found.tokens_BT[chosen] == MASK).sum())
    kept = int((found.tokens_BT[chosen] == tokens[chosen]).sum())
    by_chance = random / len(ORDINARY)
    for count, share in ((masked, 1 - random - keep), (kept, keep + by_chance)):
        if 0 < share < 1:
            assert deviations(count, total, share) < 4
        else:
            assert count == share * total


def test_what_replaces_a_token_is_uniform_over_the_ordinary_ones():
    rows = random_rows(600, 500)
    found = masked_rows(rows, MaskedConfig(rate=0.9, random=1.0, keep=0.0), VOCABULARY, 5, document_mask=True)
    replaced = found.tokens_BT[found.targets_BT != IGNORE_INDEX]
    counts = np.bincount(replaced, minlength=SIZE)
    assert counts[list(SPECIAL)].sum() == 0
    expected = len(replaced) / len(ORDINARY)
    statistic = ((counts[ORDINARY] - expected) ** 2 / expected).sum()
    cells = len(ORDINARY) - 1
    assert abs(statistic - cells) < 4 * np.sqrt(2 * cells)


def test_a_word_is_predicted_whole_or_not_at_all_and_words_are_independent():
    rows = random_rows(500, 300)
    found = masked_rows(rows, MaskedConfig(rate=0.2, whole_words=True), VOCABULARY, 2, document_mask=True)
    tokens = rows.tokens_BT[:, :-1].astype(np.int64)
    apart = np.zeros(tokens.shape, dtype=bool)
    row, column = np.divmod(rows.starts, 301)
    apart[row[column < 300], column[column < 300]] = True
    begins = find_words(tokens, apart)
    chosen, candidate = found.targets_BT != IGNORE_INDEX, ~IS_SPECIAL[tokens]
    within = ~begins[:, 1:] & candidate[:, 1:]
    assert within.sum() > 10_000
    assert np.array_equal(chosen[:, 1:][within], chosen[:, :-1][within])
    firsts = begins & candidate
    assert deviations(int(chosen[firsts].sum()), int(firsts.sum()), 0.2) < 4
    neighbours = firsts[:, 1:] & firsts[:, :-1]
    both = chosen[:, 1:][neighbours] & chosen[:, :-1][neighbours]
    assert deviations(int(both.sum()), int(neighbours.sum()), 0.04) < 4


@pytest.mark.parametrize("whole_words", [False, True])
def test_a_row_is_masked_alike_whatever_rows_are_beside_it(whole_words):
    config = MaskedConfig(whole_words=whole_words)
    rows = random_rows(9, 40, padded=True)
    whole = masked_rows(rows, config, VOCABULARY, 1, document_mask=True)
    chosen = np.arange(9) % 2 == 0
    for part in (chosen, ~chosen):
        found = masked_rows(select_rows(rows, part), config, VOCABULARY, 1, document_mask=True)
        assert np.array_equal(found.tokens_BT, whole.tokens_BT[part])
        assert np.array_equal(found.targets_BT, whole.targets_BT[part])
        assert np.array_equal(found.sample_ids_B, whole.sample_ids_B[part])


def test_another_seed_or_epoch_masks_anew():
    rows = random_rows(20, 200)
    chosen = [
        masked_rows(replace(rows, sample_ids_B=ids), MaskedConfig(), VOCABULARY, seed, document_mask=True).targets_BT
        > 0
        for ids, seed in ((np.arange(20), 1), (np.arange(20), 2), (np.arange(1000, 1020), 1))
    ]
    candidates = int((~IS_SPECIAL[rows.tokens_BT[:, :-1]]).sum())
    for other in chosen[1:]:
        both = int((chosen[0] & other).sum())
        assert deviations(both, candidates, 0.15 * 0.15) < 4


def test_documents_and_padding_are_apart_and_a_whole_row_is_dense():
    rows = TokenRows(np.full((2, 7), 5, np.uint16), np.arange(2), np.array([0, 4, 7]), np.array([5, 0]))
    found = masked_rows(rows, MaskedConfig(), VOCABULARY, 0, document_mask=True)
    assert found.documents_BT is not None and found.positions_BT is not None
    assert found.documents_BT.tolist() == [[0, 0, 0, 0, 1, -1], [-1] * 6]
    assert found.positions_BT.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]
    apart = masked_rows(rows, MaskedConfig(), VOCABULARY, 0, document_mask=False)
    assert apart.documents_BT is not None and apart.documents_BT.tolist() == [[0, 0, 0, 0, 0, -1], [-1] * 6]
    full = masked_rows(replace(rows, num_tokens_B=np.array([7, 6])), MaskedConfig(), VOCABULARY, 0, document_mask=False)
    assert full.documents_BT is None and full.positions_BT is None


def batch_of(rows: TokenRows, document_mask: bool = True) -> Batch:
    made = masked_rows(rows, MaskedConfig(rate=0.5), VOCABULARY, 3, document_mask)
    tensors = {
        "positions_BT": made.positions_BT,
        "documents_BT": made.documents_BT,
        "target_positions_P": made.target_positions_P,
    }
    optional = {name: None if array is None else torch.from_numpy(array) for name, array in tensors.items()}
    return Batch(torch.from_numpy(made.tokens_BT), torch.from_numpy(made.targets_BT), **optional)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packed_row_gives_what_its_documents_give_alone_and_padding_is_not_seen(attention):
    model = build(encoder_config(), dtype=torch.float64, attention=attention)
    lengths = [5, 1, 7]
    tokens = np.random.default_rng(0).integers(5, 60, 16).astype(np.uint16)[None]
    row = TokenRows(tokens, np.array([4]), np.array([0, 5, 6, 13]), np.array([13]))
    packed = batch_of(row)
    hidden = model(packed, logits=False).hidden_BTD[0]
    first = 0
    for length in lengths:
        alone = Batch(packed.tokens_BT[:, first : first + length], packed.targets_BT[:, first : first + length])
        expected = model(alone, logits=False).hidden_BTD[0]
        torch.testing.assert_close(hidden[first : first + length], expected, rtol=1e-9, atol=1e-9)
        first += length


def test_a_tokenizer_without_a_mask_token_is_refused():
    context = RowContext(0, replace(VOCABULARY, mask=None), RowLengths(8, 8))
    with pytest.raises(ConfigError, match=r"masked needs a mask token.*prepare with \[MASK\]"):
        build_rows(ObjectiveConfig(kind="masked"), context)


def test_shares_of_more_than_all_are_refused():
    with pytest.raises(ValueError, match=r"random=0.6 and keep=0.5 must sum to at most 1"):
        ObjectiveConfig.model_validate({"kind": "masked", "masked": {"random": 0.6, "keep": 0.5}})
