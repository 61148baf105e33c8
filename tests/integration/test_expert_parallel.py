"""Real ranks that share the experts of each layer train like one process that has them all."""

import json

import pytest

from tests.helpers.ranks import run_in_ranks
from tests.helpers.topologies import ledger, run_dir, run_steps, write_run
from tests.integration.test_experts import assert_close

WORKERS = "tests.integration.expert_parallel_workers"
ZERO = [["deepspeed", stage, "fp32"] for stage in range(4)]
ALONE = ["single", 0, "fp32"]
STEPS = 20


def run_shared(function, world_size, experts, arguments, sequence=1, biases=False):
    """Result of a function of `experts_workers` on every rank."""
    given = {"function": function, "experts": experts, "sequence": sequence, "arguments": arguments, "biases": biases}
    return run_in_ranks(f"{WORKERS}:shared", world_size, given)


def trained(world_size, experts, cases, micro, *, steps=STEPS, **options):
    """Rows and final balance of each case; all ranks agree."""
    arguments = {"cases": cases, "steps": steps, "micro": micro}
    ranks = run_shared("losses_of", world_size, experts, arguments, **options)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


def test_two_ranks_that_share_experts_train_like_one_process():
    ((*expected, final),) = trained(1, 1, [["bias", *ALONE]], 12, steps=10)
    ((*rows, balanced),) = trained(2, 2, [["bias", *ZERO[2]]], 3, steps=10)
    assert_close(rows, expected, loss=1e-6, norm=1e-5)
    assert balanced == final  # counts of tokens, and no rounding between them
    assert expected[-1][0] < expected[0][0] - 0.1


@pytest.mark.long
@pytest.mark.parametrize("balance", ["loss", "bias"])
def test_every_zero_stage_trains_experts_over_two_ranks_like_one_process(balance):
    ((*expected, final),) = trained(1, 1, [[balance, *ALONE]], 12)
    for *rows, balanced in trained(2, 2, [[balance, *case] for case in ZERO], 2):
        assert_close(rows, expected)
        assert balanced == final


@pytest.mark.long
@pytest.mark.parametrize(("experts", "balance"), [(2, "loss"), (4, "bias"), (4, "one each")])
def test_copies_of_experts_and_one_expert_a_rank_train_like_one_process(experts, balance):
    ((*expected, final),) = trained(1, 1, [[balance, *ALONE]], 12)
    for *rows, balanced in trained(4, experts, [[balance, *case] for case in ZERO], 3):
        assert_close(rows, expected)
        assert balanced == final


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "sequence", "experts", "balance"),
    [(2, 2, 2, "loss"), (4, 2, 2, "bias"), (4, 2, 4, "loss"), (3, 3, 3, "thirds"), (4, 2, 2, "encoder")],
)
def test_experts_and_rows_are_shared_at_once(world_size, sequence, experts, balance):
    ((*expected, final),) = trained(1, 1, [[balance, *ALONE]], 12)
    for *rows, balanced in trained(world_size, experts, [[balance, *case] for case in ZERO], 3, sequence=sequence):
        assert_close(rows, expected)
        assert balanced == final


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "experts"), [(2, 2), (4, 2), (4, 4)])
def test_the_gradient_of_every_parameter_is_that_of_one_process(world_size, experts):
    (expected,) = run_shared("gradients_of", 1, 1, {"cases": [["loss", *ALONE]], "micro": 12})[0]
    arguments = {"cases": [["loss", *case] for case in ZERO], "micro": 3}
    for found in run_shared("gradients_of", world_size, experts, arguments)[0]:
        assert found.keys() == expected.keys()
        for name, values in found.items():
            largest = max(map(abs, expected[name]))
            assert values == pytest.approx(expected[name], rel=1e-5, abs=1e-5 * largest), name


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_experts_with_biases_are_shared_too(optimizer):
    ((*expected, _),) = trained(1, 1, [["loss", *ALONE, optimizer]], 12, steps=8, biases=True)
    for *rows, _ in trained(4, 2, [["loss", *case, optimizer] for case in ZERO], 3, steps=8, biases=True):
        assert_close(rows, expected)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "soap"])
@pytest.mark.parametrize(("world_size", "experts"), [(2, 2), (4, 2)])
def test_optimizers_of_whole_matrices_step_each_expert_whole(optimizer, world_size, experts):
    ((*expected, _),) = trained(1, 1, [["loss", *ALONE, optimizer]], 12, steps=5)
    for *rows, _ in trained(world_size, experts, [["loss", *case, optimizer] for case in ZERO], 3, steps=5):
        # Muon iterates in bf16: the order of an fp32 sum moves its update by up to 2**-8 of itself. SOAP turns by
        # eigenvectors, of which those of close values are arbitrary, with experts on every rank too.
        loss, norm = (1e-2, 1e-1) if optimizer == "soap" else (1e-4, 1e-3)
        assert_close(rows, expected, loss=loss, norm=norm)


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "experts"), [(2, 2), (4, 2)])
def test_experts_without_tokens_on_a_rank_or_at_all_neither_hang_nor_change_the_training(world_size, experts):
    steps = 60
    (expected,) = run_shared("starved_losses", 1, 1, {"cases": [["loss", *ALONE]], "steps": steps, "micro": 12})[0]
    arguments = {"cases": [["loss", *case] for case in ZERO], "steps": steps, "micro": 3}
    for found in run_shared("starved_losses", world_size, experts, arguments):
        for rows in found:
            # 60 steps of AdamW carry rounding further than 20.
            assert_close(rows, expected, loss=1e-4, norm=1e-2)


MOVES = [(2, 2), (1, 3), (4, 1), (2, 3), (4, 0), (1, 1), (2, 0), (4, 3)]
"""Experts over so many of 4 ranks, and the ZeRO stage, one after another."""


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
@pytest.mark.parametrize("balance", ["loss", "bias"])
def test_checkpoints_load_at_any_degree_and_stage_without_conversion(tmp_path, balance, optimizer):
    def train(world_size, cases, folder):
        arguments = {"folder": str(tmp_path / folder), "cases": cases, "micro": 3}
        found, *others = run_in_ranks(f"{WORKERS}:moved", world_size, arguments)
        assert all(other == found for other in others)
        return [row for rows in found for row in rows]

    # Muon's bf16 iterations carry the order of a sum further with each step.
    moves, tolerance = (MOVES[:3], (1e-3, 1e-2)) if optimizer == "muon" else (MOVES, (1e-5, 1e-4))
    cases = [[experts, balance, "deepspeed", stage, "fp32", optimizer] for experts, stage in moves]
    expected = train(1, [[1, balance, *ALONE, optimizer]] * len(moves), "alone")
    assert_close(train(4, cases, "moved"), expected, loss=tolerance[0], norm=tolerance[1])


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{"checkpointing": "full"}, {"checkpointing": "selective"}, {"compile": True}, {"offload": "optimizer"}],
    ids=lambda options: "-".join(map(str, *options.items())),
)
def test_recomputed_compiled_and_offloaded_engines_train_shared_experts_alike(options):
    (expected,) = run_shared("options_of", 1, 1, {"options": [{}], "micro": 12})[0]
    for experts, world_size in ((2, 2), (2, 4)):
        (rows,) = run_shared("options_of", world_size, experts, {"options": [options], "micro": 3})[0]
        assert_close(rows, expected)


TILED = [{"tiles": 3}, {"tiles": 3, "checkpointing": "full"}]


@pytest.mark.long
def test_tiles_of_tokens_pass_shared_experts_with_one_exchange_a_tile():
    (expected,) = run_shared("options_of", 1, 1, {"options": [{}], "micro": 12})[0]
    for experts, world_size in ((2, 2), (2, 4)):
        for rows in run_shared("options_of", world_size, experts, {"options": TILED, "micro": 3})[0]:
            assert_close(rows, expected)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.long)])
def test_tiles_without_tokens_take_part_in_every_exchange(stage):
    """Rank 0 has 5 tokens and rank 1 has 48, in 8 tiles each."""
    alone, *_ = run_in_ranks(f"{WORKERS}:uneven_tiles", 1, {"experts": 1, "stage": 0, "tiles": 1})
    for found in run_in_ranks(f"{WORKERS}:uneven_tiles", 2, {"experts": 2, "stage": stage, "tiles": 8}):
        assert found == pytest.approx(alone, rel=1e-5)


@pytest.mark.long
def test_frozen_experts_stay_those_of_each_rank():
    frozen = {"options": [{"finetune": "freeze"}]}
    (expected,) = run_shared("options_of", 1, 1, frozen | {"micro": 12})[0]
    (rows,) = run_shared("options_of", 4, 2, frozen | {"micro": 3})[0]
    assert_close(rows, expected)


@pytest.mark.long
def test_shared_experts_follow_fp32_in_bf16():
    ((*expected, _),) = trained(1, 1, [["loss", *ALONE]], 12, steps=10)
    cases = [["loss", "deepspeed", stage, "bf16"] for stage in (1, 2, 3)]
    for *rows, _ in (*trained(2, 2, cases, 6, steps=10), *trained(2, 1, cases, 6, steps=10)):
        for row, wanted in zip(rows, expected, strict=True):
            # A result of each layer is rounded to 2**-9 of itself. Ten steps: later the routers choose
            # other experts for it, and one process in bf16 is 2% off one in fp32 after 20.
            assert row[0] == pytest.approx(wanted[0], rel=1e-2)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_run_resumes_bit_for_bit_at_the_same_degree(tmp_path, stage):
    case = ["bias", "deepspeed", stage, "fp32"]
    arguments = {"folder": str(tmp_path), "saved": case, "loaded": case, "micro": 6}
    for expected, found in run_shared("resumed", 2, 2, arguments):
        assert found == expected


@pytest.mark.parametrize("stage", [2, pytest.param(0, marks=pytest.mark.long)])
def test_replicas_of_experts_are_compared_among_the_ranks_that_have_them(stage):
    arguments = {"experts": 2, "stage": stage, "changed": {"1": "down", "2": "gate_up"}}
    alike, experts, norms = run_in_ranks(f"{WORKERS}:replicas", 4, arguments)[0]
    assert alike is None
    # Ranks 0 and 2 have the same experts, as have 1 and 3: with two, no majority tells.
    assert "weights of rank 0 on" in experts and "and rank 2 on" in experts
    assert "first decoder.blocks.0.feedforward.gate_up.weight; no majority" in experts
    assert "weights of rank 3 on" in norms and "first decoder.norm.weight; the other 3 agree" in norms


MIXTURE = "model.decoder.experts={count: 4, top_k: 2, width: 10, balance: bias, balance_rate: 0.02}"


def rows_with(config, key):
    """Rows of metrics.jsonl that have a key, by step."""
    lines = map(json.loads, run_dir(config).metrics.read_text().splitlines())
    return {row["step"]: row for row in lines if key in row}


@pytest.mark.parametrize(("stages", "steps"), [((2, 2), 2), pytest.param((0, 1, 3), 5, marks=pytest.mark.long)])
def test_a_run_moves_between_degrees_and_measures_the_same(tmp_path, corpus, stages, steps):
    """Evaluations, texts, norms by layer, the average of the weights, and the loads of experts."""
    more = (
        f"eval={{every_steps: {steps}, max_tokens: 800}}",
        f"tracking.log_every_steps={steps}",
        "optim.ema={horizon_steps: 5}",
        "guard.check_replicas_every=2",
    )
    more += ("tracking.samples={prompts: [alpha], max_tokens: 8}", f"tracking.norms_every_steps={steps}")
    golden, moved = (write_run(tmp_path / name, corpus) for name in ("golden", "moved"))
    stops = [steps * (place + 1) for place in range(len(stages))]
    run_steps(golden, 1, stops[-1], MIXTURE, *more)
    for stop, experts, stage in zip(stops, (2, 1, 2), stages, strict=False):
        run_steps(moved, 2, stop, MIXTURE, *more, stage=stage, experts=experts)
    expected, found = (ledger(run_dir(config)) for config in (golden, moved))
    assert [row["digest"] for row in found.values()] == [row["digest"] for row in expected.values()]
    losses = [[float.fromhex(row["loss"]) for row in rows.values()] for rows in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == stops[-1]
    texts = [run_dir(config).path.joinpath("samples.jsonl").read_text() for config in (golden, moved)]
    assert texts[0] == texts[1]
    for key in ("val_loss", "grad_norm/decoder_0", "expert_load_max"):
        mine, its = rows_with(moved, key), rows_with(golden, key)
        assert mine.keys() == its.keys() == set(stops), key
        for step, row in its.items():
            names = [name for name in row if name.startswith(("val_", "grad_norm", "update_norm", "expert", "router"))]
            assert [mine[step][name] for name in names] == pytest.approx([row[name] for name in names], rel=1e-4), step


ADVERSARIAL_STEPS = 1000


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "experts", "stage"), [(2, 2, 2), (4, 2, 3)])
def test_1000_steps_that_starve_every_expert_on_some_rank_or_send_all_tokens_to_one(world_size, experts, stage):
    def run(ranks, given):
        arguments = {"steps": ADVERSARIAL_STEPS, "micro": 12 // ranks, **given}
        return run_in_ranks(f"{WORKERS}:adversarial", ranks, arguments, timeout=None)

    (expected,) = run(1, {"experts": 1, "case": ALONE})
    found = run(world_size, {"experts": experts, "case": ["deepspeed", stage, "fp32"]})
    starved = [any(of_ranks) for of_ranks in zip(*(rank["starved"] for rank in found), strict=True)]
    assert all(starved) and found[0]["alone"] == expected["alone"] >= ADVERSARIAL_STEPS // 3
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-4)
