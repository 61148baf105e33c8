"""The loss of each source between two rows."""

from pretrain.tracking.meter import SourceLosses


def test_a_row_has_the_mean_over_all_targets_since_the_last_one():
    losses = SourceLosses(["a", "b"])
    losses.add((6.0, 0.0, 3.0, 0.0))
    losses.add((2.0, 5.0, 1.0, 10.0))
    assert losses.take() == {"loss_a": 2.0, "loss_b": 0.5}
    losses.add((0.0, 1.0, 0.0, 4.0))
    assert losses.take() == {"loss_b": 0.25}
    assert losses.take() == {}


def test_one_source_is_not_told_apart():
    losses = SourceLosses(["data"])
    losses.add(())
    assert losses.take() == {}
