"""UL2: seven denoisers by weight, each announced by its mode, in two stacks or in one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretrain.config.data import BatchConfig
from pretrain.config.lengths import padding_share
from pretrain.config.objective import ObjectiveConfig
from pretrain.data.loader import build_batch
from pretrain.errors import ConfigError
from pretrain.kinds.corruption import DenoiserConfig, corruption_of
from pretrain.objective import build_rows
from pretrain.rows import IGNORE_INDEX, TokenRows
from pretrain.types import ModelRows
from pretrain.utils.rng import draw_uniform
from tests.unit.model.tiny import build, tiny_config, two_stacks_config
from tests.unit.objective.texts import (
    EOS,
    NAMED,
    PAD,
    SENTINELS,
    SIZE,
    context_of,
    logits_of,
    put_back,
    rows_of,
)

DENOISERS = ObjectiveConfig().ul2.denoisers
MODES = {NAMED["[NLU]"]: 0, NAMED["[NLG]"]: 1, NAMED["[S2S]"]: 2}
SMALL = [  # what a vocabulary of 60 sentinels and rows of tens of tokens allow
    {"mode": "[NLU]", "density": 0.15, "mean_length": 3.0},
    {"mode": "[NLG]", "density": 0.5, "mean_length": 8.0, "weight": 2.0},
    {"mode": "[S2S]", "density": 0.25, "prefix": True},
]


def test_the_denoisers_are_those_of_table_1():
    # Tay et al. 2023, table 1 and 3.1.2: R (3, 15%) and (8, 15%); X (3 and 8, 50%), (64, 15% and 50%); S: the last 25%.
    of_mode = [(d.mode, None if d.prefix else d.mean_length, d.density) for d in DENOISERS]
    assert sorted(of_mode, key=str) == sorted(
        [
            ("[NLU]", 3.0, 0.15),
            ("[NLU]", 8.0, 0.15),
            ("[NLG]", 3.0, 0.5),
            ("[NLG]", 8.0, 0.5),
            ("[NLG]", 64.0, 0.15),
            ("[NLG]", 64.0, 0.5),
            ("[S2S]", None, 0.25),
        ],
        key=str,
    )
    assert {d.weight for d in DENOISERS} == {1.0}


def make(num_rows: int, seq_len: int, num_stacks: int = 2, seed: int = 7, denoisers: list | None = None):
    """Rows, what they were, and which denoiser each had."""
    ul2 = {"denoisers": SMALL if denoisers is None else denoisers}
    config, context = context_of(seq_len, num_stacks=num_stacks, seed=seed, kind="ul2", ul2=ul2)
    raw = rows_of(num_rows, context.lengths.row, seed=seed)
    bounds = np.cumsum([d.weight for d in config.ul2.denoisers])
    number = draw_uniform("denoiser", seed, raw.sample_ids_B, 1)[:, 0]
    return build_rows(config, context)(raw), raw, np.searchsorted(bounds / bounds[-1], number, side="right"), context


def sides(made: ModelRows, row: int, found) -> tuple[list[int], list[int]]:
    """Source and target of a row, without padding."""
    if made.source is not None:
        return made.source.tokens_BT[row, : found.source].tolist(), made.targets_BT[row, : found.target].tolist()
    whole = [*made.tokens_BT[row].tolist(), made.targets_BT[row, -1]][: found.source + found.target]
    last = made.targets_BT[row, found.source + found.target - 2]
    return whole[: found.source], [*whole[found.source :], last][: found.target]


@given(st.integers(12, 90), st.sampled_from([1, 2]), st.integers(0, 1000))
def test_every_denoiser_can_be_put_back(seq_len, num_stacks, seed):
    made, raw, kinds, context = make(6, seq_len, num_stacks, seed)
    row_len = context.lengths.row
    for row, kind in enumerate(kinds.tolist()):
        denoiser = DenoiserConfig.model_validate(SMALL[kind])
        found = corruption_of(row_len, denoiser)
        source, target = sides(made, row, found)
        assert len(source) == found.source and len(target) == found.target
        assert source[0] == NAMED[denoiser.mode] and source[-1] == target[-1] == EOS
        if denoiser.prefix:
            assert not set(SENTINELS) & {*source, *target}
            assert source[1:-1] + target[:-1] == raw.tokens_BT[row, :row_len].tolist()
        else:
            assert put_back(source[1:-1], target[:-1]) == raw.tokens_BT[row, :row_len].tolist()


def test_rows_are_of_each_denoiser_by_its_weight():
    made, _, kinds, _ = make(4000, 40)
    assert [MODES[mode] for mode in made.source.tokens_BT[:, 0].tolist()] == kinds.tolist()
    # Binomial with a deviation of at most sqrt(0.25 x 4000) = 32 rows: five of them.
    assert np.abs(np.bincount(kinds) - 4000 * np.array([0.25, 0.5, 0.25])).max() <= 160


def test_all_that_a_row_does_not_fill_is_padding_without_a_loss():
    for num_stacks in (1, 2):
        made, _, kinds, context = make(40, 60, num_stacks)
        found = [corruption_of(context.lengths.row, DenoiserConfig.model_validate(SMALL[kind])) for kind in kinds]
        assert made.num_targets() == sum(one.target for one in found) == (made.targets_BT != IGNORE_INDEX).sum()
        padding = (made.documents_BT < 0).sum()
        if num_stacks == 2:
            assert [(row >= 0).sum() for row in made.source.documents_BT] == [one.source for one in found]
            assert [(row >= 0).sum() for row in made.documents_BT] == [one.target for one in found]
            padding += (made.source.documents_BT < 0).sum()
        else:
            assert [(row >= 0).sum() for row in made.documents_BT] == [one.source + one.target - 1 for one in found]
            assert [row.sum() for row in made.prefix_BT] == [one.source for one in found]
        assert (made.targets_BT[made.documents_BT < 0] == IGNORE_INDEX).all()
        assert made.num_padding == padding > 0


def test_the_share_of_padding_is_the_expected_one():
    made, _, _, _ = make(4000, 60)
    objective = ObjectiveConfig.model_validate({"kind": "ul2", "ul2": {"denoisers": SMALL}})
    batch = BatchConfig(global_tokens=60, seq_len=60, micro=1)
    whole = made.tokens_BT.size + made.source.tokens_BT.size
    # Shares of rows are drawn: a deviation of 0.008 of them moves the padding by a few thousandths.
    assert made.num_padding / whole == pytest.approx(padding_share(objective, batch, 2), abs=0.01)


@pytest.mark.parametrize("num_stacks", [1, 2])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_is_never_seen(num_stacks, attention):
    made, _, kinds, context = make(6, 40, num_stacks)
    assert len(set(kinds.tolist())) == 3
    model = model_of(num_stacks, attention)
    batch = build_batch(made)
    other = replace(batch, tokens_BT=torch.where(batch.documents_BT < 0, 77, batch.tokens_BT))
    if batch.source is not None:
        tokens_BS = torch.where(batch.source.documents_BT < 0, 78, batch.source.tokens_BT)
        other = replace(other, source=replace(batch.source, tokens_BT=tokens_BS))
    real = batch.documents_BT >= 0
    found, expected = logits_of(model, batch)[real], logits_of(model, other)[real]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    # And a row of a batch is what the row alone is, without padding.
    for row, kind in enumerate(kinds.tolist()):
        one = corruption_of(context.lengths.row, DenoiserConfig.model_validate(SMALL[kind]))
        length = one.target if num_stacks == 2 else one.source + one.target - 1
        part = alone(batch, row, length, one.source)
        torch.testing.assert_close(
            logits_of(model, batch)[row, :length], logits_of(model, part)[0], rtol=1e-9, atol=1e-9
        )


def alone(batch, row: int, length: int, source_len: int):
    cut = {"tokens_BT": batch.tokens_BT[row : row + 1, :length], "targets_BT": batch.targets_BT[row : row + 1, :length]}
    prefix = None if batch.prefix_BT is None else batch.prefix_BT[row : row + 1, :length]
    source = batch.source
    if source is not None:
        source = type(source)(source.tokens_BT[row : row + 1, :source_len])
    return type(batch)(**cut, prefix_BT=prefix, source=source)


def model_of(num_stacks: int, attention: str = "sdpa"):
    config = two_stacks_config() if num_stacks == 2 else tiny_config()
    config = config.model_copy(update={"vocab_size": SIZE})
    return build(config, attention=attention, dtype=torch.float64, scale=3.0)


def test_one_stack_reads_the_source_both_ways_and_learns_the_target_only():
    made, _, kinds, context = make(8, 60, 1)
    for row, kind in enumerate(kinds.tolist()):
        found = corruption_of(context.lengths.row, DenoiserConfig.model_validate(SMALL[kind]))
        learned = np.flatnonzero(made.targets_BT[row] != IGNORE_INDEX)
        # The last token of the source predicts the first of the target; its last predicts nothing, and is not read.
        assert learned.tolist() == list(range(found.source - 1, found.source + found.target - 1))
        assert np.flatnonzero(made.prefix_BT[row]).tolist() == list(range(found.source))
        assert made.targets_BT[row, learned[:-1]].tolist() == made.tokens_BT[row, learned[1:]].tolist()


@pytest.mark.parametrize("num_stacks", [1, 2])
def test_rows_that_are_not_full_learn_what_is_there(num_stacks):
    config, context = context_of(60, num_stacks=num_stacks, kind="ul2", ul2={"denoisers": SMALL})
    raw = rows_of(12, context.lengths.row)
    sizes = np.array([context.lengths.row + 1, context.lengths.row // 2, 0] * 4)
    model, found = model_of(num_stacks), []
    for other in (EOS, 77):
        tokens = np.where(np.arange(raw.tokens_BT.shape[1]) < sizes[:, None], raw.tokens_BT, other)
        made = build_rows(config, context)(TokenRows(tokens, raw.sample_ids_B, raw.starts, sizes))
        learned = made.targets_BT != IGNORE_INDEX
        assert made.num_targets() == learned.sum()
        assert not learned[2::3].any() and learned[0::3].any(axis=1).all()
        assert (made.documents_BT[learned] == 0).all()
        found.append(
            (made.targets_BT[learned].tolist(), logits_of(model, build_batch(made))[torch.from_numpy(learned)])
        )
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-10, atol=1e-10)


def test_a_denoiser_alone_makes_the_rows_that_it_makes_among_others():
    made, raw, kinds, context = make(30, 60)
    for number, denoiser in enumerate(SMALL):
        config = ObjectiveConfig.model_validate({"kind": "ul2", "ul2": {"denoisers": [denoiser]}})
        one = build_rows(config, context)(raw)
        for row in np.flatnonzero(kinds == number).tolist():
            size, source_size = one.targets_BT.shape[1], one.source.tokens_BT.shape[1]
            assert made.targets_BT[row, :size].tolist() == one.targets_BT[row].tolist()
            assert made.tokens_BT[row, :size].tolist() == one.tokens_BT[row].tolist()
            assert made.source.tokens_BT[row, :source_size].tolist() == one.source.tokens_BT[row].tolist()


def test_without_a_mode_a_source_begins_with_the_text():
    denoisers = [{"density": 0.15}, {"density": 0.25, "prefix": True}]
    made, raw, kinds, _ = make(10, 40, denoisers=denoisers)
    assert set(kinds.tolist()) == {0, 1}
    assert made.source.tokens_BT[:, 0].tolist() == raw.tokens_BT[:, 0].tolist()
    assert (made.tokens_BT[:, 0] == PAD).all()


@pytest.mark.parametrize("missing", ["[NLU]", "[NLG]", "[S2S]"])
def test_a_tokenizer_without_a_mode_is_refused(missing):
    config, context = context_of(60, kind="ul2", ul2={"denoisers": SMALL})
    named = {name: number for name, number in NAMED.items() if name != missing}
    with pytest.raises(
        ConfigError,
        match=rf"^the tokenizer has no special token \{missing[:-1]}\], the mode of a denoiser; prepare with it among "
        r"tokenizer.special_tokens, or set its mode to null$",
    ):
        build_rows(config, replace(context, vocabulary=replace(context.vocabulary, named=named)))


def test_sentinels_are_counted_for_every_denoiser():
    config, context = context_of(512, kind="ul2")
    with pytest.raises(ConfigError, match=r"rows of 567 tokens lose 95 spans \(density=0.5, mean_length=3.0\)"):
        build_rows(config, context)
