"""A run that goes on while it is measured: one checkpoint, the one that rank 0 found, for all ranks and all of it."""

import pytest

from pretrain import dist
from pretrain.evaluation import held_out
from pretrain.evaluation.corpus import CorpusOptions
from pretrain.evaluation.distributed import open_together
from tests.unit.artifact.runs import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("ranks") / "run", steps=[1, 2])


def test_a_rank_that_finds_a_newer_checkpoint_takes_that_of_rank_0(run, monkeypatch):
    assert open_together(run).path.name == "step-00000002"
    first = run / "checkpoints" / "step-00000001"
    monkeypatch.setattr(dist, "broadcast_object", lambda value: str(first))
    assert open_together(run).path == first


def test_a_checkpoint_that_appears_meanwhile_is_not_the_one_that_is_measured(run, monkeypatch):
    expected = held_out.evaluate_held_out(run / "checkpoints" / "step-00000001", CorpusOptions())
    newest = run / "checkpoints" / "step-00000002"
    newest.rename(newest.with_name("later"))
    settle = held_out.settle

    def settle_late(*arguments):
        newest.with_name("later").rename(newest)
        return settle(*arguments)

    monkeypatch.setattr(held_out, "settle", settle_late)
    found = held_out.evaluate_held_out(run, CorpusOptions())
    assert found.subject.sha256 == expected.subject.sha256 and found.subject.step == 1
    assert found.losses == expected.losses
