"""Starts accelerate and the process group, fills sharded models, and builds the engine.

start_accelerator  ->  build the model, on the meta device for ZeRO 3  ->  fill_sharded (ZeRO 3)
                   ->  build_engine
"""

import contextlib
import ctypes
import importlib
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pretrain.config.data import BatchPlan
from pretrain.config.engine import JOB_GPUS, EngineConfig
from pretrain.dist import World, loopback_store
from pretrain.engine.deepspeed_engine import DeepSpeedZeroEngine, clips_itself
from pretrain.engine.engine import Engine
from pretrain.engine.replicated import CompleteState, KeptTensor, TorchEngine
from pretrain.engine.shared_parameters import describe_part
from pretrain.engine.weight_average import AveragedState
from pretrain.errors import ConfigError, LaunchError, install_fix
from pretrain.model.lazy_compiler import deferred_decorators
from pretrain.parts import part_of
from pretrain.plan.memory import plan_buckets, reduces_to_owners
from pretrain.plan.roofline import overlaps
from pretrain.utils.log import quiet_libraries
from pretrain.utils.status_line import show_phase
from pretrain.utils.units import plural

if TYPE_CHECKING:
    from accelerate import Accelerator


_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
"""Numbers of malloc.h: free memory at the end of the heap that is given back, and allocations by mmap."""
_WORKING_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def builds_sharded(config: EngineConfig) -> bool:
    """Returns whether to build the model on the meta device and fill it by `fill_sharded`."""
    return not config.is_replicated and config.zero_stage == 3


def fill_sharded(
    model: nn.Module,
    draw: Callable[[str, torch.Size], Tensor | None],
    config: EngineConfig,
    accelerator: "Accelerator",
    world: World,
) -> None:
    """Initialises and shards the parameters of a model on the meta device, one by one. Collective.

    A rank never has more than its shares and one whole parameter in memory. Parameter objects stay
    the same, so that names and optimizer groups built before remain valid. `draw` returns the whole
    initial value of a parameter, the same on every rank; None: zeros.
    """
    import deepspeed

    dtype = _WORKING_DTYPES[config.precision]
    shard: Any = None
    parameter: Any
    for name, parameter in model.named_parameters():
        part = part_of(parameter)
        drawn = draw(name, part.whole(parameter.shape))
        if drawn is None:
            value = torch.zeros(parameter.shape, dtype=dtype, device=accelerator.device)
        else:
            value = part.take(drawn).to(accelerator.device, dtype)
        torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
        if part.ranks > 1:  # a swap takes the attributes, too
            parameter.part = part
            describe_part(parameter, world, config.group_timeout_s)
        if shard is None:
            # The first parameter goes through zero.Init, which gives it the method that shards the
            # others.
            holder = nn.Module()
            holder.register_parameter("weight", parameter)
            plugin = accelerator.state.deepspeed_plugin
            deepspeed.zero.Init(module=holder, config_dict_or_path=plugin.deepspeed_config, dtype=dtype)
            shard = parameter.convert_to_zero_parameters
        else:
            shard([parameter])
    for name, buffer in model.named_buffers():  # biases of experts: whole on every rank, in fp32
        drawn = draw(name, buffer.shape)
        drawn = torch.zeros(buffer.shape) if drawn is None else drawn
        torch.utils.swap_tensors(buffer, drawn.to(accelerator.device))


def pick_device(config: EngineConfig) -> str:
    """Returns `cuda` or `cpu`.

    Raises:
        LaunchError: The job of this rank has GPUs that torch does not see.
        ConfigError: CUDA is requested or needed, and absent.
    """
    job_gpus = int(os.environ.get(JOB_GPUS, 0))
    if config.device == "auto" and job_gpus and not torch.cuda.is_available():
        text = f"the job has {plural(job_gpus, 'GPU')} a node, torch sees none (torch {torch.__version__})"
        fix = "install a CUDA torch, or load the driver there; engine.device=cpu if that is meant"
        raise LaunchError(text, where=socket.gethostname(), fix=fix)
    if config.precision == "fp16" and not torch.cuda.is_available():
        raise ConfigError(
            "engine.precision=fp16 needs a GPU, and torch sees none",
            fix="use engine.precision=bf16, or fp32",
        )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "engine.device=cuda, but torch sees no GPU",
            fix="use engine.device=auto, or install a CUDA torch",
        )
    return "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"


def start_accelerator(
    config: EngineConfig, grad_clip: float, plan: BatchPlan, num_parameters: int, world: World
) -> "Accelerator":
    """Sets up the process group and returns the Accelerator. Collective.

    Raises:
        ConfigError: `single` with several ranks, or no such device.
        LaunchError: The ranks cannot reach each other, or a package is missing.
    """
    import_packages(config)
    show_phase(f"starting the engine: {config.kind}, {plural(world.size, 'rank')}")
    device = pick_device(config)
    if config.kind == "single" and world.size > 1:
        raise ConfigError(
            f"engine.kind=single, but {world.size} ranks run",
            fix="use engine.kind=ddp or deepspeed",
        )
    # accelerate and deepspeed call collectives by deprecated names: not something a user can fix.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # accelerate says how many threads it takes where OMP_NUM_THREADS is unset.
    warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
    if device == "cuda":
        if world.local_rank >= (visible := torch.cuda.device_count()):
            raise LaunchError(
                f"LOCAL_RANK={world.local_rank}, but this rank sees {visible} GPU(s)",
                where=f"rank {world.rank}",
                fix="start one rank for each GPU, and let each see all GPUs of its node (no "
                "--gpus-per-task, no --gpu-bind)",
            )
        torch.cuda.set_device(world.local_rank)
        bind_to_numa_node(torch.cuda.get_device_properties(world.local_rank))
    else:
        keep_freed_memory()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # `accelerate launch` exports an engine and a precision of its own, which would override the
    # config.
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    precision = "no" if config.precision == "fp32" or config.has_masters else config.precision
    kwargs: dict[str, Any] = {"mixed_precision": precision}
    if not config.is_replicated:
        kwargs["gradient_accumulation_steps"] = plan.accumulation
        kwargs["deepspeed_plugin"] = _deepspeed_plugin(device, config, grad_clip, plan, num_parameters)
    else:
        # cpu=True makes accelerate drop a DeepSpeed plugin silently; without one it is safe.
        kwargs["cpu"] = device == "cpu"
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    backend = "nccl" if device == "cuda" else "gloo"
    group = InitProcessGroupKwargs(backend=backend, timeout=timedelta(seconds=config.group_timeout_s))
    try:
        with loopback_store(world):
            return Accelerator(kwargs_handlers=[group], **kwargs)
    except (torch.distributed.DistError, OSError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LaunchError(
            f"cannot set up the process group: {str(error).splitlines()[0]}",
            where=f"rank {world.rank} at {address}",
            fix="check that the port is free and that every rank can reach the address",
        ) from error


def forget_accelerator() -> None:
    """Lets this process start another accelerator in the process group that there is."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def keep_freed_memory() -> None:
    """Has glibc keep the memory of freed tensors, where it gives those above 32 MiB back to the kernel.

    Each step allocates the same sizes, and page faults of memory that is new took 4 to 9% of its CPU
    time. The process keeps what its largest step took, 1 to 2% more at the peak.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not in musl, not in macOS
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def bind_to_numa_node(gpu: Any, sysfs: Path = Path("/sys")) -> None:
    """Binds this thread, and those that it starts, to the processors of the NUMA node of a GPU.

    Copies to and from a GPU through the far socket take 1.5 to 2 times as long. A binding of the
    launcher is narrowed, never left; where nothing is known of the node, nothing is done.
    """
    try:
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
        cpulist = (sysfs / f"devices/system/node/node{node}/cpulist").read_text()
    except (AttributeError, OSError):  # an older torch; a virtual machine, a container without sysfs
        return
    spans = [[int(end) for end in span.split("-")] for span in cpulist.strip().split(",")]
    near = {cpu for span in spans for cpu in range(span[0], span[-1] + 1)} & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)


def deepspeed_config(
    config: EngineConfig, device: str, grad_clip: float, plan: BatchPlan, num_parameters: int
) -> dict[str, Any]:
    """Returns the dictionary for `deepspeed.initialize`, on `cuda` or `cpu`.

    Buckets are sized from the model: DeepSpeed's defaults (5e8 elements) take 1-2 GB for any model.
    The accumulation count is for DeepSpeed's own bookkeeping; the engine sets the boundary at each
    micro-batch.
    """
    buckets = plan_buckets(num_parameters, config.zero_stage)
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "reduce_bucket_size": buckets.reduce_bucket_size,
        "allgather_bucket_size": buckets.allgather_bucket_size,
        "contiguous_gradients": True,
        "overlap_comm": overlaps(config, device),
    }
    if config.zero_stage in (1, 2):
        world_size = plan.rows // plan.rows_per_rank * plan.sequence
        zero["use_multi_rank_bucket_allreduce"] = not reduces_to_owners(num_parameters, world_size)
    if config.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": buckets.stage3_prefetch_bucket_size,
            "stage3_param_persistence_threshold": buckets.stage3_param_persistence_threshold,
        }
        if config.activation_checkpointing == "selective" and not config.compiles(device):
            # DeepSpeed's own linear layer adds the bias to the product in place: to the one that is
            # kept for the backward pass, which would add it again.
            zero["memory_efficient_linear"] = False
    if config.zero_hpz > 1:
        zero["zero_hpz_partition_size"] = config.zero_hpz
    # Pinned memory speeds up copies to a GPU; without one it is wasted.
    host = {"device": "cpu", "pin_memory": device == "cuda"}
    if config.offload_optimizer == "cpu":
        zero["offload_optimizer"] = host
    if config.offload_params == "cpu":
        zero["offload_param"] = host
    in_fp32 = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    return {
        "train_micro_batch_size_per_gpu": plan.micro,
        "gradient_accumulation_steps": plan.accumulation,
        # Stage 0 in fp32 is a bare torch optimizer: DeepSpeed would clip without reporting the
        # norm.
        "gradient_clipping": 0.0 if clips_itself(config) else grad_clip,
        # Without it the norm is not checked either, at ZeRO 1 and 2 (`judge_by_norm`).
        "bf16": {"enabled": config.precision == "bf16", "check_grad_overflow": True},
        # A loss scale of 0 means dynamic. The rest are DeepSpeed's defaults, fixed here.
        "fp16": {
            "enabled": config.precision == "fp16",
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        **(in_fp32 if config.precision == "bf16" and config.gradients == "fp32" else {}),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # torch's fused AdamW runs on the host, and needs no compiler there.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        # It would wait for the device before every micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }


def import_packages(config: EngineConfig) -> None:
    """Imports what the engine needs, which takes seconds. Raises: LaunchError: A package is missing."""
    # accelerate's dialogue of SageMaker and DeepSpeed's autotuner, which nothing here uses, import
    # these where they are installed: half a second and more a rank.
    with deferred_decorators(), _hidden("boto3", "mlflow"):
        if not config.is_replicated:
            if pick_device(config) == "cpu":
                os.environ["DS_ACCELERATOR"] = "cpu"
            _import_deepspeed()
        importlib.import_module("accelerate")


@contextlib.contextmanager
def _hidden(*packages: str) -> Iterator[None]:
    """Hides packages that are not imported yet: libraries take them for not installed."""
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden, cast(ModuleType, None)))
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _import_deepspeed() -> None:
    try:
        importlib.import_module("deepspeed")
    except ImportError as error:
        problem = f"engine.kind=deepspeed needs the deepspeed package: {error}"
        raise LaunchError(
            problem,
            fix=f"use engine.kind=ddp, or {install_fix('deepspeed')}",
        ) from None


def _deepspeed_plugin(device: str, config: EngineConfig, grad_clip: float, plan: BatchPlan, num_parameters: int) -> Any:
    import deepspeed
    from accelerate.utils import DeepSpeedPlugin

    quiet_libraries()
    # DeepSpeed's shared-memory op serves inference only, needs a compiler, and leaves segments in
    # /dev/shm after a kill. Setting its entry here also prevents a compiled probe of each op,
    # which a kill would leave in TMPDIR.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config(config, device, grad_clip, plan, num_parameters))
    # It tells transformers of the config, for models that are loaded by it: seconds of imports.
    vars(plugin)["set_deepspeed_weakref"] = lambda: None
    return plugin


def build_engine(
    module: nn.Module,
    names: dict[int, str],
    optimizer: torch.optim.Optimizer,
    accelerator: "Accelerator",
    config: EngineConfig,
    grad_clip: float,
    world: World,
    *,
    saves_frozen: bool = True,
    averages: bool = False,
    balance: Sequence[KeptTensor] = (),
) -> Engine:
    """Wraps a module and its optimizer.

    Args:
        module: Model and loss; `forward(batch)` returns the scalar sum of the losses, and metrics,
            float64 [2].
        names: Name of each of its parameters in checkpoints, by `id(parameter)`.
        optimizer: Optimizer of its parameters.
        accelerator: Result of `start_accelerator`.
        config: Requested engine.
        grad_clip: Largest global gradient norm; 0: no clipping.
        world: Rank and world size.
        saves_frozen: Frozen parameters are part of the state, as weights without moments.
        averages: A moving average of the trained weights is part of the state.
        balance: The balance of experts, part of the state.

    Raises:
        LaunchError: accelerate built another engine than `config` requests.
    """
    if accelerator.num_processes != world.size:
        counts = f"{accelerator.num_processes} processes, the launcher started {world.size}"
        raise LaunchError(
            f"accelerate sees {counts}",
            fix="start the ranks with `pretrain launch`, torchrun, accelerate or deepspeed",
        )
    build = TorchEngine if config.is_replicated else DeepSpeedZeroEngine
    engine = build(module, names, optimizer, accelerator, config, grad_clip, world)
    if averages:
        engine.state = engine.average = AveragedState(engine.state)
    parameters = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    frozen = [KeptTensor(names[id(parameter)], "weight", parameter) for parameter in parameters]
    if saved := [*(frozen if saves_frozen else ()), *balance]:
        engine.state = CompleteState(engine.state, saved, world)
    return engine
