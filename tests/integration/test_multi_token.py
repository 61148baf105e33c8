"""Models that predict further tokens on real ranks: one process's losses and gradients, resumed, in a whole run."""

import json

import pytest

from tests.helpers.ranks import run_in_ranks
from tests.helpers.topologies import contents, ledger, newest, run_dir, write_run
from tests.integration.test_experts import ALONE, ZERO, assert_close

WORKERS = "tests.integration.multi_token_workers"
JOBS = "tests.helpers.topologies:run_jobs"
DDP = ["ddp", 0, "fp32"]
STEPS = 20


def trained(world_size, model, cases, micro, steps=STEPS, **options):
    """Rows of [loss, gradient norm, skipped, loss of the modules] of each case; all ranks agree."""
    arguments = {"model": model, "cases": cases, "micro": micro, "steps": steps, **options}
    ranks = run_in_ranks(f"{WORKERS}:losses_of", world_size, arguments)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


def check_rows(rows, expected):
    assert_close([row[:3] for row in rows], [row[:3] for row in expected])
    assert [row[3] for row in rows] == pytest.approx([row[3] for row in expected], rel=1e-5)


def test_two_ranks_with_accumulation_train_like_one_process():
    (expected,) = trained(1, "dense", [ALONE], 12)
    (rows,) = trained(2, "dense", [ZERO[3]], 2, steps=6)
    check_rows(rows, expected[:6])
    assert expected[-1][3] < expected[0][3] - 0.1


@pytest.mark.long
@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_every_zero_stage_and_ddp_train_like_one_process(model):
    (expected,) = trained(1, model, [ALONE], 12)
    for rows in trained(2, model, [*ZERO, DDP], 2):
        check_rows(rows, expected)


@pytest.mark.long
def test_experts_of_the_modules_are_shared_by_ranks_too():
    (expected,) = trained(1, "mixture", [ALONE], 12)
    for rows in trained(2, "mixture", [ZERO[1], ZERO[3]], 2, experts=2):
        check_rows(rows, expected)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"checkpointing": "full"}, {"checkpointing": "selective"}, {"compile": True}])
def test_recomputed_and_compiled_modules_train_alike(options):
    (expected,) = trained(1, "dense", [ALONE], 12)
    for rows in trained(2, "dense", [ZERO[2], ZERO[3]], 6, **options):
        check_rows(rows, expected)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_optimizers_of_whole_matrices_step_those_of_the_modules(optimizer):
    (expected,) = trained(1, "dense", [[*ALONE, optimizer]], 12, steps=5)
    for rows in trained(2, "dense", [[*ZERO[1], optimizer], [*ZERO[3], optimizer]], 6, steps=5):
        # Muon iterates in bf16: the order of an fp32 sum moves its update by up to 2**-8 of itself.
        assert_close([row[:3] for row in rows], [row[:3] for row in expected], loss=1e-4, norm=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_the_gradient_of_every_parameter_is_that_of_one_process(model):
    def gradients(world_size, cases, micro):
        arguments = {"model": model, "cases": cases, "micro": micro}
        return run_in_ranks(f"{WORKERS}:gradients_of", world_size, arguments)[0]

    (expected,) = gradients(1, [ALONE], 12)
    assert sum(name.startswith("multi_token.") for name in expected) >= 10
    for found in gradients(2, [ZERO[0], ZERO[2], ZERO[3]], 2):
        assert found.keys() == expected.keys()
        for name, values in found.items():
            largest = max(map(abs, expected[name]))
            assert values == pytest.approx(expected[name], rel=1e-5, abs=1e-5 * largest), name


@pytest.mark.parametrize(
    "loaded", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(0, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("model", ["mixture", pytest.param("dense", marks=pytest.mark.long)])
def test_a_checkpoint_is_resumed_bit_for_bit_and_at_any_stage(tmp_path, model, loaded):
    arguments = {"folder": str(tmp_path), "model": model, "saved": ZERO[2], "loaded": ZERO[loaded], "micro": 6}
    (expected, found), _ = run_in_ranks(f"{WORKERS}:resumed", 2, arguments)
    check_rows(found, expected)
    assert loaded != 2 or found == expected


def run_until(config, stop, *others):
    further = [
        "model.multi_token=1",
        "tracking.log_every_steps=2",
        "eval={every_steps: 2, max_tokens: 800}",
        "batch.micro=6",
    ]
    further += ["tracking.samples={prompts: [alpha], max_tokens: 8}", f"train.stop_after={stop}"]
    further.append("engine={kind: deepspeed, zero_stage: 2, precision: fp32, device: cpu}")
    further += others
    for found in run_in_ranks(JOBS, 2, {"jobs": [{"config": str(config), "overrides": further}]}):
        assert found[0][0] == 0


def test_a_run_shows_the_loss_of_the_modules_and_goes_on_bit_for_bit(tmp_path, corpus):
    whole, stopped = (write_run(tmp_path / name, corpus) for name in ("whole", "stopped"))
    run_until(whole, 4)
    for stop in (2, 4):
        run_until(stopped, stop)
    left, right = (
        [{key: value for key, value in row.items() if key != "attempt"} for row in ledger(run_dir(one)).values()]
        for one in (whole, stopped)
    )
    assert left == right and len(left) == 4
    weights, others = (contents(newest(run_dir(one))) for one in (whole, stopped))
    assert all(bool((weights[key] == others[key]).all()) for key in weights)
    rows = [json.loads(line) for line in run_dir(whole).metrics.read_text().splitlines()]
    shown = {row["step"]: row for row in rows if "multi_token_loss_1" in row}
    assert list(shown) == [2, 4]
    for step, row in shown.items():
        assert row["multi_token_loss_1"] == float.fromhex(left[step - 1]["multi_token_loss"])
        assert 0 <= row["multi_token_accuracy_1"] <= 1
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4]


@pytest.mark.long
def test_evaluations_which_leave_the_modules_out_change_nothing_in_recomputed_steps(tmp_path, corpus):
    recomputed = "engine={zero_stage: 3, activation_checkpointing: selective, compile: false}"
    for name, every in (("measured", 2), ("not", 8)):
        run_until(
            write_run(tmp_path / name, corpus), 8, recomputed, f"eval.every_steps={every}", "tracking.samples=null"
        )
    measured, plain = (
        [row["loss"] for row in ledger(run_dir(tmp_path / name / "run.yaml")).values()] for name in ("measured", "not")
    )
    assert measured == plain and len(plain) == 8
