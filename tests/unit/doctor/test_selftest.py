"""The verdict of the selftest: the same samples, and losses within a tolerance that the precision allows."""

import pytest

from pretrain.config.load import load_config
from pretrain.doctor.place import JobTopology
from pretrain.doctor.selftest import compare_ledgers, tolerance_of
from pretrain.doctor.small import ask
from pretrain.doctor.spawn import run_command
from pretrain.tracking.audit import AuditRow
from tests.helpers.waiting import LIMIT_S


def ledger(*losses, digest="ab"):
    return [AuditRow(step, 100, digest, loss.hex(), None, 1) for step, loss in enumerate(losses, start=1)]


def test_stages_that_agree_pass_and_the_largest_distance_is_named():
    found = compare_ledgers({"stage 0": ledger(4.0, 3.0), "stage 1": ledger(4.0, 3.00001)}, 1e-5)
    assert found.status == "pass"
    assert found.detail.startswith("losses of stage 0, stage 1 within 3.3e-06 of stage 0 (stage 1 at step 2)")


@pytest.mark.parametrize("loss", [3.001, float("nan"), float("inf")])
def test_a_stage_whose_loss_is_another_fails(loss):
    found = compare_ledgers({"stage 0": ledger(4.0, 3.0), "stage 3": ledger(4.0, loss)}, 1e-5)
    assert (found.status, found.exit_code) == ("fail", 77)
    assert "stage 3 at step 2" in found.detail


@pytest.mark.parametrize("other", [ledger(4.0, 3.0, digest="cd"), ledger(4.0)])
def test_a_stage_that_read_other_samples_fails(other):
    found = compare_ledgers({"stage 0": ledger(4.0, 3.0), "stage 2": other}, 1e-5)
    assert (found.status, found.detail) == ("fail", "stage 2 has read other samples than stage 0")


def test_one_stage_alone_proves_nothing():
    assert compare_ledgers({"stage 2": ledger(4.0)}, 1e-5).status == "fail"


def test_a_second_selftest_of_an_allocation_has_a_folder_of_its_own(monkeypatch):
    """Else it would go on with the runs of one that failed."""
    config = "configs/run/quickstart.yaml"
    loaded = load_config(config, ["engine.device=cpu"])
    place = JobTopology(size=2, local_size=2, is_started=True)
    folders = set()
    for job, step in (("7", "0"), ("7", "1"), ("8", "0")):
        environment = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "MASTER_PORT": "29500"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        folders.add(ask(config, [], loaded, None, None, place).folder)
    assert len(folders) == 3


@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    [
        (["engine.precision=fp32", "optim.kind=adamw", "optim.muon=null"], 1e-5),
        (["engine.precision=bf16"], 2e-2),
        (["engine.precision=fp32", "optim.kind=muon"], 1e-4),
    ],
)
def test_the_tolerance_is_that_of_precision_and_optimizer(overrides, tolerance):
    assert tolerance_of(load_config("configs/run/quickstart.yaml", overrides)) == tolerance


def test_a_command_that_fails_brings_its_first_error(tmp_path):
    trial = run_command(["config", str(tmp_path / "none.yaml")], tmp_path / "log" / "x.log", LIMIT_S)
    assert trial.exit_code == 64
    assert "none.yaml" in trial.error
