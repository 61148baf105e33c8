"""A checkpoint of any engine, ZeRO stage and world size loads into any other, and training goes on the same."""

import pytest

from tests.helpers.ranks import run_in_ranks

CASES = [
    *(["deepspeed", stage, precision] for precision in ("fp32", "bf16") for stage in range(4)),
    ["ddp", 0, "fp32"],
    ["ddp", 0, "bf16"],
    ["deepspeed", 2, "fp32", "adamw", "optimizer"],
    ["deepspeed", 3, "fp32", "adamw", "both"],
]
WHOLE = [
    [*case, optimizer]
    for optimizer in ("muon", "adafactor")
    for case in (*(["deepspeed", stage, "fp32"] for stage in range(4)), ["ddp", 0, "fp32"], ["deepspeed", 3, "bf16"])
]
WHOLE += [["ddp", 0, "bf16", "muon"], ["ddp", 0, "bf16", "soap"]]
WHOLE += [["deepspeed", stage, "fp32", recipe] for recipe in ("normuon", "soap") for stage in range(4)]
WHOLE += [["deepspeed", stage, "fp32", recipe] for recipe in ("lion", "cautious", "completep") for stage in (2, 3)]
"""Cases of optimizers that step whole matrices, with state of their own shapes, and other recipes."""
STEPS = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Every case trained and saved on two ranks: the folder, and what followed each save."""
    folder = str(tmp_path_factory.mktemp("saved"))
    (followed, _) = run_in_ranks(
        "tests.integration.checkpoint_workers:save_each",
        2,
        {"cases": [*CASES, *WHOLE], "folder": folder, "steps": STEPS},
    )
    return folder, dict(zip(("-".join(map(str, case)) for case in [*CASES, *WHOLE]), followed, strict=True))


def name(case):
    return "-".join(map(str, case))


@pytest.mark.long
def test_the_same_topology_continues_bit_for_bit(saved):
    folder, followed = saved
    pairs = [[case, case] for case in [*CASES, *WHOLE]]
    (loaded, other) = run_in_ranks(
        "tests.integration.checkpoint_workers:load_pairs", 2, {"pairs": pairs, "folder": folder, "steps": STEPS}
    )
    assert loaded == other
    for (case, _), rows in zip(pairs, loaded, strict=True):
        assert rows == followed[name(case)], case


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 3])
def test_another_world_size_and_stage_continue_alike(saved, world_size):
    folder, followed = saved
    fp32 = [case for case in CASES if case[2] == "fp32"]
    # Each stage is loaded by the next one round: every stage is written and read across a stage change.
    pairs = [[case, fp32[(number + world_size) % len(fp32)]] for number, case in enumerate(fp32)]
    pairs = [[a, ["single", 0, "fp32"] if b[0] == "ddp" and world_size == 1 else b] for a, b in pairs]
    (loaded, *_) = run_in_ranks(
        "tests.integration.checkpoint_workers:load_pairs",
        world_size,
        {"pairs": pairs, "folder": folder, "steps": STEPS},
    )
    for (source, _), rows in zip(pairs, loaded, strict=True):
        expected = followed[name(source)]
        assert rows[0][0] == pytest.approx(expected[0][0], rel=1e-6), pairs
        for row, wanted in zip(rows, expected, strict=True):
            assert row[0] == pytest.approx(wanted[0], rel=1e-5), pairs


@pytest.mark.long
def test_bf16_masters_move_between_stages_without_loss(saved):
    folder, followed = saved
    bf16 = [case for case in CASES if case[2] == "bf16"]
    pairs = [[case, bf16[(number + 1) % len(bf16)]] for number, case in enumerate(bf16)]
    (loaded, _) = run_in_ranks(
        "tests.integration.checkpoint_workers:load_pairs", 2, {"pairs": pairs, "folder": folder, "steps": STEPS}
    )
    for (source, _), rows in zip(pairs, loaded, strict=True):
        # The forward pass in bf16 does not depend on the stage, so the first loss has no rounding of its own.
        assert rows[0][0] == pytest.approx(followed[name(source)][0][0], rel=1e-6), source


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 3])
def test_state_of_whole_matrices_moves_between_stages_and_world_sizes(saved, world_size):
    folder, followed = saved
    pairs = []
    for optimizer in ("muon", "adafactor"):
        cases = [case for case in WHOLE if case[2:] == ["fp32", optimizer]]
        pairs += [[case, cases[(number + world_size) % len(cases)]] for number, case in enumerate(cases)]
    pairs = [[a, ["single", *b[1:]] if b[0] == "ddp" and world_size == 1 else b] for a, b in pairs]
    (loaded, *_) = run_in_ranks(
        "tests.integration.checkpoint_workers:load_pairs",
        world_size,
        {"pairs": pairs, "folder": folder, "steps": STEPS},
    )
    for (source, target), rows in zip(pairs, loaded, strict=True):
        for row, wanted in zip(rows, followed[name(source)], strict=True):
            # Muon's iterations are in bf16, so that a gradient summed in another order moves an update by 2**-8 of it.
            assert row[0] == pytest.approx(wanted[0], rel=1e-6 if row is rows[0] else 1e-4), (source, target)


@pytest.mark.long
def test_a_checkpoint_of_another_optimizer_is_refused_by_name(saved):
    folder, _ = saved
    arguments = {"saved": CASES[2], "case": WHOLE[1], "folder": folder, "steps": STEPS}
    for message in run_in_ranks("tests.integration.checkpoint_workers:refused_load", 2, arguments):
        assert "saved under another optimizer: it has exp_avg, exp_avg_sq, and no momentum_buffer" in message
        assert "init.from" in message
