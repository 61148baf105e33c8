"""`checkpoint.best` is refused where no checkpoint would be known to be good."""

import pytest

from pretrain.config.base import refuse
from pretrain.config.data import DataConfig, SourceConfig
from pretrain.config.load import load_config
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.optim import EmaConfig
from pretrain.config.train import CheckpointConfig, EvalConfig, best_conflicts
from pretrain.errors import ConfigError

MIXTURE = [SourceConfig(name=name, path=name, weight=1.0) for name in ("web", "code")]


def check(best, every=20, evaluated=10, kind="causal", data=None, horizon=None, ema=True):
    checkpoint, evaluation = CheckpointConfig(best=best, every_steps=every), EvalConfig(every_steps=evaluated, ema=ema)
    data = data or DataConfig(path="d")
    refuse(best_conflicts(checkpoint, evaluation, ObjectiveConfig(kind=kind), data, EmaConfig(horizon_steps=horizon)))


@pytest.mark.parametrize("best", [None, "val_loss", "val_perplexity", "val_accuracy", "val_bits_per_byte"])
def test_a_metric_of_validation_is_taken(best):
    check(best)
    check("val_loss_code", data=DataConfig(mixture=MIXTURE))
    check("val_ema_loss", horizon=10)


@pytest.mark.parametrize("value", ["true", "3"])
def test_what_is_no_name_of_a_metric_is_answered_with_the_names(value):
    with pytest.raises(ConfigError, match=f"{value} is no validation metric; write one of: val_loss, val_perplexity"):
        load_config("configs/run/quickstart.yaml", [f"checkpoint.best={value}"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"best": "loss"}, "checkpoint.best=loss is no validation metric; use one of: val_loss, val_perplexity"),
        ({"best": "val_loss_code"}, "checkpoint.best=val_loss_code is no validation metric"),
        (
            {"best": "val_bits_per_byte", "kind": "masked"},
            "needs objective.kind=causal, not masked; use val_loss",
        ),
        ({"best": "val_perplexity", "kind": "images"}, "a classifier has no perplexity; use val_loss or val_accuracy"),
        ({"best": "val_ema_loss"}, "checkpoint.best=val_ema_loss needs optim.ema and eval.ema=true; use val_loss"),
        ({"best": "val_ema_loss", "horizon": 10, "ema": False}, "needs optim.ema and eval.ema=true"),
        ({"best": "val_loss", "evaluated": 0}, "multiple of eval.every_steps=0, neither of them 0"),
        ({"best": "val_loss", "every": 0}, "checkpoint.every_steps=0 must be a multiple of eval.every_steps=10"),
        ({"best": "val_loss", "every": 15}, "checkpoint.every_steps=15 must be a multiple of eval.every_steps=10"),
    ],
)
def test_what_cannot_be_known_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        check(**values)
