"""The state of a run through JSON, and that of an earlier version."""

import json

import pytest

from pretrain.checkpoint.state import TrainState
from pretrain.errors import CheckpointError

STATE = TrainState(7, 6, 900, 64, "data", "tokenizer", ((8, 16), (24, 32)), (2.5, 0.1, 1e-300), 3, 1, 2, 4)


def test_a_state_comes_back_bit_for_bit():
    assert TrainState.from_json(json.loads(json.dumps(STATE.to_json())), "here") == STATE


def test_what_an_earlier_version_did_not_know_is_as_in_a_new_run():
    old = {"step": 7, "optimizer_step": 6, "tokens": 900, "position": 64, "data_hash": "data", "tokenizer_hash": "t"}
    assert TrainState.from_json(old, "here") == TrainState(7, 6, 900, 64, "data", "t")


@pytest.mark.parametrize(
    "damage",
    [{"skips": [[1]]}, {"skips": 5}, {"losses": ["x"]}, {"losses": None}, {"unknown": 1}, {"skips": [["a", 2]]}],
)
def test_what_is_no_state_is_refused(damage):
    with pytest.raises(CheckpointError, match=r"here: the training state is damaged: .*; use another one"):
        TrainState.from_json(STATE.to_json() | damage, "here")
