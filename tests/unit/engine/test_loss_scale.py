"""The loss scale of DeepSpeed's optimizers: read, set, and no error at its least."""

from types import SimpleNamespace

import pytest

from pretrain.engine.deepspeed_engine import FIELDS, never_raise, read_loss_scale, set_loss_scale
from tests.helpers.fake_zero import FakeFixedScaler, FakeScaler


def with_scaler(scaler):
    return SimpleNamespace(loss_scaler=scaler)


def test_what_was_read_is_set():
    one, other = FakeScaler(), FakeScaler()
    for number, name in enumerate(FIELDS):
        setattr(one, name, 8.0 + number)
    values = read_loss_scale(with_scaler(one))
    assert values == {
        "loss_scale.cur_scale": 8.0,
        "loss_scale.cur_iter": 9.0,
        "loss_scale.last_overflow_iter": 10.0,
        "loss_scale.cur_hysteresis": 11.0,
    }
    set_loss_scale(with_scaler(other), values)
    assert vars(other) == vars(one)


def test_what_is_not_given_stays():
    scaler = FakeScaler()
    set_loss_scale(with_scaler(scaler), {"loss_scale.cur_scale": 4.0, "loss_scale.unknown": 1.0, "cur_iter": 9.0})
    assert vars(scaler) == vars(FakeScaler()) | {"cur_scale": 4.0}


@pytest.mark.parametrize("optimizer", [with_scaler(FakeFixedScaler()), SimpleNamespace()], ids=["fixed", "none"])
def test_an_optimizer_without_a_dynamic_scale_has_none_and_takes_none(optimizer):
    assert read_loss_scale(optimizer) == {}
    set_loss_scale(optimizer, {"loss_scale.cur_scale": 4.0})
    never_raise(optimizer)
    assert FakeFixedScaler.cur_scale == 1.0
    assert not vars(getattr(optimizer, "loss_scaler", SimpleNamespace()))


def test_at_the_least_scale_an_overflow_is_skipped_like_others():
    scaler = FakeScaler()
    scaler.cur_scale, scaler.cur_hysteresis = 1.0, 1
    with pytest.raises(Exception, match="already at minimum"):
        scaler.fake_update(True)
    never_raise(with_scaler(scaler))
    scaler.fake_update(True)
    assert scaler.cur_scale == 1.0
