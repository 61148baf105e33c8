"""Machine, network and services: what a config needs and is not there is named, with what to do about it."""

import socket
from types import SimpleNamespace

import pytest

from pretrain.config.engine import PLAIN_ENGINE, EngineConfig
from pretrain.config.load import load_config
from pretrain.config.tracking import TrackingConfig
from pretrain.doctor import machine, services
from pretrain.doctor import services as network
from pretrain.doctor.machine import GpuFound, check_compiler, check_cores, check_gpus, check_memory, parse_gpus
from pretrain.doctor.place import find_place, first_node, slurm_environment
from pretrain.doctor.rank_checks import check_torch, import_torch
from pretrain.errors import LaunchError
from pretrain.tracking import run_output
from tests.helpers.shards import make_shards

H100 = GpuFound("NVIDIA H100 80GB HBM3", 81559 * 2**20, "550.54", 9.0)
V100 = GpuFound("Tesla V100-SXM2-32GB", 32768 * 2**20, "535.104", 7.0)
CUDA = EngineConfig(device="cuda", precision="bf16")
CPU = EngineConfig(device="cpu", precision="fp32")


def test_the_answer_of_the_driver_is_read():
    text = "NVIDIA H100 80GB HBM3, 81559, 550.54, 9.0\nbroken line\nTesla V100-SXM2-32GB, 32768, 535.104, [N/A]\n"
    assert parse_gpus(text) == [H100, GpuFound("Tesla V100-SXM2-32GB", 32768 * 2**20, "535.104", 0.0)]


@pytest.mark.parametrize(
    ("engine", "gpus", "problem", "ranks", "status", "text"),
    [
        (CUDA, [H100] * 8, "", 8, "pass", "8 x NVIDIA H100 80GB HBM3, driver 550.54"),
        (CUDA, [], "", 0, "fail", "none, and engine.device=cuda"),
        (CUDA, [], "nvidia-smi: Driver/library version mismatch", 0, "fail", "Driver/library version mismatch"),
        (PLAIN_ENGINE, [], "", 0, "pass", "none: training runs on CPUs"),
        (CPU, [], "", 4, "pass", "engine.device=cpu asks for none"),
        (CUDA, [H100] * 4, "", 8, "fail", "4 x NVIDIA H100 80GB HBM3 for 8 ranks of this host"),
    ],
)
def test_gpus_are_compared_with_what_is_asked_for(engine, gpus, problem, ranks, status, text):
    check = check_gpus(engine, gpus, problem, ranks)[0]
    assert (check.status, text in check.detail) == (status, True)
    assert bool(check.fix) == (status != "pass")


def test_a_gpu_without_bf16_and_a_mixed_node_are_warned_of():
    names = {check.name: check.status for check in check_gpus(CUDA, [H100, V100], "", 2)}
    assert names == {"GPUs": "pass", "GPUs alike": "warn", "bf16": "warn"}


def test_fp32_without_tf32_is_warned_of_where_the_gpu_has_it():
    fp32 = CUDA.model_copy(update={"precision": "fp32"})

    def found(engine, gpu, **environment):
        return [check for check in check_gpus(engine, [gpu], "", 1, environment) if check.name == "TF32"]

    (check,) = found(fp32, H100)
    assert check.status == "warn" and "H100 80GB HBM3 multiplies fp32 without TF32" in check.detail
    assert check.fix.startswith("use engine.precision=bf16, or export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1")
    assert found(fp32, H100, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1") == []
    assert found(fp32, V100) == found(CUDA, H100) == []


def test_a_cpu_without_bf16_is_warned_of_where_a_config_asks_for_it():
    bf16 = EngineConfig(device="cpu", precision="bf16")
    assert machine.check_processor_bf16(CPU, set()) is None
    assert machine.check_processor_bf16(bf16, {"avx2"}).status == "warn"
    assert machine.check_processor_bf16(bf16, {"avx512_bf16"}).status == "pass"


def test_memory_cores_and_compiler(monkeypatch):
    gib = 2**30
    assert check_memory(0, (64 * gib, 32 * gib)).detail == "32.0 GiB of 64.0 available"
    assert check_memory(40 * gib, (64 * gib, 32 * gib)).status == "warn"
    assert check_memory(65 * gib, (64 * gib, 32 * gib)).status == "fail"
    assert check_cores(10_000).status == "warn"
    assert check_cores(1).status == "pass"
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    offload = CPU.model_copy(update={"offload_optimizer": "cpu"})
    assert check_compiler(CPU, {}).status == "pass"
    assert check_compiler(offload, {}).detail == "no g++, and engine.offload_optimizer=cpu builds code at its start"


def test_a_name_that_does_not_resolve_fails_where_there_are_other_nodes(monkeypatch):
    def refuse(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(network.socket, "getaddrinfo", refuse)
    assert network.check_name("n7", is_alone=True).status == "warn"
    check = network.check_name("n7", is_alone=False)
    assert (check.status, check.detail, check.exit_code) == ("fail", "n7 does not resolve", 69)


def test_a_name_that_is_the_loopback_and_name_servers_that_are_silent_are_told(monkeypatch):
    monkeypatch.setattr(network, "resolve", lambda host: ["127.0.1.1"])
    assert network.check_name("n7", is_alone=False).status == "warn"
    assert network.check_name("n7", is_alone=True).status == "pass"
    monkeypatch.setattr(network, "resolve", lambda host: None)
    assert "not looked up within 3 s" in network.check_name("n7", is_alone=False).detail


def test_an_interface_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    check = network.check_interfaces(is_alone=True)
    assert check.detail == "GLOO_SOCKET_IFNAME=nosuch0, and there is no such interface"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert network.check_interfaces(is_alone=True).status == "pass"
    monkeypatch.setattr(network, "usable_addresses", list)
    assert network.check_interfaces(is_alone=False).status == "fail"


def test_the_loopback_answers():
    assert network.check_loopback().status == "pass"


def test_data_that_is_there_passes_and_what_is_missing_is_named(tmp_path):
    make_shards(tmp_path / "data")
    config = load_config("configs/run/quickstart.yaml", [f"data.path={tmp_path / 'data'}"])
    (check,) = services.check_data(config.data, is_quick=True)
    assert (check.status, check.detail) == ("pass", f"{tmp_path / 'data'}: 1,750 tokens in 4 shards")
    next((tmp_path / "data").rglob("*.tar")).unlink()
    (check,) = services.check_data(config.data, is_quick=True)
    assert (check.status, check.exit_code) == ("fail", 65)
    remote = config.data.model_copy(update={"path": "s3://bucket/data"})
    assert services.check_data(remote, is_quick=True)[0].detail.endswith("not looked at with --quick")


def test_wandb_never_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert services.check_wandb("auto", is_quick=False).detail == "offline: `wandb sync` sends it later"
    assert services.check_wandb("online", is_quick=False).status == "warn"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", f"http://{address}")
        check = services.check_wandb("online", is_quick=False)
        assert check.status == "warn" and f"but {address} does not answer" in check.detail
        assert services.check_wandb("online", is_quick=True).status == "pass"
        taken.listen(1)
        assert services.check_wandb("online", is_quick=False).detail == f"there is a key, and {address} answers"
    assert "x" * 40 not in check.detail


def test_a_tracker_without_its_package_fails(monkeypatch):
    assert services.check_tracker_packages(TrackingConfig(prometheus="folder")) is None
    monkeypatch.setattr(run_output, "find_spec", lambda name: None)
    check = services.check_tracker_packages(TrackingConfig(mlflow="auto"))
    assert check.status == "fail" and "tracking.mlflow needs the package mlflow" in check.detail
    monkeypatch.setattr(run_output, "find_spec", lambda name: name)
    assert (
        services.check_tracker_packages(TrackingConfig(mlflow="auto", trackio=True)).detail
        == "installed: mlflow, trackio"
    )


def fake_torch(**changes):
    backends = SimpleNamespace(
        cuda=SimpleNamespace(flash_sdp_enabled=lambda: True, is_flash_attention_available=lambda: changes["flash"])
    )
    ones = SimpleNamespace(sum=lambda: SimpleNamespace(item=changes.get("kernel", lambda: 8.0)))
    cuda = SimpleNamespace(
        is_available=lambda: changes["seen"],
        device_count=lambda: 1,
        get_device_name=lambda index: "Tesla V100",
        is_bf16_supported=lambda including_emulation: False,
        get_device_capability=lambda index: (7, 0),
    )
    version = SimpleNamespace(cuda=changes["built"], hip=None)
    return SimpleNamespace(
        __version__="2.9", cuda=cuda, version=version, backends=backends, ones=lambda size, device: ones
    )


@pytest.mark.parametrize(
    ("torch", "gpus", "text"),
    [
        (fake_torch(seen=False, built=None), [H100], "and torch 2.9 is a build for CPUs"),
        (fake_torch(seen=False, built="12.8"), [H100], "cannot use driver 550.54"),
        (fake_torch(seen=False, built="12.8"), [], "sees no GPU, and engine.device=cuda"),
    ],
)
def test_a_torch_that_does_not_go_with_driver_or_config_fails(torch, gpus, text):
    (check,) = check_torch(torch, CUDA, gpus)
    assert check.status == "fail" and text in check.detail and check.fix


def test_a_gpu_without_bf16_and_a_torch_without_flash_are_warned_of_and_a_kernel_that_fails_fails():
    checks = check_torch(fake_torch(seen=True, built="12.8", flash=False), CUDA, [V100])
    assert [(check.name, check.status) for check in checks] == [
        ("torch", "pass"),
        ("bf16", "warn"),
        ("attention", "warn"),
    ]

    *_, attention = check_torch(fake_torch(seen=True, built="12.8", flash=True), CUDA, [V100])
    assert attention.status == "pass" and attention.detail.startswith("FlashAttention 2 of torch: FlashAttention 3 is")

    def no_image():
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    checks = check_torch(fake_torch(seen=True, built="12.8", flash=True, kernel=no_image), CUDA, [V100])
    assert checks[0].status == "fail" and "no kernel image is available" in checks[0].detail


def test_a_torch_that_cannot_be_imported_is_one_line(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(LaunchError, match=r"torch cannot be imported: .*; install it anew"):
        import_torch()


def test_the_place_of_a_rank_is_read_from_whatever_started_it():
    torchrun = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    place = find_place(torchrun, None, is_quick=False)
    assert (place.rank, place.size, place.local_size, place.is_one_host, place.is_started) == (5, 16, 8, False, True)
    srun = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
    place = find_place(srun, None, is_quick=False)
    assert (place.rank, place.size, place.local_size, place.is_one_host, place.is_started) == (3, 4, 2, False, True)
    assert not find_place(srun, None, is_quick=True).is_started
    assert find_place({}, 2, is_quick=False).size == 2


def test_a_task_of_srun_finds_its_first_node():
    task = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    found = slurm_environment({**task, "SLURM_STEP_NODELIST": "gpu[03-05,07],login"})
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("3", "4", "1")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("gpu03", "20049")
    assert slurm_environment({**task, "RANK": "0"}) == {}
    assert [first_node(text) for text in ("n2", "n[2-4,7]", "a1,b[2-3]")] == ["n2", "n2", "a1"]
    with pytest.raises(LaunchError, match="the node list '' cannot be read; set MASTER_ADDR"):
        first_node("")
