"""From measured speeds to shares, from a run's rows to a step, and from a config to one that is small."""

from pathlib import Path

import pytest

from pretrain.config.load import load_config
from pretrain.doctor.block_time import DEPTHS, block_passes, has_blocks, shallow
from pretrain.doctor.calibrate import build_calibration, describe, shape_of
from pretrain.doctor.small import fewer_layers, small_overrides
from pretrain.errors import ConfigError
from pretrain.plan.cluster import Cluster
from pretrain.plan.gpus import CONSTANTS, GPUS, find_gpu, name_of_device
from pretrain.plan.roofline import plan_work, time_step
from pretrain.plan.task import ParallelLayout, task_of

QUICKSTART = "configs/run/quickstart.yaml"
H100 = GPUS["h100"]


def measured(**changes):
    """What an H100 would give whose kernels follow the law with 0.8 and 400, on 8 ranks of one node."""
    found = {
        "products": [[width, 0.8 * width / (width + 400) * H100.flops] for width in (1024, 2048, 4096, 8192)],
        "attention": [[keys, 0.4 * keys / (keys + 200) * H100.flops] for keys in (512, 2048)],
        "memory": 0.9 * H100.memory_bytes_s,
        "update": 0.8 * H100.memory_bytes_s,
        "block": None,
        "launched": None,
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
    assert (found.attention, found.half_keys) == (pytest.approx(0.4), pytest.approx(200))
    assert (found.memory_share, found.update_share) == (pytest.approx(0.9), pytest.approx(8 / 9))
    assert (found.passes, found.launch_s) == (None, None), "without a block"
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
    assert rows["attention, 2048 keys"] == ("360 TFLOP/s", "0.400 of long rows")
    assert rows["update"] == ("2.68e+03 GB/s", "0.889 of a copy")
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


def test_a_block_tells_how_often_it_moves_what_it_keeps_and_few_tokens_the_time_of_a_launch():
    config = load_config("configs/run/llama_1b.yaml")
    found = build_calibration(measured(), None)
    constants = found.constants(H100)
    few, more = (shallow(config, layers) for layers in DEPTHS)
    works = [plan_work(task_of(one), ParallelLayout(one.engine, config.batch.micro, 1), 1) for one in (few, more)]
    times = [time_step(work, Cluster(1, 1, H100), constants) for work in works]
    block_s = (times[1].compute + times[1].elementwise - times[0].compute - times[0].elementwise) / 2
    passes = CONSTANTS.shares["hopper"].compiled_passes
    assert block_passes(config, H100, constants, block_s) == pytest.approx(passes)
    timed = build_calibration(measured(block=2 * block_s, launched=34 * 2e-5), None, config)
    assert timed.passes > 2 * passes and timed.launch_s == pytest.approx(2e-5)
    assert timed.constants(H100).shares["hopper"].compiled_passes == timed.passes
    rows = {name: value for name, value, _ in describe(timed, measured(block=2 * block_s))}
    assert rows["a launch"] == "20 us" and rows["a block"].endswith(" ms")


def test_models_of_two_stacks_or_of_images_have_no_block_alone():
    names = {"llama_1b": True, "bert_quickstart": True, "t5_quickstart": False, "vit_digits": False}
    assert {name: has_blocks(load_config(f"configs/run/{name}.yaml")) for name in names} == names


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
