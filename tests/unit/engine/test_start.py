"""What accelerate is started with, and what is refused before."""

import importlib
import os
import sys
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from pretrain.config.engine import JOB_GPUS, EngineConfig
from pretrain.dist import World
from pretrain.engine.build import bind_to_numa_node, deepspeed_config, pick_device, start_accelerator
from pretrain.errors import ConfigError, LaunchError
from tests.helpers.warm_python import run_python
from tests.unit.engine.toy import PLAN

PARAMETERS = 30_000


@pytest.fixture
def cuda(monkeypatch):
    """Says whether torch sees a GPU; keeps the device that is chosen."""

    def sees(count):
        chosen = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
        return chosen

    return sees


@pytest.fixture
def libraries(monkeypatch):
    """accelerate and deepspeed, which note what they are called with; the environment is put back."""
    calls = {}

    def accelerator(**named):
        calls.update(named)
        return "accelerator"

    def keep(name):
        return lambda **named: SimpleNamespace(kind=name, **named)

    utils = SimpleNamespace(InitProcessGroupKwargs=keep("group"), DeepSpeedPlugin=keep("plugin"))
    found = SimpleNamespace(calls=calls, accelerate=SimpleNamespace(Accelerator=accelerator, utils=utils))
    found.deepspeed = SimpleNamespace(ops=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "accelerate", found.accelerate)
    monkeypatch.setitem(sys.modules, "accelerate.utils", utils)
    monkeypatch.setitem(sys.modules, "deepspeed", found.deepspeed)
    with mock.patch.dict(os.environ, MASTER_ADDR="node7", MASTER_PORT="1234"):
        yield found


def start(config, size=1, rank=0, clip=0.5):
    return start_accelerator(config, clip, PLAN, PARAMETERS, World(rank, size, rank))


@pytest.mark.parametrize(
    ("device", "precision", "gpus", "expected"),
    [
        ("auto", "bf16", 0, "cpu"),
        ("auto", "bf16", 1, "cuda"),
        ("auto", "fp16", 1, "cuda"),
        ("cpu", "bf16", 1, "cpu"),
        ("cpu", "fp32", 0, "cpu"),
        ("cuda", "fp32", 8, "cuda"),
        ("cuda", "fp32", 0, r"engine.device=cuda, but torch sees no GPU; use engine.device=auto, or install a CUDA t"),
        ("auto", "fp16", 0, r"engine.precision=fp16 needs a GPU, and torch sees none; use engine.precision=bf16, or"),
        ("cuda", "fp16", 0, r"engine.precision=fp16 needs a GPU"),
    ],
)
def test_the_device_is_a_gpu_where_there_is_one_and_none_is_refused_where_one_is_needed(
    cuda, device, precision, gpus, expected
):
    cuda(gpus)
    config = EngineConfig(device=device, precision=precision)
    if expected in ("cpu", "cuda"):
        assert pick_device(config) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        pick_device(config)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_job_with_gpus_that_torch_does_not_see_ends_before_it_trains_on_cpus(cuda, monkeypatch, precision):
    cuda(0)
    monkeypatch.setenv(JOB_GPUS, "2")
    wanted = (
        r"the job has 2 GPUs a node, torch sees none \(torch \d.*\); install a CUDA torch, .*; engine.device=cpu if "
    )
    with pytest.raises(LaunchError, match=wanted) as caught:
        pick_device(EngineConfig(precision=precision))
    assert caught.value.exit_code == 69
    assert pick_device(EngineConfig(device="cpu")) == "cpu"
    cuda(1)
    assert pick_device(EngineConfig(precision=precision)) == "cuda"


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeed_is_started_with_our_config(cuda, libraries, stage, precision, gpus):
    if precision == "fp16" and not (gpus and stage):
        return
    chosen = cuda(gpus)
    config = EngineConfig(zero_stage=stage, precision=precision)
    assert start(config, size=2, rank=1) == "accelerator"
    calls, device = libraries.calls, "cuda" if gpus else "cpu"
    assert chosen == ([1] if gpus else [])
    plugin, (group,) = calls.pop("deepspeed_plugin"), calls.pop("kwargs_handlers")
    assert plugin.hf_ds_config == deepspeed_config(config, device, 0.5, PLAN, PARAMETERS)
    assert calls == {"mixed_precision": "no" if precision == "fp32" else precision, "gradient_accumulation_steps": 4}
    assert (group.backend, group.timeout) == ("nccl" if gpus else "gloo", timedelta(seconds=1860))
    assert os.environ.get("DS_ACCELERATOR") == (None if gpus else "cpu")
    assert vars(libraries.deepspeed.ops) == {"__compatible_ops__": {"deepspeed_shm_comm": False}}


def test_a_rank_that_sees_fewer_gpus_than_its_number_is_refused(cuda, libraries):
    """As under `srun --gpus-per-task=1`."""
    cuda(1)
    with pytest.raises(LaunchError, match=r"rank 1: LOCAL_RANK=1, but this rank sees 1 GPU\(s\); start one rank for"):
        start(EngineConfig(), size=2, rank=1)


def test_deepspeed_does_not_import_mlflow_which_stays_importable(cuda, libraries, tmp_path, monkeypatch):
    cuda(0)
    (tmp_path / "mlflow.py").touch()
    (tmp_path / "deepspeed.py").write_text(
        "import types\nops = types.SimpleNamespace()\ntry:\n    import mlflow\nexcept ImportError:\n    ops.hidden = 1"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("deepspeed", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    start(EngineConfig())
    assert sys.modules["deepspeed"].ops.hidden
    assert importlib.import_module("mlflow").__file__ == str(tmp_path / "mlflow.py")


def test_what_deepspeed_knows_of_its_ops_stays(cuda, libraries):
    cuda(0)
    vars(libraries.deepspeed.ops)["__compatible_ops__"] = {"deepspeed_shm_comm": True, "other": True}
    start(EngineConfig())
    assert vars(libraries.deepspeed.ops)["__compatible_ops__"] == {"deepspeed_shm_comm": False, "other": True}


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize(
    ("precision", "gradients", "autocast"),
    [("fp32", "compute", "no"), ("bf16", "compute", "no"), ("bf16", "fp32", "bf16")],
)
@pytest.mark.parametrize("kind", ["single", "ddp"])
def test_without_deepspeed_there_is_no_plugin(cuda, libraries, kind, precision, gradients, autocast, gpus):
    cuda(gpus)
    start(EngineConfig(kind=kind, precision=precision, gradients=gradients))
    assert libraries.calls.pop("kwargs_handlers")[0].backend == ("nccl" if gpus else "gloo")
    assert libraries.calls == {"mixed_precision": autocast, "cpu": not gpus}
    assert "DS_ACCELERATOR" not in os.environ


def test_what_another_launcher_exported_of_its_own_idea_is_removed(cuda, libraries, monkeypatch):
    cuda(0)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("MASTER_PORT", "1234")
    start(EngineConfig(kind="ddp", precision="fp32"))
    assert not [name for name in os.environ if name.startswith("ACCELERATE_")]
    assert os.environ["MASTER_PORT"] == "1234"


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_kernels_are_chosen_on_demand(cuda, libraries, monkeypatch, deterministic):
    cuda(0)
    said = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", said.append)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    start(EngineConfig(kind="single", deterministic=deterministic))
    assert said == ([True] if deterministic else [])
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)


def test_one_process_with_several_ranks_is_refused(cuda, libraries):
    cuda(0)
    with pytest.raises(ConfigError, match=r"engine.kind=single, but 3 ranks run; use engine.kind=ddp or deepspeed"):
        start(EngineConfig(kind="single"), size=3)
    assert libraries.calls == {}


@pytest.mark.parametrize("error", [torch.distributed.DistNetworkError("no route\nC++ stack"), OSError("no route")])
def test_ranks_that_do_not_reach_each_other_are_told_where(cuda, libraries, monkeypatch, error):
    cuda(0)

    def fails(**named):
        raise error

    libraries.accelerate.Accelerator = fails
    expected = r"^rank 1 at node7:1234: cannot set up the process group: no route; check that the port is free and"
    with pytest.raises(LaunchError, match=expected):
        start(EngineConfig(kind="ddp"), size=2, rank=1)


def test_an_error_that_is_not_of_the_network_is_a_bug_of_ours(cuda, libraries):
    cuda(0)

    def fails(**named):
        raise ValueError("mixed up")

    libraries.accelerate.Accelerator = fails
    with pytest.raises(ValueError, match="mixed up"):
        start(EngineConfig(kind="ddp"))


def test_a_missing_deepspeed_is_named(cuda, libraries, monkeypatch):
    cuda(0)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(
        LaunchError, match=r"engine.kind=deepspeed needs the deepspeed package: .*; use engine.kind=ddp, or run"
    ):
        start(EngineConfig())


@pytest.mark.parametrize(
    ("node", "allowed", "expected"),
    [
        ("1", range(8), {2, 3, 6}),  # the node's processors
        ("1", {0, 3}, {3}),  # a launcher's binding is narrowed
        ("1", {0, 1}, None),  # and never left
        ("-1", range(8), None),  # a virtual machine
        (None, range(8), None),  # a container without sysfs
    ],
)
def test_a_rank_is_bound_to_the_processors_beside_its_gpu(tmp_path, monkeypatch, node, allowed, expected):
    (tmp_path / "devices/system/node/node1").mkdir(parents=True)
    (tmp_path / "devices/system/node/node1/cpulist").write_text("2-3,6\n")
    if node is not None:
        (tmp_path / "bus/pci/devices/0000:1a:00.0").mkdir(parents=True)
        (tmp_path / "bus/pci/devices/0000:1a:00.0/numa_node").write_text(f"{node}\n")
    bound = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(cpus))
    bind_to_numa_node(SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1A, pci_device_id=0), tmp_path)
    bind_to_numa_node(SimpleNamespace(), tmp_path)  # of a torch that does not say where its GPUs are
    assert bound == ([] if expected is None else [expected])


FAULTS_OF_A_STEP = """
import os
import resource
import torch
from pretrain.engine.build import keep_freed_memory
for first in (int, keep_freed_memory):
    if os.fork():
        os.wait()
        continue
    first()
    torch.ones(2**25)  # 128 MiB, with a hole for what follows
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in range(3):
        torch.ones(2**24 - 2**20 * size)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
    os._exit(0)
"""


def test_the_memory_of_a_step_serves_the_next():
    done = run_python(FAULTS_OF_A_STEP)
    assert done.code == 0, done.stderr
    counts = map(int, done.stdout.split())
    fresh, kept = counts
    assert fresh > 64  # large pages, where the kernel has them, or 49,152 small ones
    assert kept < fresh / 10
