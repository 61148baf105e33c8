"""The guard on several ranks: the rank that went wrong is named, and what is left out is so on any number of ranks."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from pretrain.checkpoint.layout import list_checkpoints
from pretrain.data.digest import digest_rows
from pretrain.data.skips import SkipRanges
from pretrain.data.stream import TokenStream
from pretrain.errors import EXIT_DIVERGED
from pretrain.index import load_index
from pretrain.tracking.audit import read_audit
from tests.helpers.poison import poison
from tests.helpers.runs import ROOT, RunMaker, assert_same_run, kill_rank

ROWS, SEQ_LEN, RANKS = 12, 32, 2
DDP = "engine={kind: ddp, zero_stage: 0}"
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def maker(tmp_path_factory, corpus) -> RunMaker:
    return RunMaker(tmp_path_factory.mktemp("ranks"), corpus)


@pytest.fixture(scope="module")
def order(corpus):
    """Of the samples of these runs."""
    return TokenStream(corpus, load_index(corpus), "train", seq_len=SEQ_LEN, seed=7, lanes=3, block_samples=16).order


@pytest.mark.timeout(900)
def test_after_a_rollback_any_number_of_ranks_sees_the_same_samples_and_a_kill_changes_nothing(maker, order):
    maker.complete("two", DDP, "train.stop_after=40")
    for name in ("killed", "three"):
        shutil.copytree(maker.folder("two").path, maker.folder(name).path)
    skips = SkipRanges.of([(20 * ROWS, 23 * ROWS)])
    for name in ("two", "killed", "three"):
        command = [sys.executable, "-m", "pretrain", "rollback", str(maker.folder(name).path)]
        subprocess.run([*command, "--to", "20", "--skip-samples", "25"], check=True, cwd=ROOT)
    maker.complete("two", DDP, "train.stop_after=60")
    process = maker.start("killed", DDP, "train.stop_after=60")
    maker.wait_for_step("killed", 45, process, after_attempt=1)
    kill_rank(process, 1)
    process.communicate(timeout=60)
    maker.complete("killed", DDP, "train.stop_after=60")
    assert_same_run(maker, "killed", "two", 60)
    maker.complete("three", DDP, "train.stop_after=60", ranks=3)
    spans = [skips.spans(range(step * ROWS, (step + 1) * ROWS)) for step in range(60)]
    ids = [np.concatenate([order.samples(span) for span in step]) for step in spans]
    expected = [f"{digest_rows(samples, np.arange(ROWS)):016x}" for samples in ids]
    for name in ("two", "killed", "three"):
        assert [row.digest for row in read_audit(maker.folder(name).audit)] == expected


@pytest.mark.parametrize("engine", ["engine.zero_stage=3", "engine.zero_stage=2", DDP])
def test_the_rank_with_the_bad_loss_is_named_and_nobody_updates(maker, order, tmp_path, engine):
    samples = order.samples(range(3 * ROWS, 5 * ROWS)).tolist()
    on_rank_1 = [*samples[ROWS // RANKS : ROWS], *samples[ROWS + ROWS // RANKS :]]
    name = f"bad-{engine[-4:]}".replace(": ", "").strip("}")
    output = maker.complete(
        name,
        engine,
        "extend=[poisoned]",
        "optim.max_bad_steps=2",
        "train.stop_after=10",
        expect=EXIT_DIVERGED,
        **poison(tmp_path, on_rank_1, float("nan")),
    )
    assert "2 steps in a row, up to step 5: the first output that is not finite is that of the loss on rank 1" in output
    told = json.loads((maker.folder(name).path / "bad_step.json").read_text())
    assert (told["rank"], told["sample_ids"]) == (1, samples[ROWS:])
    assert told["fault_sample_ids"] == samples[ROWS + ROWS // RANKS :][:2]


def test_a_rank_whose_weights_have_changed_ends_the_run_before_they_are_saved(maker, tmp_path):
    (tmp_path / "flipped.py").write_text(
        "import os\n"
        "from pretrain.train.module import TrainModule\n"
        "PLAIN, CALLS = TrainModule.forward, []\n"
        "def forward(self, batch):\n"
        "    CALLS.append(1)\n"
        "    if len(CALLS) == 100 and os.environ['RANK'] == '1':\n"
        "        dict(self.named_parameters())['model.decoder.norm.weight'].data[3] += 0.001\n"
        "    return PLAIN(self, batch)\n"
        "TrainModule.forward = forward\n"
    )
    output = maker.complete("flipped", DDP, "extend=[flipped]", expect=EXIT_DIVERGED, PYTHONPATH=str(tmp_path))
    assert "rank 0 on" in output
    assert "and rank 1 on" in output
    assert "differ at step 40, first decoder.norm.weight; no majority tells which is right" in output
    assert [path.name for path in list_checkpoints(maker.folder("flipped").checkpoints)] == ["step-00000020"]
