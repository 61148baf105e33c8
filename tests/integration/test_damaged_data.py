"""A damaged member under `data.on_error: skip`: its rows have no targets, all others come when they would have come."""

import shutil

import pytest

from pretrain.index import load_index
from pretrain.tracking.audit import read_audit
from tests.helpers.runs import RunMaker

SHORT = ["train.stop_after=6", "checkpoint.every_steps=0", "engine.kind=ddp", "engine.zero_stage=0"]


@pytest.fixture
def damaged(tmp_path, corpus):
    """A copy of the corpus with one byte of its first member changed."""
    folder = tmp_path / "damaged"
    shutil.copytree(corpus, folder)
    shard = folder / load_index(folder).splits["train"].shards[0].name
    content = bytearray(shard.read_bytes())
    content[content.index(b"00000000.tokens.npy") + 512 + 128 + 40] ^= 1
    shard.write_bytes(content)
    return folder


def test_two_ranks_skip_the_same_rows_and_train_on_all_others(make_run, damaged, tmp_path):
    make_run.complete("whole", *SHORT)
    runs = RunMaker(tmp_path, damaged)
    output = runs.complete("skipping", *SHORT, "data.on_error=skip", "data.max_skipped_rows=100000")
    assert "rows are skipped in" in output and "00000000.tokens.npy is damaged" in output
    whole, skipping = (
        read_audit(maker.folder(name).audit) for maker, name in ((make_run, "whole"), (runs, "skipping"))
    )
    assert [row.digest for row in whole] == [row.digest for row in skipping]
    fewer = [a.tokens - b.tokens for a, b in zip(whole, skipping, strict=True)]
    assert min(fewer) >= 0 and max(fewer) > 0


def test_more_damage_than_is_allowed_ends_the_run_in_one_line(damaged, tmp_path):
    runs = RunMaker(tmp_path, damaged)
    output = runs.complete("limited", *SHORT, "data.on_error=skip", "data.max_skipped_rows=1", expect=65)
    assert "more than data.max_skipped_rows=1" in output and "Traceback" not in output
    assert "is damaged" in runs.complete("stopping", *SHORT, expect=65)
