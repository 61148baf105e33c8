"""Real ranks that share the matrices of a model, and the columns of its rows, train like one process that has them."""

import json

import pytest

from tests.helpers.ranks import run_in_ranks
from tests.helpers.topologies import contents, ledger, losses, newest, newest_of, run_dir, run_steps, samples, write_run
from tests.integration.tensor_workers import MODELS
from tests.integration.test_experts import assert_close

WORKERS = "tests.integration.tensor_workers"
ZERO = [["deepspeed", stage, "fp32"] for stage in range(4)]
ALONE = ["single", 0, "fp32"]
STEPS = 20


def trained(world_size, tensor, cases, micro, *, model="llama", steps=STEPS, **options):
    """Rows of [loss, gradient norm, skipped] of each case; all ranks agree."""
    arguments = {"cases": cases, "steps": steps, "micro": micro, "tensor": tensor, "model": model, **options}
    ranks = run_in_ranks(f"{WORKERS}:losses_of", world_size, arguments)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


@pytest.mark.long
def test_two_ranks_that_share_matrices_train_like_one_process():
    (expected,) = trained(1, 1, [ALONE], 12)
    (rows,) = trained(2, 2, [ZERO[2]], 6)
    assert_close(rows, expected, loss=1e-6, norm=1e-5)
    assert expected[-1][0] < expected[0][0] - 0.1


def check_layouts(model, world_size, seeds):
    ranks = run_in_ranks(f"{WORKERS}:layout_errors", world_size, {"model": model, "seeds": list(seeds)})
    assert all(max(errors) < 1e-12 for errors in ranks)


def test_gradients_of_some_random_layouts_are_those_of_whole_matrices():
    for model in ("gemma", "sandwich", "hybrid", "two stacks"):
        check_layouts(model, 2, range(2))


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_of_200_random_layouts_are_those_of_whole_matrices(model, world_size):
    if model == "two stacks" and world_size == 4:
        pytest.skip("key-value heads do not divide")
    check_layouts(model, world_size, range(200))


def test_a_rank_keeps_bytes_as_planned_with_feedforward_tiles_too():
    arguments = {"length": 1024, "tiles": [1, 8]}
    for rows in run_in_ranks(f"{WORKERS}:saved_bytes", 2, arguments):
        for kept, planned in rows:
            assert planned == pytest.approx(kept, rel=0.1)
        assert rows[1][0] < 0.8 * rows[0][0]


@pytest.mark.parametrize("stages", [[3], pytest.param([0, 1, 2], marks=pytest.mark.long)], ids=str)
def test_no_collective_of_a_step_is_the_one_that_crashes_gloo(stages):
    # Each of a group's two threads writes the name of the collective it has finished, without a lock
    # (torch 2.13). This one's is the only one too long to be kept in place, and is freed twice.
    for names in run_in_ranks(f"{WORKERS}:collectives_of", 2, {"tensor": 2, "stages": stages}):
        assert "c10d::_allgather_base_" in names
        assert "c10d::allgather_into_tensor_coalesced_" not in names


NORM_STEPS = {"gemma": 5}
"""First steps whose norms are compared: later ones differ between micro-batches of one process too."""
SHORT = {"hybrid": 2}
"""Steps of a model whose norms do from the third on: by 1e-4 on two ranks of ZeRO 3 that share nothing."""


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_every_zero_stage_trains_every_kind_of_stack_like_one_process(model):
    short = {"model": model, "steps": SHORT.get(model, STEPS)}
    (expected,) = trained(1, 1, [ALONE], 12, **short)
    first = NORM_STEPS.get(model, STEPS)
    for rows in trained(2, 2, ZERO, 4, **short):
        assert_close(rows[:first], expected[:first])
        assert [row[0] for row in rows] == pytest.approx([row[0] for row in expected], rel=1e-5)
        assert not any(row[2] for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("tensor", [1, 2])
def test_products_that_are_kept_for_the_backward_pass_have_no_bias_added_to_them(tensor):
    (expected,) = trained(1, 1, [ALONE], 12, model="gpt2")
    for rows in trained(2, tensor, ZERO[2:], 6, model="gpt2", checkpointing="selective"):
        assert_close(rows, expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("tensor", "sequence", "model"),
    [(2, 1, "llama"), (4, 1, "gpt2"), (2, 2, "llama"), (2, 2, "relative"), (2, 1, "encoder"), (2, 2, "hybrid")],
)
def test_data_sequence_and_tensor_ranks_multiply(tensor, sequence, model):
    short = {"model": model, "steps": SHORT.get(model, STEPS)}
    (expected,) = trained(1, 1, [ALONE], 12, **short)
    for rows in trained(4, tensor, ZERO, 3, sequence=sequence, **short):
        assert_close(rows, expected)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("world_size", "sequence"), [(2, 1), (4, 1), (4, 2)])
def test_the_gradient_of_every_parameter_is_that_of_one_process(world_size, sequence, model):
    if model == "two stacks" and sequence > 1:
        pytest.skip("heads of a rank do not divide")

    def gradients(world_size, tensor, cases, micro, sequence=1):
        arguments = {"cases": cases, "micro": micro, "tensor": tensor, "model": model, "sequence": sequence}
        return run_in_ranks(f"{WORKERS}:gradients_of", world_size, arguments)[0]

    (expected,) = gradients(1, 1, [ALONE], 12)
    for found in gradients(world_size, 2, ZERO, 3, sequence):
        assert found.keys() == expected.keys()
        for name, values in found.items():
            largest = max(map(abs, expected[name]))
            assert values == pytest.approx(expected[name], rel=1e-5, abs=1e-5 * largest), name


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"checkpointing": "full"},
        {"checkpointing": "selective"},
        {"compile": True},
        {"tiles": 3},
        {"finetune": "freeze"},
        {"offload": "optimizer"},
        {"objective": {"label_smoothing": 0.1, "z_loss": 0.01}},
    ],
    ids=lambda options: "-".join(map(str, *options.items())),
)
def test_recomputed_compiled_frozen_and_offloaded_models_share_matrices_alike(options):
    without = {} if "offload" in options or "compile" in options else options
    (expected,) = trained(1, 1, [ALONE], 12, steps=5, **without)
    for rows in trained(2, 2, [ZERO[2], ZERO[3]], 6, steps=5, **options):
        assert_close(rows, expected)


@pytest.mark.long
def test_shared_matrices_follow_fp32_in_bf16_as_whole_ones_do():
    (expected,) = trained(1, 1, [ALONE], 12)
    cases = [["deepspeed", stage, "bf16"] for stage in (1, 2, 3)]
    for rows in (*trained(2, 2, cases, 12), *trained(2, 1, cases, 6)):
        for row, wanted in zip(rows, expected, strict=True):
            # As of rows that are shared (`test_sequence_parallel.py`).
            assert row[0] == pytest.approx(wanted[0], rel=3e-2)


MOVES = [(2, 2), (1, 3), (4, 1), (2, 3), (4, 0), (1, 1), (2, 0), (4, 3)]
"""Matrices over so many of 4 ranks, and the ZeRO stage, one after another."""


@pytest.mark.long
def test_checkpoints_load_at_any_degree_and_stage_without_conversion(tmp_path):
    def train(world_size, cases, folder):
        arguments = {"folder": str(tmp_path / folder), "cases": cases, "micro": 3}
        found, *others = run_in_ranks(f"{WORKERS}:moved", world_size, arguments)
        assert all(other == found for other in others)
        return found

    expected = train(1, [[1, *ALONE]] * len(MOVES), "alone")
    found = train(4, [[tensor, *ZERO[stage]] for tensor, stage in MOVES], "moved")
    assert_close(found, expected)


@pytest.mark.parametrize("steps", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_run_moves_between_degrees_with_the_same_samples(tmp_path, corpus, steps):
    further = (
        f"eval={{every_steps: {steps}, max_tokens: 800}}",
        f"tracking.log_every_steps={steps}",
        "optim.ema={horizon_steps: 5}",
    )
    further += ("tracking.samples={prompts: [alpha], max_tokens: 8}",)  # generated from whole rows
    golden, moved = (write_run(tmp_path / name, corpus) for name in ("golden", "moved"))
    run_steps(golden, 2, 3 * steps, *further)
    for number, tensor, stage in ((1, 2, 3), (2, 1, 2), (3, 2, 1)):
        run_steps(moved, 2, number * steps, *further, stage=stage, tensor=tensor)
    expected, found = ledger(run_dir(golden)), ledger(run_dir(moved))
    assert samples(found) == samples(expected) and len(found) == 3 * steps
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    # Nothing is converted: what a rank holds after loading is what was saved.
    before = contents(run_dir(moved).checkpoints / f"step-{2 * steps:08}")
    after = contents(newest_of(moved.parent / f"loaded-{3 * steps}"))
    assert before.keys() == after.keys()
    assert all(bool((before[key] == after[key]).all()) for key in before)
    rows = [[json.loads(line) for line in run_dir(one).metrics.read_text().splitlines()] for one in (golden, moved)]
    evaluations = [[row["val_loss"] for row in one if "val_loss" in row] for one in rows]
    assert len(evaluations[0]) == 3 and evaluations[1] == pytest.approx(evaluations[0], rel=1e-5)
    texts = [run_dir(one).path.joinpath("samples.jsonl").read_text() for one in (golden, moved)]
    assert texts[0] == texts[1]


@pytest.mark.long
def test_a_run_with_dropout_resumes_bit_for_bit_and_rows_that_do_not_divide_are_padded(tmp_path, corpus):
    further = (
        "model.decoder.dropout=0.1",
        "batch.seq_len=31",
        "batch.global_tokens=372",
        "optim.ema={horizon_steps: 5}",
    )
    whole, stopped = (write_run(tmp_path / name, corpus) for name in ("whole", "stopped"))
    run_steps(whole, 4, 12, *further, stage=3, tensor=2)
    for stop in (7, 12):
        run_steps(stopped, 4, stop, *further, stage=3, tensor=2)
    left, right = ledger(run_dir(whole)), ledger(run_dir(stopped))
    assert (samples(left), losses(left)) == (samples(right), losses(right))
    weights, others = (contents(newest(run_dir(one))) for one in (whole, stopped))
    assert all(bool((weights[key] == others[key]).all()) for key in weights)
