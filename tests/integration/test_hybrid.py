"""Hybrids of mixers with a state and attention on real ranks: one process's losses, resumed bit for bit."""

import pytest

from tests.helpers.ranks import run_in_ranks
from tests.helpers.topologies import contents, ledger, newest, run_dir, write_run
from tests.integration.test_experts import ALONE, ZERO, assert_close

WORKERS = "tests.integration.hybrid_workers"
JOBS = "tests.helpers.topologies:run_jobs"
STEPS = 8


def trained(world_size, cases, micro, steps=STEPS, **shared):
    """Rows of [loss, gradient norm, skipped] of each case; all ranks agree."""
    arguments = {"cases": cases, "micro": micro, "steps": steps, **shared}
    ranks = run_in_ranks(f"{WORKERS}:losses_of", world_size, arguments)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


def test_two_ranks_of_zero_3_train_like_one_process():
    (expected,) = trained(1, [ALONE], 12)
    (rows,) = trained(2, [ZERO[3]], 2)
    assert_close(rows, expected, loss=1e-6, norm=1e-5)
    assert expected[-1][0] < expected[0][0] - 0.1


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "sequence"), [(2, 1), (2, 2), (4, 2)])
def test_ranks_share_experts_beside_mixers_and_rows_at_once(world_size, sequence):
    (expected,) = trained(1, [ALONE], 12, steps=4, experts=1)
    for rows in trained(world_size, [ZERO[1], ZERO[3]], 3, steps=4, experts=2, sequence=sequence):
        assert_close(rows, expected)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["muon", "soap"])
def test_optimizers_of_whole_matrices_step_those_of_mixers_at_every_zero_stage(optimizer):
    # Two steps: from the third on SOAP's losses differ by 6e-3 and Muon's by 1e-5 between micro-batches of one process.
    (expected,) = trained(1, [[*ALONE, optimizer]], 12, steps=2)
    for rows in trained(2, [[*ZERO[1], optimizer], [*ZERO[3], optimizer]], 2, steps=2):
        # Muon iterates in bf16: the order of an fp32 sum moves its update by up to 2**-8 of itself.
        assert_close(rows, expected, norm=1e-3)


def test_a_run_on_packed_documents_is_resumed_bit_for_bit(tmp_path, corpus):
    settings = [
        "model.decoder={layers: 4, mixers: [delta, mamba2, convolution, attention]}",
        "eval={every_steps: 2, max_tokens: 800}",
        "batch.micro=6",
    ]
    settings.append("engine={kind: deepspeed, zero_stage: 2, precision: fp32, device: cpu}")
    whole, stopped = (write_run(tmp_path / name, corpus) for name in ("whole", "stopped"))
    for config, stop in ((whole, 4), (stopped, 2), (stopped, 4)):
        job = {"config": str(config), "overrides": [*settings, f"train.stop_after={stop}"]}
        for result in run_in_ranks(JOBS, 2, {"jobs": [job]}):
            assert result[0][0] == 0
    rows = [
        [{key: value for key, value in row.items() if key != "attempt"} for row in ledger(run_dir(one)).values()]
        for one in (whole, stopped)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 4
    weights, resumed = (contents(newest(run_dir(one))) for one in (whole, stopped))
    assert any("attention.a_log" in str(key) for key in weights)
    assert all(bool((weights[key] == resumed[key]).all()) for key in weights)
