"""Patience with a run that sends no rows."""

from pretrain.tracking.tracker import StallWatch


def test_patience_grows_with_the_longest_gap_and_one_stall_is_told_once():
    now = [0.0]
    watch = StallWatch(60.0, clock=lambda: now[0])
    assert watch.patience_s == 60.0
    watch.see(10)
    now[0] = 100.0
    watch.see(20)
    assert watch.patience_s == 300.0
    watch.give_up()
    assert watch.patience_s is None
    watch.see(30)
    assert (watch.patience_s, watch.last_step) == (300.0, 30)


def test_zero_is_for_ever():
    assert StallWatch(0.0).patience_s is None
