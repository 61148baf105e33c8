"""From measured speeds to shares, from a run's rows to a step, and from a config to one that is small."""

from pathlib import Path

import pytest

from pretrain.config.load import load_config
from pretrain.doctor.calibrate import build_calibration, describe, shape_of, step_seconds, with_step
from pretrain.doctor.small import fewer_layers, small_overrides
from pretrain.errors import ConfigError
from pretrain.plan.cluster import Cluster
from pretrain.plan.gpus import GPUS, find_gpu, name_of_device

QUICKSTART = "configs/run/quickstart.yaml"
H100 = GPUS["h100"]


def measured(**changes):
    """What an H100 would give whose kernels follow the law with 0.8 and 400, on 8 ranks of one node."""
    found = {
        "products": [[width, 0.8 * width / (width + 400) * H100.flops] for width in (1024, 2048, 4096, 8192)],
        "attention": 0.4 * H100.flops,
        "memory": 0.9 * H100.memory_bytes_s,
        "overhead_bytes": 500 * 2**20,
        "group_bytes": 300 * 2**20,
        "memory_bytes": 79 * 2**30,
        "all_reduce": 0.75 * H100.link_bytes_s,
        "num_hosts": 1,
        "num_ranks": 8,
        "device": "NVIDIA H100 80GB HBM3",
        "host": "n1",
        "versions": {"torch": "2.9.0"},
        "shape": {"device": "cuda", "precision": "bf16"},
    }
    return found | changes


def test_measured_speeds_become_shares_of_the_data_sheet():
    found = build_calibration(measured(), None)
    assert (found.gpu, found.products, found.half_width) == ("h100", pytest.approx(0.8), pytest.approx(400))
    assert (found.attention, found.memory_share) == (pytest.approx(0.4), pytest.approx(0.9))
    assert (found.link_share, found.network_share) == (pytest.approx(0.75), None)
    assert (found.overhead_bytes, found.group_bytes, found.memory_bytes) == (500 * 2**20, 300 * 2**20, 79 * 2**30)


def test_over_several_hosts_it_is_the_network_that_is_measured():
    # 16 ranks on 2 hosts: 15/16 of the bytes pass a rank, half of them the 8 cards of a node (plan/roofline.py).
    speed = 0.6 * 8 * H100.network_bytes_s * 2 * 15 / 16
    found = build_calibration(measured(num_hosts=2, num_ranks=16, all_reduce=speed), None)
    assert (found.link_share, found.network_share) == (None, pytest.approx(0.6))


def test_one_rank_tells_nothing_of_links_and_fp32_is_a_share_of_its_own_peak():
    alone = build_calibration(measured(all_reduce=None, group_bytes=None, num_ranks=1), None)
    assert (alone.link_share, alone.network_share, alone.group_bytes) == (None, None, None)
    fp32 = build_calibration(measured(shape={"device": "cuda", "precision": "fp32"}), None)
    assert fp32.attention == pytest.approx(0.4 * H100.flops / H100.flops_fp32)


def test_an_unknown_device_is_refused_unless_it_is_said_what_it_is_like():
    with pytest.raises(ConfigError, match=r"Fancy 9000 is not in pretrain/plan/gpus\.py; say which of .*: --gpu"):
        build_calibration(measured(device="Fancy 9000"), None)
    assert build_calibration(measured(device="Fancy 9000"), "a100").gpu == "a100"


def test_the_table_shows_what_was_measured():
    rows = {name: (value, share) for name, value, share in describe(build_calibration(measured(), None), measured())}
    assert rows["attention"] == ("396 TFLOP/s", "0.400")
    assert rows["all-reduce"] == ("338 GB/s a rank", "0.750")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A10G", "a10"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI250X", "mi250x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA A4000", None),
        ("AMD EPYC CPU", None),
    ],
)
def test_devices_are_known_by_what_their_driver_calls_them(device, name):
    assert name_of_device(device) == name
    assert name is None or name in GPUS


def test_every_pattern_of_a_device_name_is_of_a_gpu():
    from pretrain.plan import gpus

    assert gpus._PATTERNS.keys() <= GPUS.keys()


def test_a_step_is_that_of_the_second_half_of_a_run():
    # The first step takes 10 s, the others 2; rows have the mean so far.
    rows = [{"step": step, "step_time_s": (10 + 2 * (step - 1)) / step} for step in range(1, 13)]
    assert step_seconds(rows) == pytest.approx(2.0)
    assert step_seconds(rows[:3]) is None
    assert step_seconds([{"step": 1, "loss": 3.0}] * 9) is None


def test_the_efficiency_is_what_a_step_reaches_and_never_above_one():
    found = build_calibration(measured(), None)
    assert with_step(found, 1.0, 4.0).efficiency == 0.25
    assert with_step(found, 1.0, 0.9).efficiency == 1.0


def test_the_shape_of_kernels_is_the_configs():
    shape = shape_of(load_config(QUICKSTART), "cpu")
    assert (shape.heads, shape.head_width, shape.seq_len, shape.causal, shape.precision) == (4, 32, 128, True, "fp32")
    recurrent = load_config("configs/run/multi30k_recurrent.yaml")
    with pytest.raises(ConfigError, match=r"model\.kind=recurrent is not calibrated; give a config with a Transformer"):
        shape_of(recurrent, "cpu")


def test_a_model_that_does_not_fit_gets_fewer_layers_and_one_that_does_keeps_them():
    config, gpu = load_config("configs/run/llama_8b.yaml"), find_gpu("h100")
    assert fewer_layers(load_config("configs/run/llama_1b.yaml"), Cluster(1, 8, gpu), 1) == {"decoder": 16}
    small = fewer_layers(config, Cluster(1, 8, gpu), 0)["decoder"]
    assert 1 <= small < 32
    assert fewer_layers(load_config(QUICKSTART), Cluster(1, 2, find_gpu("cpu")), 0) == {"decoder": 4}


def test_a_small_run_loads_divides_and_keeps_what_matters():
    config, cluster = load_config("configs/run/llama_8b.yaml"), Cluster(1, 8, find_gpu("h100"))
    overrides = small_overrides(config, cluster, Path("runs/.doctor"), "stage-0", 4, 0)
    small = load_config("configs/run/llama_8b.yaml", [*overrides, "engine.zero_stage=0"])
    assert small.batch.rows == 8 * config.batch.micro * 2
    assert small.train.last_step == 4 and small.optim.schedule == config.optim.schedule
    assert small.model.decoder.width == config.model.decoder.width
    assert (small.tracking.wandb, small.eval.every_steps) == ("off", 0)


def test_a_small_run_keeps_the_rates_of_a_schedule_in_tokens():
    given = ["optim.schedule={kind: wsd, warmup_steps: 0, warmup_tokens: 512000, cooldown_tokens: 512000}"]
    given += ["batch.schedule=[{tokens: 4096, global_tokens: 4096}]", "train.steps=500"]
    config = load_config(QUICKSTART, given)
    small = small_overrides(config, Cluster(1, 1, find_gpu("cpu")), Path("runs/.doctor"), "stage-0", 4, 0)
    schedule = load_config(QUICKSTART, [*given, *small, "engine.zero_stage=0"]).optim.schedule
    assert schedule == config.optim.schedule.in_steps(config.batch, 500)
    assert schedule.warmup_steps == 126 and schedule.cooldown_steps == 125
