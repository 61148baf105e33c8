"""Runs whose numbers go wrong: bad steps are looked into, spikes answered, samples left out, and no more changes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pretrain.checkpoint.format import list_checkpoints, load_manifest
from pretrain.data.loader import digest_rows
from pretrain.data.order import NO_SKIPS, SkipRanges
from pretrain.data.stream import TokenStream
from pretrain.errors import EXIT_DATA, EXIT_DIVERGED
from pretrain.run.folder import RunDir
from pretrain.run.lease import Lease
from pretrain.shards.index import load_index
from pretrain.tracking.audit import compare, read_audit
from tests.helpers.cli import Result, Warm
from tests.helpers.poison import poison
from tests.helpers.refused import CONFIG, check_refused, fill_folder, visible
from tests.helpers.runs import tensors_of

ROWS, SEQ_LEN = 4, 32
SPIKES = "guard={spike_window: 8, spike_threshold: 20.0, on_spike: %s}"


class Runs:
    """Runs of the tiny config in one folder, by name."""

    def __init__(self, folder: Path, warm: Warm) -> None:
        self.folder, self._warm = folder, warm
        stream = TokenStream(folder / "data", load_index(folder / "data"), "train", seq_len=SEQ_LEN, seed=7,
                             lanes=1, block_samples=16)  # fmt: skip
        self._order = stream.order

    def ids_of(self, step: int, skips: SkipRanges = NO_SKIPS) -> list[int]:
        """The samples of a step, from 1."""
        spans = skips.spans(range((step - 1) * ROWS, step * ROWS))
        return [sample for span in spans for sample in self._order.samples(span).tolist()]

    def digests(self, steps: int, skips: SkipRanges = NO_SKIPS) -> list[str]:
        """What the ledger must have."""
        return [
            f"{digest_rows(np.array(self.ids_of(step, skips)), np.arange(ROWS)):016x}" for step in range(1, steps + 1)
        ]

    def __call__(self, *arguments: str, **environment: str) -> Result:
        return self._warm(*arguments, cwd=self.folder, **environment)

    def train(self, name: str, steps: int, *overrides: str, code: int = 0, **environment: str) -> Result:
        """Trains on to a step."""
        extend = ["extend=[poisoned]"] if environment else []
        arguments = [f"run.name={name}", "train.steps=12", f"train.stop_after={steps}", *extend, *overrides]
        result = self("train", "a.yaml", *arguments, **environment)
        assert result.code == code, result.stderr
        return result

    def at(self, name: str) -> RunDir:
        """The run folder."""
        return RunDir(self.folder / "runs" / name)

    def state(self, name: str) -> dict:
        """Of the newest checkpoint."""
        return load_manifest(list_checkpoints(self.at(name).checkpoints)[-1]).state

    def assert_same(self, name: str, other: str) -> None:
        """Ledgers and weights are equal, bit for bit."""
        assert compare(self.at(name).audit, self.at(other).audit) is None
        left, right = (tensors_of(list_checkpoints(self.at(run).checkpoints)[-1]) for run in (name, other))
        assert left.keys() == right.keys()
        assert all(np.array_equal(left[key], right[key]) for key in left)


@pytest.fixture(scope="module")
def runs(warm, corpus, tmp_path_factory) -> Runs:
    return Runs(fill_folder(tmp_path_factory.mktemp("guard"), CONFIG, corpus), warm)


def digests_of(run: RunDir) -> list[str]:
    rows = read_audit(run.audit)
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))
    return [row.digest for row in rows]


# --- bad steps -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bad_samples(runs) -> dict[str, str]:
    """The environment in which the samples of steps 4 to 6 spoil the loss."""
    return poison(runs.folder, [sample for step in (4, 5, 6) for sample in runs.ids_of(step)], float("nan"))


def test_bad_steps_in_a_row_end_a_run_and_name_their_cause(runs, bad_samples):
    result = runs.train("bad", 12, "optim.max_bad_steps=3", code=EXIT_DIVERGED, **bad_samples)
    words = ["bad_step.json", "3 steps in a row, up to step 6: the first output that is not finite is that of the loss"]
    check_refused(result, EXIT_DIVERGED, *words, "rank 0", "pretrain rollback")
    told = json.loads((runs.at("bad").path / "bad_step.json").read_text())
    assert (told["step"], told["in_a_row"], told["name"], told["rank"]) == (6, 3, "the loss", 0)
    assert told["sample_ids"] == runs.ids_of(6)
    assert told["fault_sample_ids"] == runs.ids_of(6)[:2], "the first micro-batch of two"
    assert [row.grad_norm is None for row in read_audit(runs.at("bad").audit)] == [False] * 3 + [True] * 3
    # No checkpoint of a bad step is kept: the next start meets all of them again.
    assert visible(runs.at("bad").checkpoints) == {"step-00000002"}
    again = runs.train("bad", 12, "optim.max_bad_steps=3", code=EXIT_DIVERGED, **bad_samples)
    assert "resuming runs/bad at step 2" in again.stderr
    assert json.loads((runs.at("bad").path / "bad_step.json").read_text()) == told


def test_a_run_that_would_end_in_bad_steps_has_diverged_and_ends_before_them_where_it_is_told_to(runs, bad_samples):
    result = runs.train("spoiled", 5, code=EXIT_DIVERGED, **bad_samples)
    told = [
        "bad_step.json: the run ends in steps 4 to 5, not finite and skipped",
        "end it before by train.stop_after=3",
    ]
    check_refused(result, EXIT_DIVERGED, *told, "lower optim.lr")
    assert visible(runs.at("spoiled").checkpoints) == {"step-00000002"}
    assert runs.at("spoiled").read_record()["attempts"][-1]["exit_code"] == EXIT_DIVERGED
    runs.train("spoiled", 3, **bad_samples)
    assert (runs.state("spoiled")["step"], runs.state("spoiled")["bad_steps_in_a_row"]) == (3, 0)
    # A run that a good step follows ends as ever, its skipped steps counted.
    runs.train("spoiled", 7, **bad_samples)
    assert (runs.state("spoiled")["step"], runs.state("spoiled")["optimizer_step"]) == (7, 4)


@pytest.mark.long
def test_what_a_rollback_leaves_out_stays_out_through_any_number_of_starts(runs, bad_samples):
    runs.train("left", 3, **bad_samples)
    done = runs("rollback", "runs/left", "--to", "2", "--skip-samples", "13", "--json")
    assert done.code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["to"], facts["first"], facts["end"], facts["global_batches"]) == (2, 8, 24, 4)
    assert facts["set_aside"] == ["step-00000003"]
    assert visible(runs.at("left").checkpoints) == {"step-00000002", "step-00000003.rolled-back"}
    skips = SkipRanges.of([(8, 24)])
    shutil.copytree(runs.at("left").path, runs.at("parts").path)
    result = runs.train("left", 12, **bad_samples)
    assert "resuming runs/left at step 2" in result.stderr
    assert digests_of(runs.at("left")) == runs.digests(12, skips)
    assert runs.state("left")["skips"] == [[8, 24]]
    assert runs.state("left")["position"] == 12 * ROWS + 16
    # The same in three starts, and with run.json's ranges lost on the way: the checkpoints have them too.
    runs.train("parts", 3, **bad_samples)
    record = runs.at("parts").read_record()
    runs.at("parts").record.write_text(json.dumps({key: value for key, value in record.items() if key != "skips"}))
    runs.train("parts", 7, **bad_samples)
    assert runs.at("parts").read_record()["skips"] == [[8, 24]]
    runs.train("parts", 12, **bad_samples)
    runs.assert_same("parts", "left")


def empty_steps(runs: Runs, condition: str) -> dict[str, str]:
    """Writes a module that takes the targets of the steps away of which a condition is true."""
    (runs.folder / "emptied.py").write_text(
        "from dataclasses import replace\n"
        "from pretrain.data.loader import TrainLoader\n"
        "PLAIN = TrainLoader.__next__\n"
        "def emptied(loader):\n"
        "    step = PLAIN(loader)\n"
        f"    if not ({condition}):\n"
        "        return step\n"
        "    for batch in step.micro_batches:\n"
        "        batch.targets_BT.fill_(-100)\n"
        "    return replace(step, counts=replace(step.counts, num_targets=0))\n"
        "TrainLoader.__next__ = emptied\n"
    )
    return {"PYTHONPATH": str(runs.folder)}


@pytest.mark.parametrize("on_spike", ["warn", "skip"])
def test_a_step_without_targets_changes_nothing_and_is_counted_apart(runs, on_spike):
    environment = empty_steps(runs, "step.position == 8")
    name = f"empty-{on_spike}"
    overrides = ["extend=[emptied]", "tracking.log_every_steps=1", "optim.ema.horizon_steps=3", SPIKES % on_spike]
    runs.train(name, 2, *overrides, **environment)
    before = tensors_of(list_checkpoints(runs.at(name).checkpoints)[-1])
    result = runs.train(name, 3, *overrides, **environment)
    assert "step 3 has no targets and changes nothing, 1 step so far: documents have one token each" in result.stderr
    after = tensors_of(list_checkpoints(runs.at(name).checkpoints)[-1])
    assert before.keys() == after.keys()
    assert [key for key in before if not np.array_equal(before[key], after[key])] == []
    result = runs.train(name, 5, *overrides, **environment)
    assert "done: 5 steps (1 without a target), " in result.stdout
    rows = read_audit(runs.at(name).audit)
    assert (rows[2].tokens, rows[2].loss, rows[2].grad_norm) == (0, "0x0.0p+0", None)
    assert float.fromhex(rows[4].loss) > 1.0
    state = runs.state(name)
    assert (state["step"], state["optimizer_step"], state["empty_steps"], len(state["losses"])) == (5, 4, 1, 4)
    metrics = [json.loads(line) for line in runs.at(name).metrics.read_text().splitlines()]
    steps = [row for row in metrics if "lr" in row]
    assert [row.get("empty_steps") for row in steps] == [None, None, 1.0, 1.0, 1.0]
    assert [row["skipped_steps"] for row in steps] == [0.0] * 5
    assert ["loss" in row and "grad_norm" in row for row in steps] == [True, True, False, True, True]


def test_a_run_without_a_single_target_does_not_end_as_if_it_had_learned(runs):
    environment = empty_steps(runs, "True")
    overrides = ["extend=[emptied]", "checkpoint.every_steps=0"]
    result = runs.train("nothing", 2, *overrides, code=EXIT_DATA, **environment)
    told = ["nothing was learned, as no target was in the run's 2 steps: documents have one token each"]
    check_refused(result, EXIT_DATA, *told, "`pretrain data show`")
    assert visible(runs.at("nothing").checkpoints) == set()


# --- spikes ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_spike_is_said_and_counted_also_right_after_a_resumption(runs):
    environment = poison(runs.folder, runs.ids_of(9), 50.0)
    for name, stops in (("warned", [12]), ("warned-parts", [8, 9, 12])):
        output = "".join(runs.train(name, stop, SPIKES % "warn", **environment).stderr for stop in stops)
        assert output.count("step 9 is a loss spike") == 1, output
        assert runs.state(name)["spikes"] == 1
    runs.assert_same("warned", "warned-parts")


def test_a_spike_is_skipped_before_it_is_applied_also_right_after_a_resumption(runs):
    environment = poison(runs.folder, runs.ids_of(9), 50.0)
    for name, stops in (("skipped", [12]), ("skipped-parts", [8, 12])):
        output = "".join(runs.train(name, stop, SPIKES % "skip", **environment).stderr for stop in stops)
        assert "step 9 is a loss spike" in output
        assert "it was skipped" in output
        assert not (runs.at(name).path / "bad_step.json").exists()
    runs.assert_same("skipped", "skipped-parts")
    rows = read_audit(runs.at("skipped").audit)
    assert [row.step for row in rows if row.grad_norm is None] == [9]
    state = runs.state("skipped")
    assert (state["optimizer_step"], state["spikes"], state["bad_steps_in_a_row"]) == (11, 1, 0)


@pytest.mark.long
def test_a_loss_that_stays_high_is_the_new_level_after_some_skips(runs):
    environment = poison(runs.folder, [s for step in range(6, 13) for s in runs.ids_of(step)], 50.0)
    guard = (SPIKES % "skip").replace("}", ", max_skips: 2}")
    output = runs.train("level", 12, guard, **environment).stderr
    assert "2 in a row were skipped: it is taken for the new level" in output
    rows = read_audit(runs.at("level").audit)
    assert [row.step for row in rows if row.grad_norm is None] == [6, 7]


def test_a_spike_rolls_a_run_back_and_the_samples_since_the_checkpoint_are_left_out(runs):
    environment = poison(runs.folder, runs.ids_of(9), 50.0)
    options = (SPIKES % "rollback", "tracking.log_every_steps=1")
    output = runs.train("back", 12, *options, **environment).stderr
    assert "step 9 is a loss spike" in output
    assert "back to step 8, without the samples since then" in output
    skips = SkipRanges.of([(32, 36)])
    assert digests_of(runs.at("back")) == runs.digests(12, skips)
    record = runs.at("back").read_record()
    assert record["skips"] == runs.state("back")["skips"] == [[32, 36]]
    assert [(entry["to"], entry["automatic"]) for entry in record["rollbacks"]] == [(8, True)]
    assert len(record["attempts"]) == 1
    metrics = [json.loads(line) for line in runs.at("back").metrics.read_text().splitlines()]
    assert [row["step"] for row in metrics if "loss" in row] == list(range(1, 13))
    # A run that is told to by hand, and starts anew, does the same.
    runs.train("by-hand", 8, *options, **environment)
    assert runs("rollback", "runs/by-hand", "--to", "8", "--skip-tokens", "1").code == 0
    runs.train("by-hand", 12, *options, **environment)
    runs.assert_same("back", "by-hand")


DAMAGE = """
from pretrain.training import loop

PLAIN = loop.go_back


def go_back(run, spike):
    manifest = run.folder.checkpoints / "step-00000008" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    return PLAIN(run, spike)


loop.go_back = go_back
"""


def test_a_rollback_to_a_damaged_checkpoint_goes_to_the_one_before(runs):
    (runs.folder / "damage.py").write_text(DAMAGE)
    environment = poison(runs.folder, runs.ids_of(9), 50.0)
    options = (SPIKES % "rollback", "extend=[poisoned,damage]")
    output = runs.train("damaged", 12, *options, **environment).stderr
    assert "step-00000008 is damaged" in output
    assert "back to step 6, without the samples since then" in output
    assert digests_of(runs.at("damaged")) == runs.digests(12, SkipRanges.of([(24, 36)]))
    record = runs.at("damaged").read_record()
    assert record["skips"] == runs.state("damaged")["skips"] == [[24, 36]]
    assert [entry["to"] for entry in record["rollbacks"]] == [6]


@pytest.mark.long
def test_the_number_of_rollbacks_is_limited(runs):
    environment = poison(runs.folder, [*runs.ids_of(9), *runs.ids_of(10)], 50.0)
    guard = (SPIKES % "rollback").replace("}", ", max_rollbacks: 1}")
    result = runs.train("limited", 12, guard, code=EXIT_DIVERGED, **environment)
    words = ["step 9 is a loss spike", "the run went back 1 time already", "raise guard.spike_threshold"]
    check_refused(result, EXIT_DIVERGED, *words)
    assert runs.at("limited").read_record()["skips"] == [[32, 36]]


@pytest.mark.long
def test_without_a_checkpoint_a_run_goes_on_behind_a_spike(runs):
    environment = poison(runs.folder, runs.ids_of(9), 50.0)
    output = runs.train("alone", 12, SPIKES % "rollback", "checkpoint.every_steps=0", **environment).stderr
    assert "there is no checkpoint to go back to, training continues" in output
    assert digests_of(runs.at("alone")) == runs.digests(12)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(runs) -> RunDir:
    runs.train("finished", 6)
    return runs.at("finished")


def test_a_rollback_that_cannot_be_is_refused_and_changes_nothing(runs, finished):
    before = finished.record.read_bytes(), visible(finished.checkpoints)
    refused = runs("rollback", "runs/finished", "--to", "5", "--skip-samples", "4")
    check_refused(refused, 66, "runs/finished/checkpoints", "no committed checkpoint of step 5; there is 4, 6", "--to")
    check_refused(runs("rollback", "runs/nope", "--to", "5", "--skip-samples", "4"), 64, "runs/nope", "no run here")
    both = ["--skip-samples", "4", "--skip-tokens", "4"]
    check_refused(runs("rollback", "runs/finished", "--to", "4", *both), 64, "one of --skip-tokens and")
    lease = Lease(finished.lease)
    try:
        refused = runs("rollback", "runs/finished", "--to", "4", "--skip-samples", "4")
    finally:
        lease.release()
    check_refused(refused, 73, "runs/finished", "in use")
    weights = finished.checkpoints / "step-00000004/rank-00000.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4])
    refused = runs("rollback", "runs/finished", "--to", "4", "--skip-samples", "4")
    weights.write_bytes(content)
    check_refused(refused, 66, "step-00000004", "damaged: rank-00000.safetensors", "go back to another one")
    assert (finished.record.read_bytes(), visible(finished.checkpoints)) == before


def test_rollbacks_to_one_step_add_up_and_what_is_set_aside_stays(runs, finished):
    for skipped in ("8", "4"):
        done = runs("rollback", "runs/finished", "--to", "4", "--skip-samples", skipped)
        assert done.code == 0, done.stderr
        runs.train("finished", 6)
    assert "runs/finished continues from step 4, without samples 24 to 27: 1 whole global batch" in done.stdout
    assert finished.read_record()["skips"] == [[16, 28]]
    assert digests_of(finished) == runs.digests(6, SkipRanges.of([(16, 28)]))
    aside = {"step-00000006.rolled-back", "step-00000006.rolled-back-2"}
    assert visible(finished.checkpoints) == {"step-00000004", "step-00000006", *aside}
    for options in (["--skip-tokens", "0"], []):
        done = runs("rollback", "runs/finished", "--to", "4", *options)
        assert "continues from step 4, with all samples" in done.stdout
    (facts,) = json.loads(runs("runs", "runs/finished", "--json").stdout)
    assert (facts["state"], facts["reason"]) == ("stopped", "rolled back to step 4")


def test_ranges_in_run_json_that_are_none_are_refused(runs, finished):
    record = finished.read_record()
    finished.record.write_text(json.dumps(record | {"skips": [[8, 4]]}))
    try:
        result = runs("train", "a.yaml", "run.name=finished", "train.steps=12")
    finally:
        finished.record.write_text(json.dumps(record))
    check_refused(result, 64, "run.json", "skips: [8, 4] is not a range of positions", "restore the file")
