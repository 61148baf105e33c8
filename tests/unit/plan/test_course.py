"""Checkpoints, jobs of a time limit, failures and data, by numbers that can be worked out by hand."""

import pytest

from pretrain.cli.plan import find_stored
from pretrain.config.load import load_config
from pretrain.errors import ConfigError
from pretrain.plan.course import (
    StoredData,
    daly_interval,
    parse_time,
    plan_failures,
    plan_jobs,
    plan_supply,
    young_interval,
)
from tests.unit.artifact.runs import write_pairs


def test_young_and_daly_by_hand():
    assert young_interval(50.0, 10_000.0) == pytest.approx(1000.0)
    # Daly 2006, equation 20, with delta / 2M = 0.0025: 1000 (1 + 0.05 / 3 + 0.0025 / 9) - 50.
    assert daly_interval(50.0, 10_000.0) == pytest.approx(966.944, abs=0.001)
    assert daly_interval(30_000.0, 10_000.0) == 10_000.0


def test_no_other_interval_loses_less_than_youngs():
    best = young_interval(60.0, 86_400.0)

    def lost(interval):
        return plan_failures(1, 1.0, 60.0, interval, 1e6).lost_share

    assert lost(best) < min(lost(best * 0.8), lost(best * 1.25))


def test_twice_the_nodes_fail_twice_as_often():
    one, two = (plan_failures(nodes, 154.0, 60.0, 3600.0, 1e7) for nodes in (1, 2))
    assert one.mtbf_s == 154 * 86_400 == 2 * two.mtbf_s
    assert two.expected == pytest.approx(2 * one.expected)


def test_a_run_is_cut_into_jobs_that_start_and_save_within_their_limit():
    jobs = plan_jobs(limit_s=3600.0, total_s=10_000.0, step_s=10.0, save_s=100.0)
    assert (jobs.lost_s, jobs.steps_each) == (400.0, 320)
    assert jobs.count == 4  # 3200 s of steps each
    assert plan_jobs(300.0, 10_000.0, 10.0, 100.0).count == 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3d", 259_200),
        ("12h", 43_200),
        ("90m", 5400),
        ("1d12h", 129_600),
        ("1.5h", 5400),
        ("90", 5400),
        ("12:00:00", 43_200),
        ("30:00", 1800),
        ("2-12:00:00", 216_000),
        ("2-12", 216_000),
    ],
)
def test_times_are_read_as_people_and_slurm_write_them(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "3x", "h3", "1:2:3:4", "soon", "0h"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ConfigError, match=r"--time: .* is no time; write 3d, 12h"):
        parse_time(text)


RUN = {"rows": 16, "row_tokens": 256, "step_s": 0.5, "lanes": 64}


def test_epochs_lanes_and_the_compute_optimal_ratio():
    stored = StoredData(tokens=1_000_000, shards=4, token_bytes=2, vocab_size=8192)
    supply = plan_supply(**RUN, total_rows=16_000, parameters=5_000_000, stored=stored)
    assert supply.needed_tokens == 16 * 256 * 1000
    assert supply.epochs == pytest.approx(4.096)
    assert supply.optimal_tokens == 100_000_000
    assert supply.bytes_s == 16 * 256 * 2 / 0.5
    assert supply.rows_a_lane == 1_000_000 // 256 // 64
    assert supply.problem is None


def test_more_lanes_than_rows_are_a_problem():
    stored = StoredData(tokens=10_000, shards=1, token_bytes=2, vocab_size=8192)
    supply = plan_supply(**RUN, total_rows=160, parameters=1000, stored=stored)
    assert supply.problem is not None and "data.lanes=64 lanes share 39 rows" in supply.problem


def test_without_data_nothing_is_said_of_them():
    supply = plan_supply(**RUN, total_rows=160, parameters=1000, stored=None)
    assert (supply.epochs, supply.rows_a_lane) == (None, None)


def test_a_document_of_padded_rows_is_a_row_of_an_epoch(tmp_path):
    data = write_pairs(tmp_path / "pairs", ["a b", "c d e f", "g"])
    given = [f"data.path={data}", "data.packing=padded"]
    given += ["batch={seq_len: 64, global_tokens: 512, micro: 1}"]
    config = load_config("configs/run/multi30k_recurrent.yaml", given)
    stored = find_stored(config)
    assert stored is not None and stored.tokens == 3 * config.lengths.row
