"""Real ranks that share rows: exact gradients and losses, memory by T / N, the same samples, any resumption."""

import json

import pytest

from tests.helpers.ranks import run_in_ranks
from tests.helpers.topologies import contents, ledger, losses, newest, newest_of, run_dir, run_steps, samples, write_run
from tests.integration.sequence_workers import MODELS
from tests.integration.test_experts import assert_close

WORKERS = "tests.integration.sequence_workers"
ZERO = [["deepspeed", stage, "fp32"] for stage in range(4)]
DDP = ["ddp", 0, "fp32"]
ALONE = ["single", 0, "fp32"]
STEPS = 20
SHORT = {"hybrid": 4}
"""Steps before rounding has grown: later norms differ by 5e-5 between micro-batches of one process too."""
LAYOUTS = 200


def trained(world_size, cases, sequence, micro, *, model="grouped", steps=STEPS, **options):
    """Rows of [loss, gradient norm, skipped] of each case; all ranks agree."""
    arguments = {"cases": cases, "steps": steps, "micro": micro, "sequence": sequence, "model": model, **options}
    ranks = run_in_ranks(f"{WORKERS}:losses_of", world_size, arguments)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


def test_two_ranks_that_share_rows_train_like_one_process():
    (expected,) = trained(1, [ALONE], 1, 12)
    (rows,) = trained(2, [ZERO[2]], 2, 6, steps=6)
    assert_close(rows, expected[:6], loss=1e-6, norm=1e-5)
    assert expected[-1][0] < expected[0][0] - 0.1


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_every_stage_and_ddp_train_rows_that_are_shared_like_one_process(model):
    short = {"model": model, "steps": SHORT.get(model, STEPS)}
    (expected,) = trained(1, [ALONE], 1, 12, **short)
    for rows in trained(2, [*ZERO, DDP], 2, 4, **short):
        assert_close(rows, expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "sequence", "model"),
    [
        (4, 2, "grouped"),
        (4, 4, "few keys"),
        (4, 2, "encoder"),
        (4, 2, "two stacks"),
        (3, 3, "torn groups"),
        (4, 4, "hybrid"),
    ],
)
def test_data_and_sequence_ranks_multiply(world_size, sequence, model):
    short = {"model": model, "steps": SHORT.get(model, STEPS)}
    (expected,) = trained(1, [ALONE], 1, 12, **short)
    for rows in trained(world_size, ZERO, sequence, 3, **short):
        assert_close(rows, expected)


@pytest.mark.long
@pytest.mark.parametrize("model", ["grouped", "few keys", "hybrid", "two stacks"])
def test_the_gradient_of_every_parameter_is_that_of_one_process(model):
    def gradients(world_size, cases, sequence, micro):
        arguments = {"cases": cases, "micro": micro, "sequence": sequence, "model": model}
        return run_in_ranks(f"{WORKERS}:gradients_of", world_size, arguments)[0]

    (expected,) = gradients(1, [ALONE], 1, 12)
    for found in (*gradients(2, ZERO, 2, 6), *gradients(4, ZERO[2:], 2, 3)):
        assert found.keys() == expected.keys()
        for name, values in found.items():
            largest = max(map(abs, expected[name]))
            assert values == pytest.approx(expected[name], rel=1e-5, abs=1e-5 * largest), name


@pytest.mark.parametrize("balance", [pytest.param("loss", marks=pytest.mark.long), "bias"])
def test_mixtures_of_experts_count_the_tokens_of_all_ranks_that_share_rows(balance):
    def mixtures(world_size, cases, sequence, micro):
        arguments = {"cases": [[balance, *case] for case in cases], "steps": 5, "sequence": sequence, "micro": micro}
        return run_in_ranks(f"{WORKERS}:mixture_losses", world_size, arguments)[0]

    ((*expected, final),) = mixtures(1, [ALONE], 1, 12)
    for *rows, balanced in mixtures(2, [ZERO[3]], 2, 4):
        assert_close(rows, expected)
        assert balanced == final  # counts of tokens, and no rounding between them


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{"checkpointing": "full"}, {"checkpointing": "selective"}, {"compile": True}, {"finetune": "lora"}, {"tiles": 3}],
    ids=lambda options: "-".join(map(str, *options.items())),
)
def test_recomputed_compiled_and_adapted_blocks_train_shared_rows_alike(options):
    (expected,) = trained(1, [ALONE], 1, 12, steps=5, **options)
    for rows in trained(2, [ZERO[2], ZERO[3]], 2, 6, steps=5, **options):
        assert_close(rows, expected)


@pytest.mark.long
def test_shared_rows_follow_fp32_in_bf16_as_rows_of_two_ranks_do():
    (expected,) = trained(1, [ALONE], 1, 12)
    cases = [["deepspeed", stage, "bf16"] for stage in range(4)]
    for rows in (*trained(2, cases, 2, 12), *trained(2, cases, 1, 6)):
        for row, wanted in zip(rows, expected, strict=True):
            # A result of each layer is rounded to 2**-9 of itself, and the rate is high: 2% after 20 steps.
            assert row[0] == pytest.approx(wanted[0], rel=3e-2)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_optimizers_of_whole_matrices_step_them_whole_where_rows_are_shared(optimizer):
    (expected,) = trained(1, [[*ALONE, optimizer]], 1, 12, steps=5)
    for rows in trained(4, [[*case, optimizer] for case in (ZERO[1], ZERO[3])], 2, 3, steps=5):
        # Muon iterates in bf16: the order of an fp32 sum moves its update by up to 2**-8 of itself.
        assert_close(rows, expected, loss=1e-4, norm=1e-3)


def check_layouts(model, world_size, seeds):
    # In float64, where the order of sums does not hide an error: in fp32 gradients are some 5e-7 apart.
    arguments = {"model": model, "seeds": list(seeds), "dtype": "float64"}
    ranks = run_in_ranks(f"{WORKERS}:layout_errors", world_size, arguments)
    assert all(max(errors) < 1e-12 for errors in ranks)


@pytest.mark.parametrize("model", ["window", "sinks", "latent", "hybrid", "two stacks"])
def test_gradients_of_some_random_layouts_are_those_of_whole_rows(model):
    check_layouts(model, 3, range(2))


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_of_200_random_layouts_are_those_of_whole_rows(model, world_size):
    if {"few keys": 8, "hybrid": 12}.get(model, 6) % world_size:
        pytest.skip("heads do not divide")
    check_layouts(model, world_size, range(LAYOUTS))


def check_saved(model, world_size, *, whole):
    arguments = {"model": model, "lengths": [512, 1024]}
    for rows in run_in_ranks(f"{WORKERS}:saved_bytes", world_size, arguments):
        for of_row, part, planned in rows:
            assert part == pytest.approx(planned, rel=0.05)
            # Of values that are summed in each layer a rank keeps two copies: before and after the exchange.
            assert part == pytest.approx(of_row / world_size, rel=whole)
        (_, short, _), (_, long, _) = rows
        assert long == pytest.approx(2 * short, rel=0.05)


def test_a_rank_saves_bytes_in_proportion_to_its_columns_as_planned():
    check_saved("few keys", 2, whole=0.05)


@pytest.mark.long
@pytest.mark.parametrize("model", [name for name in MODELS if name not in ("two stacks", "labels")])
def test_every_make_of_a_stack_saves_bytes_as_planned(model):
    check_saved(model, 2, whole=0.15)


@pytest.mark.long
def test_twice_as_many_ranks_save_half_as_many_bytes_each():
    by_ranks = {}
    for world_size in (2, 4):
        arguments = {"model": "few keys", "lengths": [1024]}
        ((by_ranks[world_size],), *_) = run_in_ranks(f"{WORKERS}:saved_bytes", world_size, arguments)
    assert by_ranks[4][1] == pytest.approx(by_ranks[2][1] / 2, rel=0.05)


@pytest.mark.long
def test_the_peak_of_a_rank_is_in_proportion_to_its_columns_loss_and_feedforward_layer_included():
    for rows in run_in_ranks(f"{WORKERS}:peak_bytes", 2, {"model": "few keys", "lengths": [512, 1024], "tiles": 8}):
        for of_row, part in rows:
            assert part == pytest.approx(of_row / 2, rel=0.05)
        (_, short), (_, long) = rows
        assert long == pytest.approx(2 * short, rel=0.05)


@pytest.mark.parametrize(
    ("packing", "steps"),
    [("concat", 2), *(pytest.param(one, 5, marks=pytest.mark.long) for one in ("concat", "padded"))],
)
def test_a_run_moves_between_degrees_with_the_same_samples(tmp_path, corpus, packing, steps):
    evaluated = (
        f"data.packing={packing}",
        f"eval={{every_steps: {steps}, max_tokens: 800}}",
        f"tracking.log_every_steps={steps}",
    )
    evaluated += ("tracking.samples={prompts: [alpha], max_tokens: 8}",)  # generated from whole rows
    golden, moved = (write_run(tmp_path / name, corpus) for name in ("golden", "moved"))
    run_steps(golden, 2, 3 * steps, *evaluated)
    for number, sequence in ((1, 2), (2, 1), (3, 2)):
        run_steps(moved, 2, number * steps, *evaluated, sequence=sequence)
    expected, found = ledger(run_dir(golden)), ledger(run_dir(moved))
    assert samples(found) == samples(expected) and len(found) == 3 * steps
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    # Nothing is converted: what a rank holds after loading is what was saved.
    before = contents(run_dir(moved).checkpoints / f"step-{2 * steps:08}")
    after = contents(newest_of(moved.parent / f"loaded-{3 * steps}"))
    assert all(bool((before[key] == after[key]).all()) for key in before)
    rows = [[json.loads(line) for line in run_dir(one).metrics.read_text().splitlines()] for one in (golden, moved)]
    evaluations = [
        [(row["step"], row["val_tokens"], row["val_loss"]) for row in one if "val_loss" in row] for one in rows
    ]
    assert len(evaluations[0]) == 3
    texts = [run_dir(one).path.joinpath("samples.jsonl").read_text() for one in (golden, moved)]
    assert texts[0] == texts[1]
    for mine, its in zip(*evaluations, strict=True):
        assert mine == pytest.approx(its, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_with_dropout_resumes_bit_for_bit_and_rows_that_do_not_divide_are_padded(tmp_path, corpus, ranks):
    dropout = ("model.decoder.dropout=0.1",)
    whole, stopped = (write_run(tmp_path / name, corpus) for name in ("whole", "stopped"))
    run_steps(whole, ranks, 12, *dropout, sequence=ranks)
    for stop in (7, 12):
        run_steps(stopped, ranks, stop, *dropout, sequence=ranks)
    left, right = ledger(run_dir(whole)), ledger(run_dir(stopped))
    assert (samples(left), losses(left)) == (samples(right), losses(right))
    weights, others = (contents(newest(run_dir(one))) for one in (whole, stopped))
    assert all(bool((weights[key] == others[key]).all()) for key in weights)
