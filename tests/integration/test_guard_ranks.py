"""The guard on several ranks: the rank that went wrong is named, and what is left out is so on any number of ranks."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pretrain.checkpoint.format import list_checkpoints
from pretrain.data.loader import digest_rows
from pretrain.data.order import SkipRanges
from pretrain.data.stream import TokenStream
from pretrain.errors import EXIT_DIVERGED
from pretrain.run.folder import RunDir
from pretrain.shards.index import load_index
from pretrain.tracking.audit import compare, read_audit
from pretrain.training.rollback import roll_back
from tests.helpers.poison import poison
from tests.helpers.ranks import run_in_ranks
from tests.helpers.refused import CONFIG, fill_folder
from tests.helpers.runs import tensors_of

ROWS, SEQ_LEN = 12, 32
BATCH = "batch={global_tokens: 384, seq_len: 32, micro: 2}"
DDP = "engine.kind=ddp"


class Ranks:
    """Runs of the tiny config on several ranks, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        stream = TokenStream(folder / "data", load_index(folder / "data"), "train", seq_len=SEQ_LEN, seed=7,
                             lanes=1, block_samples=16)  # fmt: skip
        self.samples = stream.order.samples

    def train(self, name: str, steps: int, *overrides: str, ranks: int = 2, code: int = 0, **environment: str) -> str:
        """Trains on to a step; returns what rank 0 said."""
        extend = [f"extend=[{environment.pop('EXTEND')}]"] if environment else []
        arguments = ["train", "a.yaml", f"run.name={name}", BATCH, "train.steps=12", f"train.stop_after={steps}"]
        request = {
            "folder": str(self.folder),
            "environment": environment,
            "arguments": [*arguments, *extend, *overrides],
        }
        answers = run_in_ranks("tests.integration.guard_workers:command", ranks, request)
        assert [answer[0] for answer in answers] == [code] * ranks, answers
        return answers[0][1]

    def at(self, name: str) -> RunDir:
        """The run folder."""
        return RunDir(self.folder / "runs" / name)

    def digests(self, name: str) -> list[str]:
        """Of its ledger."""
        return [row.digest for row in read_audit(self.at(name).audit)]


@pytest.fixture(scope="module")
def ranks(corpus, tmp_path_factory) -> Ranks:
    return Ranks(fill_folder(tmp_path_factory.mktemp("ranks"), CONFIG, corpus))


@pytest.mark.long
def test_after_a_rollback_any_number_of_ranks_sees_the_same_samples_in_any_number_of_starts(ranks):
    ranks.train("two", 6, DDP)
    roll_back(ranks.at("two").path, 4, samples=25)
    for name in ("parts", "three"):
        shutil.copytree(ranks.at("two").path, ranks.at(name).path)
    ranks.train("two", 10, DDP)
    ranks.train("parts", 5, DDP)
    ranks.train("parts", 10, DDP)
    ranks.train("three", 10, DDP, ranks=3)
    skips = SkipRanges.of([(4 * ROWS, 7 * ROWS)])
    spans = [skips.spans(range(step * ROWS, (step + 1) * ROWS)) for step in range(10)]
    ids = [np.concatenate([ranks.samples(span) for span in step]) for step in spans]
    expected = [f"{digest_rows(samples, np.arange(ROWS)):016x}" for samples in ids]
    assert ranks.digests("two") == ranks.digests("parts") == ranks.digests("three") == expected
    assert compare(ranks.at("two").audit, ranks.at("parts").audit) is None
    left, right = (tensors_of(list_checkpoints(ranks.at(name).checkpoints)[-1]) for name in ("two", "parts"))
    assert all(np.array_equal(left[key], right[key]) for key in left)


ZERO = "engine={{kind: deepspeed, zero_stage: {}}}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("ddp", DDP),
        *(pytest.param(f"zero-{stage}", ZERO.format(stage), marks=pytest.mark.long) for stage in (3, 2, 1, 0)),
    ],
)
def test_the_rank_with_the_bad_loss_is_named(ranks, name, engine):
    samples = ranks.samples(range(3 * ROWS, 5 * ROWS)).tolist()
    half = ROWS // 2
    environment = poison(ranks.folder, [*samples[half:ROWS], *samples[ROWS + half :]], float("nan"))
    limit = "optim.max_bad_steps=2"
    said = ranks.train(name, 10, engine, limit, code=EXIT_DIVERGED, EXTEND="poisoned", **environment)
    assert "2 steps in a row, up to step 5: the first output that is not finite is that of the loss on rank 1" in said
    told = json.loads((ranks.at(name).path / "bad_step.json").read_text())
    assert (told["rank"], told["sample_ids"]) == (1, samples[ROWS:])
    assert told["fault_sample_ids"] == samples[ROWS + half :][:2]


def test_a_rank_whose_weights_have_changed_ends_the_run_before_they_are_saved(ranks):
    (ranks.folder / "flipped.py").write_text(
        "import os\n"
        "from pretrain.training.step import TrainModule\n"
        "PLAIN, CALLS = TrainModule.forward, []\n"
        "def forward(self, batch):\n"
        "    CALLS.append(1)\n"
        "    if len(CALLS) == 10 and os.environ['RANK'] == '1':\n"
        "        dict(self.named_parameters())['model.decoder.norm.weight'].data[3] += 0.001\n"
        "    return PLAIN(self, batch)\n"
        "TrainModule.forward = forward\n"
    )
    said = ranks.train("flipped", 10, DDP, code=EXIT_DIVERGED, EXTEND="flipped", FLIP="1")
    assert "rank 0 on" in said
    assert "and rank 1 on" in said
    assert "differ at step 4, first decoder.norm.weight; no majority tells which is right" in said
    assert [path.name for path in list_checkpoints(ranks.at("flipped").checkpoints)] == ["step-00000002"]


@pytest.mark.long
def test_a_spike_is_skipped_and_rolled_back_on_all_ranks_alike(ranks):
    environment = poison(ranks.folder, ranks.samples(range(8 * ROWS, 9 * ROWS)).tolist()[-1:], 200.0)
    guard = "guard={spike_window: 8, spike_threshold: 20.0, on_spike: %s}"
    said = ranks.train("skipped", 12, DDP, guard % "skip", EXTEND="poisoned", **environment)
    assert "step 9 is a loss spike" in said
    assert [row.step for row in read_audit(ranks.at("skipped").audit) if row.grad_norm is None] == [9]
    said = ranks.train("back", 12, DDP, guard % "rollback", EXTEND="poisoned", **environment)
    assert "back to step 8, without the samples since then" in said
    assert ranks.at("back").read_record()["skips"] == [[8 * ROWS, 9 * ROWS]]
    assert len(ranks.digests("back")) == 12
