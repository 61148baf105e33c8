"""`guard:` -- its defaults, its limits, and keys that would have no effect."""

import pytest

from pretrain.config.load import load_config
from pretrain.errors import ConfigError

RECIPE = "configs/run/quickstart.yaml"


def test_by_default_spikes_are_said_and_replicas_compared():
    guard = load_config(RECIPE).guard
    assert (guard.on_spike, guard.spike_window, guard.check_replicas_every) == ("warn", 128, 1000)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("guard.on_spike=stop", r"guard.on_spike"),
        ("guard.spike_window=129", r"guard.spike_window"),
        ("guard.spike_threshold=0", r"guard.spike_threshold"),
        ("guard.check_replicas_every=-1", r"guard.check_replicas_every"),
        ("guard={on_spike: warn, max_skips: 3}", r"max_skips needs on_spike=skip; leave it out"),
        ("guard={on_spike: skip, max_rollbacks: 3}", r"max_rollbacks needs on_spike=rollback"),
        ("run.recover_every_steps=2", r"recover_every_steps=2 needs recover=spare or shrink; leave it out"),
        ("run.recover=never", r"run.recover"),
    ],
)
def test_what_makes_no_sense_is_refused(override, said):
    with pytest.raises(ConfigError, match=said):
        load_config(RECIPE, [override])
