"""What a drill compares: one changed bit of a ledger, a weight or a state, and one file too many, fail it."""

import json
from dataclasses import replace

import pytest
import torch

from pretrain.checkpoint.format import MANIFEST, load_manifest, step_name
from pretrain.checkpoint.load import write_weights
from pretrain.drill.drill_folder import (
    GOLDEN,
    KILLED,
    DrillFolder,
    DrillSettings,
    Pace,
    State,
    find_leases,
    find_shared_memory,
    find_temporary,
)
from pretrain.drill.verdict import judge
from pretrain.run.lease import Lease
from pretrain.utils.io import write_json

ENTRY = {"number": 0, "phase": "save", "target": "rank", "steps_lost": 2, "first_step_s": 1.0, "gone_s": 0.5}


def write_run(folder: DrillFolder, name: str, bit: int = 0, loss: str = "0x1.0p+1") -> None:
    """A run of two steps with one checkpoint; `bit` is the last one of a weight."""
    run = folder.run(name)
    checkpoint = run.checkpoints / step_name(2)
    checkpoint.mkdir(parents=True)
    weight = torch.arange(6.0).reshape(2, 3)
    weight.view(torch.int32)[1, 2] ^= bit
    write_weights(checkpoint, [("a", torch.ones(4)), ("b", weight)], {})
    rows = [
        {"step": step, "tokens": 8, "digest": "0" * 16, "loss": loss, "grad_norm": "0x1.0p+0", "attempt": 1}
        for step in (1, 2)
    ]
    run.audit.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path):
    """A drill with its golden run."""
    folder = DrillFolder(tmp_path)
    write_run(folder, GOLDEN)
    return folder


@pytest.fixture
def state():
    """Of a drill with one kill."""
    settings = DrillSettings("", ranks=2, seed=0, target="rank", steps=2, every_steps=1)
    return State(settings, Pace(10.0, 3.0, 0.1, 0.1), 16.0, [ENTRY])


def test_equal_runs_pass(folder, state):
    write_run(folder, KILLED)
    verdict = judge(folder, state, [])
    assert verdict.passed
    assert verdict.facts()["lost_s"] == 6.0
    assert verdict.lines()[-1].startswith("passed: ")
    assert "1 in save; 1 of rank" in verdict.lines()[0]


def test_one_bit_of_a_weight_is_named(folder, state):
    write_run(folder, KILLED, bit=1)
    assert judge(folder, state, []).problems == ["b/weight differs in 1 of 6 elements"]


def test_the_first_step_that_differs_is_named(folder, state):
    write_run(folder, KILLED, loss="0x1.0000000000001p+1")
    (problem,) = judge(folder, state, []).problems
    assert problem.startswith("the ledgers differ: step 1: loss is 0x1.0p+1 in the uninterrupted run")


def test_another_training_state_is_named_by_its_keys(folder, state):
    write_run(folder, KILLED)
    path = folder.run(KILLED).checkpoints / step_name(2)
    manifest = load_manifest(path)
    changed = replace(manifest, state={**manifest.state, "position": 1, "tokens": 1})
    write_json(path / MANIFEST, changed.to_json())
    assert judge(folder, state, []).problems == ["the training state differs in position, tokens"]


def test_a_state_that_an_earlier_version_did_not_know_is_no_difference(folder, state):
    write_run(folder, KILLED)
    path = folder.run(GOLDEN).checkpoints / step_name(2)
    manifest = load_manifest(path)
    known = {key: value for key, value in manifest.state.items() if key != "next_digest"}
    write_json(path / MANIFEST, replace(manifest, state=known).to_json())
    assert judge(folder, state, []).passed


def test_a_missing_checkpoint_and_another_step_fail(folder, state):
    write_run(folder, KILLED)
    path = folder.run(KILLED).checkpoints / step_name(2)
    path.rename(path.with_name(step_name(1)))
    assert judge(folder, state, []).problems == ["the last checkpoint is step-00000001, not step-00000002"]
    path.with_name(step_name(1)).rename(folder.path / "elsewhere")
    assert judge(folder, state, []).problems == ["a run has no checkpoint at its end"]


def test_what_is_left_and_what_went_wrong_on_the_way_fail_it(folder, state):
    write_run(folder, KILLED)
    verdict = judge(folder, replace(state, problems=["kill 0: process left: x"]), ["/dev/shm/y"])
    assert verdict.problems == ["kill 0: process left: x", "left behind: /dev/shm/y"]
    assert verdict.lines()[-3:] == ["FAILED: 2 problems", *(f"  {text}" for text in verdict.problems)]


def test_temporary_files_are_found_wherever_a_run_may_leave_them(folder):
    write_run(folder, KILLED)
    run = folder.run(KILLED)
    assert find_temporary(folder, run) == []
    names = [run.checkpoints / ".tmp-step-1", run.path / "run.json.tmp-77", run.checkpoints / ".trash-x"]
    names.append(folder.temporary / "pymp-1")
    folder.temporary.mkdir()
    for path in (*names, folder.temporary / "torchinductor_root"):
        path.mkdir()
    assert sorted(find_temporary(folder, run)) == sorted(map(str, names))


def test_a_lease_that_nobody_gave_back_and_files_beside_it_are_found(folder):
    write_run(folder, KILLED)
    run = folder.run(KILLED)
    assert find_leases(run) == []
    lease = Lease(run.lease)
    held = str(run.lease / "00000001.json")
    assert find_leases(run) == [held]
    lease.release()
    assert find_leases(run) == []
    (run.lease / "00000002.json").write_text("torn")
    assert find_leases(run) == [held, str(run.lease / "00000002.json")]


def test_shared_memory_in_use_is_somebody_elses(monkeypatch, tmp_path):
    monkeypatch.setattr("pretrain.drill.drill_folder.SHARED_MEMORY", tmp_path)
    (tmp_path / "old").touch()
    (tmp_path / "left").touch()
    with (tmp_path / "used").open("w"):
        assert find_shared_memory({"old"}) == [str(tmp_path / "left")]
    assert find_shared_memory({"old"}) == [str(tmp_path / "left"), str(tmp_path / "used")]


def test_shared_memory_that_is_gone_when_its_users_have_been_looked_for_is_not_left(monkeypatch, tmp_path):
    monkeypatch.setattr("pretrain.drill.drill_folder.SHARED_MEMORY", tmp_path)

    def look(names: set[str]) -> set[str]:
        (tmp_path / "brief").unlink()
        return set()

    monkeypatch.setattr("pretrain.drill.drill_folder._in_use", look)
    for name in ("brief", "left"):
        (tmp_path / name).touch()
    assert find_shared_memory(set()) == [str(tmp_path / "left")]
