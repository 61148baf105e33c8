"""Which data a run may be resumed with."""

import pytest

from pretrain.checkpoint.state import TrainState
from pretrain.errors import ConfigError, DataError
from pretrain.training.claim import check_data, check_order


def test_other_data_is_refused_unless_allowed():
    saved = TrainState(data_hash="a" * 64, tokenizer_hash="b" * 64)
    check_data(saved, saved, [])
    other_shards = TrainState(data_hash="c" * 64, tokenizer_hash="b" * 64)
    with pytest.raises(
        ConfigError, match=r"the token shards at data.path differ .*sha256 aaaaaaaaaaaa -> cccccccccccc"
    ):
        check_data(saved, other_shards, [])
    other_tokenizer = TrainState(data_hash="a" * 64, tokenizer_hash="c" * 64)
    with pytest.raises(ConfigError, match=r"the tokenizer at data.path differ.*pass resume.allow=\[data\]"):
        check_data(saved, other_tokenizer, ["seed"])
    check_data(saved, other_shards, ["data"])
    check_data(saved, other_tokenizer, ["data.path"])


def test_other_samples_than_were_to_come_are_refused_unless_the_order_may_change(caplog):
    five, six = f"{5:016x}", f"{6:016x}"
    saved = TrainState(step=7, next_digest=five)
    check_order(saved, five, [])
    check_order(saved, "", [])  # the run is complete
    check_order(TrainState(step=7), six, [])  # of a version that did not know, or a run that leaves others out
    check_order(saved.leaving_out(((8, 16),)), six, [])
    check_order(saved.leaving_out(()), five, [])
    what = r"the samples of step 8 are not those .* \(digest 0{15}5 -> 0{15}6\); use the data, config and version"
    for allow in ([], ["optim.lr"]):
        with pytest.raises(DataError, match=what):
            check_order(saved, six, allow)
    assert not caplog.records
    check_order(saved, six, ["data.lanes"])
    assert "the samples of step 8 are not those" in caplog.text
