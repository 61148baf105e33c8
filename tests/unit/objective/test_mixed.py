"""Several objectives in one run: which row is of which, and that each is what its objective alone makes."""

from dataclasses import replace

import numpy as np
import pytest

from pretrain.config.lengths import RowLengths
from pretrain.config.objective import ObjectiveConfig
from pretrain.errors import ConfigError
from pretrain.kinds.objectives import OBJECTIVES
from pretrain.objective import RowContext, build_rows
from pretrain.objective.mixed import merge, mix
from pretrain.rows import IGNORE_INDEX, TokenRows, select_rows
from pretrain.types import Batch, ModelRows, StackRows
from pretrain.utils.rng import draw_uniform
from tests.unit.objective.test_causal_rows import make_rows
from tests.unit.objective.test_masked import VOCABULARY

SEED, FILL = 9, 3


def marked(number: int, length: int | None = None, seen: list | None = None):
    """An objective whose rows tell it: all inputs are its number."""

    def make(rows: TokenRows) -> ModelRows:
        num_rows, seq_len = len(rows.tokens_BT), length or rows.tokens_BT.shape[1] - 1
        if seen is not None:
            seen.append(rows)
        inputs = np.full((num_rows, seq_len), number, dtype=np.int64)
        return Batch(inputs, inputs * 10, **rows.carried())

    return make


def context(target: int) -> RowContext:
    return RowContext(SEED, VOCABULARY, RowLengths(target, target))


def test_rows_have_the_shares_of_the_weights_drawn_by_sample_alone():
    raw, weights = make_rows(30_000, 2, set()), [1.0, 0.5, 3.5]
    mixed = mix([marked(n) for n in (1, 2, 3)], weights, "objective", SEED, RowLengths(2, 2), FILL)
    found = mixed(raw).tokens_BT[:, 0]
    counts = np.bincount(found, minlength=4)[1:]
    for count, share in zip(counts, (0.2, 0.1, 0.7), strict=True):
        assert abs(count - share * 30_000) < 4 * np.sqrt(30_000 * share * (1 - share))
    numbers = draw_uniform("objective", SEED, raw.sample_ids_B, 1)[:, 0].tolist()
    assert found.tolist() == [1 if n < 0.2 else 2 if n < 0.3 else 3 for n in numbers]


def test_each_row_is_what_its_objective_alone_makes_in_the_order_of_the_samples():
    raw = make_rows(12, 8, {0, 5, 13, 40, 41, 70, 90}, [9, 8, 3, 9, 9, 0, 9, 5, 9, 9, 1, 9])
    tasks = [{"kind": "causal"}, {"kind": "prefix"}]
    mixture = [task | {"weight": 1.0} for task in tasks]
    mixed = build_rows(ObjectiveConfig.model_validate({"mixture": mixture}), context(8))(raw)
    assert mixed.sample_ids_B.tolist() == raw.sample_ids_B.tolist()
    of_second = draw_uniform("objective", SEED, raw.sample_ids_B, 1)[:, 0] >= 0.5
    assert 0 < of_second.sum() < 12
    assert mixed.prefix_BT is not None and mixed.documents_BT is not None and mixed.positions_BT is not None
    for task, chosen in zip(tasks, (~of_second, of_second), strict=True):
        alone = build_rows(ObjectiveConfig.model_validate(task), context(8))(select_rows(raw, chosen))
        assert np.array_equal(mixed.tokens_BT[chosen], alone.tokens_BT)
        assert np.array_equal(mixed.targets_BT[chosen], alone.targets_BT)
        # One without borders would be dense alone: None says what the arrays would have said.
        documents, positions = (
            np.broadcast_to(dense, alone.tokens_BT.shape) if found is None else found
            for dense, found in ((0, alone.documents_BT), (np.arange(8), alone.positions_BT))
        )
        assert np.array_equal(mixed.documents_BT[chosen], documents)
        assert np.array_equal(mixed.positions_BT[chosen], positions)
        prefix = np.zeros_like(mixed.prefix_BT[chosen]) if alone.prefix_BT is None else alone.prefix_BT
        assert np.array_equal(mixed.prefix_BT[chosen], prefix)
    assert mixed.num_targets() == (mixed.targets_BT != IGNORE_INDEX).sum()
    assert mixed.target_positions_P is None


def test_a_row_is_of_the_same_objective_whatever_rows_are_beside_it():
    raw = make_rows(20, 6, {0, 50})
    mixed = mix([marked(1), marked(2)], [2, 1], "objective", SEED, RowLengths(6, 6), FILL)
    whole = mixed(raw).tokens_BT
    for row in range(20):
        assert np.array_equal(mixed(select_rows(raw, np.arange(20) == row)).tokens_BT[0], whole[row])


def test_two_rates_of_masking_keep_the_head_to_the_masked_places():
    raw = make_rows(10, 40, set())
    raw = TokenRows(raw.tokens_BT % 50 + 5, raw.sample_ids_B, raw.starts, None)
    mixture = [{"kind": "masked", "masked": {"rate": rate}, "weight": 1} for rate in (0.1, 0.6)]
    mixed = build_rows(ObjectiveConfig.model_validate({"mixture": mixture}), context(40))(raw)
    assert mixed.target_positions_P is not None
    assert mixed.target_positions_P.tolist() == np.flatnonzero(mixed.targets_BT != IGNORE_INDEX).tolist()
    assert mixed.documents_BT is None and mixed.positions_BT is None


def test_shorter_rows_are_padded_with_a_document_that_nobody_sees():
    raw = make_rows(9, 4, set())
    mixed = mix([marked(1, 4), marked(2, 7)], [1, 1], "objective", SEED, RowLengths(4, 7), FILL)(raw)
    short = mixed.tokens_BT[:, 0] == 1
    assert 0 < short.sum() < 9
    assert mixed.tokens_BT.shape == (9, 7)
    assert (mixed.tokens_BT[short, 4:] == FILL).all() and (mixed.targets_BT[short, 4:] == IGNORE_INDEX).all()
    assert mixed.documents_BT is not None and mixed.positions_BT is not None
    assert (mixed.documents_BT[short] == [0, 0, 0, 0, -1, -1, -1]).all()
    assert (mixed.documents_BT[~short] == 0).all()
    assert (mixed.positions_BT[:, :4] == np.arange(4)).all()
    assert mixed.num_padding == 3 * short.sum()


def test_sources_of_several_lengths_are_padded_too():
    def part(sample: int, target: int, source: int) -> ModelRows:
        inputs = np.full((1, target), sample, dtype=np.int64)
        read = StackRows(np.full((1, source), sample + 10, dtype=np.int64))
        return Batch(inputs, inputs, sample_ids_B=np.array([sample]), source=read)

    found = merge([part(7, 2, 5), part(8, 3, 4)], np.array([1, 0]), RowLengths(6, 3, 5), FILL)
    assert found.sample_ids_B.tolist() == [8, 7]
    assert found.tokens_BT.tolist() == [[8, 8, 8], [7, 7, FILL]]
    assert found.source is not None
    assert found.source.tokens_BT.tolist() == [[18, 18, 18, 18, FILL], [17] * 5]
    assert found.source.documents_BT is not None and found.documents_BT is not None
    assert found.source.documents_BT.tolist() == [[0, 0, 0, 0, -1], [0] * 5]
    assert found.documents_BT.tolist() == [[0, 0, 0], [0, 0, -1]]
    assert (found.num_tokens(), found.num_padding) == (3 + 4 + 2 + 5, 2)


def test_one_objective_is_not_drawn_at_all():
    make = marked(1)
    assert mix([make], [1.0], "objective", SEED, RowLengths(4, 4), FILL) is make


@pytest.mark.parametrize("alone", [{"kind": "masked"}, {"masked": {"rate": 0.3}, "kind": "masked"}])
def test_a_mixture_beside_a_kind_is_refused(alone):
    mixture = [{"kind": "causal", "weight": 1}]
    with pytest.raises(ValueError, match=r"needs kind or mixture, and not both"):
        ObjectiveConfig.model_validate(alone | {"mixture": mixture})


@pytest.mark.parametrize("order", [("causal", "prefix"), ("prefix", "causal")])
def test_objectives_with_different_losses_are_refused(monkeypatch, order):
    """Of modules under `extend`: those of this project share one."""
    own = replace(OBJECTIVES["prefix"], loss="lab:own_loss")
    config = ObjectiveConfig.model_validate({"mixture": [{"kind": kind, "weight": 1} for kind in order]})
    build_rows(config, context(8))
    monkeypatch.setitem(OBJECTIVES, "prefix", own)
    with pytest.raises(ConfigError, match=rf"mixture: {order[0]}, {order[1]} have different losses, and a run has one"):
        build_rows(config, context(8))
