"""A run that is resumed at every one of its steps is, bit for bit, the run that nobody interrupted.

Two ways, on the same topology: a chain, in which every step is an attempt of its own, so that each resumption goes on
from what a resumption has saved; and from each checkpoint of the golden run, three steps further.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.format import step_name
from pretrain.utils.jsonl import read_rows
from tests.helpers.every_step import CASES, Case, prepare_small, write_case
from tests.helpers.ranks import run_in_ranks
from tests.helpers.topologies import contents, ledger, newest, run_dir

JOBS = "tests.helpers.topologies:run_jobs"
FIELDS = ("tokens", "digest", "loss", "grad_norm")
AHEAD = 3


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """Shards of which an epoch is over in the middle of the runs."""
    return prepare_small(tmp_path_factory.mktemp("small"))


def rows_of(config: Path) -> dict[int, tuple[Any, ...]]:
    """What must be equal, by step."""
    return {step: tuple(row[field] for field in FIELDS) for step, row in ledger(run_dir(config)).items()}


def golden_run(folder: Path, data: Path, case: Case, steps: int) -> Path:
    """Runs a case without a break, with a checkpoint a step; returns its config."""
    config = write_case(folder / "golden", data, case)
    job = {"config": str(config), "overrides": [f"train.stop_after={steps}", "checkpoint.every_steps=1"]}
    assert [found[0][0] for found in run_in_ranks(JOBS, case.ranks, {"jobs": [job]}, timeout=None)] == [0] * case.ranks
    return config


def assert_chain_is_golden(folder: Path, data: Path, case: Case, golden: Path, steps: int) -> None:
    """Every step is an attempt: the same ledger, and the same bits at the end."""
    config = write_case(folder / "chain", data, case)
    jobs = [{"config": str(config), "overrides": [f"train.stop_after={step + 1}"]} for step in range(steps)]
    run_in_ranks(JOBS, case.ranks, {"jobs": jobs}, timeout=None)
    assert [row["attempt"] for row in ledger(run_dir(config)).values()] == list(range(1, steps + 1))
    assert rows_of(config) == rows_of(golden)
    ours, expected = (contents(newest(run_dir(path))) for path in (config, golden))
    assert all(ours[key].equal(expected[key]) for key in expected), case


def assert_every_checkpoint_goes_on(folder: Path, data: Path, case: Case, golden: Path, steps: range) -> None:
    """From the golden checkpoint of each step: the next three rows are the golden ones."""
    jobs, origin = [], run_dir(golden)
    for step in steps:
        config = write_case(folder / str(step), data, case)
        target = run_dir(config)
        shutil.copytree(origin.path, target.path, ignore=shutil.ignore_patterns("checkpoints", "lease", "logs"))
        shutil.copytree(origin.checkpoints / step_name(step), target.checkpoints / step_name(step))
        jobs.append({"config": str(config), "overrides": [f"train.stop_after={step + AHEAD}"]})
    run_in_ranks(JOBS, case.ranks, {"jobs": jobs}, timeout=None)
    expected = rows_of(golden)
    for step in steps:
        found = rows_of(folder / str(step) / "run.yaml")
        assert found == {number: expected[number] for number in range(1, step + AHEAD + 1)}, (case, step)


@pytest.mark.long
def test_a_few_steps_of_an_encoder_decoder_are_resumed_bit_for_bit(small, tmp_path):
    case, steps = CASES[0], 4
    golden = golden_run(tmp_path, small, case, steps)
    assert_chain_is_golden(tmp_path, small, case, golden, steps)
    assert_every_checkpoint_goes_on(tmp_path, small, case, golden, range(1, 2))


def test_the_cases_meet_pairwise():
    assert {(case.shape, case.stage) for case in CASES} == {
        (shape, stage) for shape in ("decoder", "encoder", "encoder-decoder") for stage in range(4)
    }
    assert {(case.shape, case.accumulation) for case in CASES} == {
        (shape, number) for shape in ("decoder", "encoder", "encoder-decoder") for number in (1, 4)
    }
    assert {(case.stage, case.accumulation) for case in CASES} == {(s, n) for s in range(4) for n in (1, 4)}
    assert {(case.stage, case.precision) for case in CASES} == {(s, p) for s in range(4) for p in ("fp32", "bf16")}


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_a_run_resumed_at_every_step_is_the_golden_one(small, tmp_path, number):
    case, steps = CASES[number], 40
    golden = golden_run(tmp_path, small, case, steps)
    epochs = [row["epochs"] for row in read_rows(run_dir(golden).metrics) if "epochs" in row]
    assert epochs[-1] > 1, "an epoch ends on the way"
    assert_chain_is_golden(tmp_path, small, case, golden, steps)
    # A third of the checkpoints each: three cases have them all.
    third = range(1 + number % 3, steps - AHEAD + 1, 3)
    assert_every_checkpoint_goes_on(tmp_path, small, case, golden, third)
