"""What was measured takes the place of what is assumed: in speed, in memory, and in whether a layout is refused."""

import json
from dataclasses import asdict, replace

import pytest

from pretrain import cli
from pretrain.config.load import load_config
from pretrain.errors import ConfigError
from pretrain.plan.cluster import (
    Calibration,
    Cluster,
    calibration_folder,
    find_calibration,
    fit_products,
    load_calibration,
    save_calibration,
)
from pretrain.plan.gpus import CONSTANTS, find_gpu
from pretrain.plan.memory import memory_limit, rank_memory
from pretrain.plan.roofline import predict_rate
from pretrain.plan.search import check_fits
from pretrain.plan.task import ParallelLayout, task_of

QUICKSTART = "configs/run/quickstart.yaml"
MEASURED = Calibration(
    gpu="h100",
    device="NVIDIA H100 80GB HBM3",
    host="n1",
    measured="2026-01-02T03:04:05+00:00",
    versions={"torch": "2.9.0"},
    products=CONSTANTS.shares["hopper"].products * find_gpu("h100").best_product,
    half_width=CONSTANTS.shares["hopper"].half_width,
    attention=CONSTANTS.shares["hopper"].flash,
    half_keys=CONSTANTS.shares["hopper"].half_keys,
    memory_share=CONSTANTS.memory_share,
    link_share=None,
    network_share=None,
    efficiency=1.0,
    overhead_bytes=600 * 2**20,
    group_bytes=500 * 2**20,
    memory_bytes=79 * 2**30,
)


def large(micro):
    overrides = ["model.preset=llama3-8b", "model.vocab_size=128256", "batch.seq_len=8192", "engine.precision=bf16"]
    return load_config(QUICKSTART, [*overrides, "batch.global_tokens=4194304", f"batch.micro={micro}"])


def step_s(calibration):
    config = large(1)
    cluster = Cluster(2, 8, find_gpu("h100"), calibration)
    return predict_rate(task_of(config), ParallelLayout(config.engine, 1, 32), cluster).step_s


@pytest.mark.parametrize(("products", "half_width"), [(0.6, 500.0), (0.9, 20.0)])
def test_shares_that_follow_the_law_are_fitted_exactly(products, half_width):
    shares = [(width, products * width / (width + half_width)) for width in (256, 512, 1024, 4096)]
    assert fit_products(shares) == pytest.approx((products, half_width), rel=1e-9)


def test_shares_that_fall_with_width_give_their_largest_and_no_half_width():
    assert fit_products([(256, 0.7), (512, 0.65), (1024, 0.6)]) == (0.7, 0.0)


def test_the_same_numbers_measured_predict_the_same_and_others_predict_others():
    assert step_s(MEASURED) == step_s(None)
    assert step_s(replace(MEASURED, products=MEASURED.products / 2)) > 1.2 * step_s(None)
    assert step_s(replace(MEASURED, link_share=0.01, network_share=0.01)) > 1.2 * step_s(None)
    half = replace(MEASURED, efficiency=0.5).constants(find_gpu("h100"))
    assert half.shares["hopper"].products == pytest.approx(0.5 * CONSTANTS.shares["hopper"].products)
    assert half.memory_share == pytest.approx(0.5 * CONSTANTS.memory_share)
    assert half.shares["ampere"] == CONSTANTS.shares["ampere"]


def test_overhead_and_limit_are_those_that_were_measured():
    config, gpu = large(1), find_gpu("h100")
    more = replace(MEASURED, overhead_bytes=MEASURED.overhead_bytes + 2**30)
    layout, task = ParallelLayout(config.engine, 1, 1), task_of(config)
    found = [rank_memory(task, layout, Cluster(1, 8, gpu, one)).overhead for one in (None, MEASURED, more)]
    assert found[0] == found[1]
    assert found[2] - found[1] == 2**30
    assert memory_limit(Cluster(1, 8, gpu, MEASURED)) == 79 * 2**30
    cpus = replace(MEASURED, gpu="cpu", memory_bytes=64 * 2**30)
    assert memory_limit(Cluster(2, 4, find_gpu("cpu"), cpus)) == 16 * 2**30


def test_what_does_not_fit_is_a_warning_until_it_was_measured_there_and_then_a_refusal():
    config, gpu = large(4), find_gpu("h100")
    (predicted,) = check_fits(config, Cluster(1, 8, gpu))
    (measured,) = check_fits(config, Cluster(1, 8, gpu, MEASURED))
    assert (predicted.kind, predicted.refuses) == ("memory", False)
    assert (measured.kind, measured.refuses) == ("memory", True)
    assert "of the 79.0 GiB of NVIDIA H100 80GB HBM3, as measured, with batch.micro=4" in measured.what
    (batch,) = check_fits(config, Cluster(1, 3, gpu))
    assert (batch.kind, batch.refuses) == ("batch", True)


def test_a_calibration_is_found_by_the_name_of_its_gpu(tmp_path):
    save_calibration(MEASURED, tmp_path / "h100.json")
    assert find_calibration("H100", tmp_path) == MEASURED
    assert find_calibration("a100", tmp_path) is None
    save_calibration(MEASURED, tmp_path / "a100.json")
    with pytest.raises(ConfigError, match=r"a100\.json: was measured on h100, not a100"):
        find_calibration("a100", tmp_path)


def test_the_cache_of_the_user_is_where_it_is_kept(tmp_path):
    assert calibration_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "pretrain" / "calibration"
    assert str(calibration_folder({})).endswith(".cache/pretrain/calibration")


def test_a_file_of_before_is_read_and_counts_the_efficiency_of_its_step(tmp_path):
    values = asdict(replace(MEASURED, efficiency=0.5))
    for name in ("half_keys", "passes", "update_share", "launch_s"):
        del values[name]
    (tmp_path / "h100.json").write_text(json.dumps(values))
    found = load_calibration(tmp_path / "h100.json")
    assert found == replace(MEASURED, efficiency=0.5, half_keys=0.0)
    constants = found.constants(find_gpu("h100"))
    assert constants.memory_share == 0.5 * MEASURED.memory_share and constants.launch_s == CONSTANTS.launch_s


@pytest.mark.parametrize("text", ["", "{}", "[1]", json.dumps({**asdict(MEASURED), "products": -1.0})])
def test_a_file_that_is_no_calibration_is_refused(tmp_path, text):
    (tmp_path / "h100.json").write_text(text)
    with pytest.raises(ConfigError, match=r"h100\.json: is no calibration: .*; measure anew"):
        load_calibration(tmp_path / "h100.json")


def test_plan_uses_what_the_cache_holds_and_what_it_is_given(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def facts(*arguments):
        assert cli.run(["plan", QUICKSTART, *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert facts("--gpu", "h100")["calibration"] is None
    save_calibration(MEASURED, tmp_path / "pretrain" / "calibration" / "h100.json")
    assert facts("--gpu", "h100")["calibration"]["host"] == "n1"
    assert facts("--gpu", "a100")["calibration"] is None
    save_calibration(replace(MEASURED, gpu="a100", memory_bytes=2**35), tmp_path / "mine.json")
    found = facts("--calibration", str(tmp_path / "mine.json"))
    assert found["cluster"]["name"] == "A100 80GB"
    assert found["memory"]["limit"] == 2**35
    assert cli.run(["plan", QUICKSTART, "--gpu", "h100", "--calibration", str(tmp_path / "mine.json")]) == 64
    assert "mine.json: was measured on a100, not h100" in capsys.readouterr().err
