"""One rank of thousands that are not there: what it holds and sends in a step, against `pretrain plan`.

    python -m benchmarks.simulated_ranks dense      # 405 billion parameters on 10,240 ranks
    python -m benchmarks.simulated_ranks experts    # a mixture of 673 billion on 2,048
    python -m benchmarks.simulated_ranks dense --layers 126 --whole

The model, the loss, DeepSpeed and the optimizer are the real ones, as rank 0 at ZeRO stage 3. Tensors are torch's fake
ones, which have a shape and no memory, and the process group is torch's `fake`, which answers at once: nothing is
computed, and everything is allocated, gathered and freed as it would be. Counted are the collectives of the second
step with their bytes and the size of their group, and live storage, its peak in each part of the step.

A model of many layers is two of few: n and 2 n layers give the bytes of one more, exactly, where all layers are alike.
`--whole` runs all of them instead. Buckets and thresholds are those of the whole model at any depth.

The device is a CPU: RMSNorm keeps more there, and the loss works in smaller chunks. `--compiled` gathers whole blocks,
as DeepSpeed does where blocks are compiled, without compiling them.
"""

import argparse
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as td
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import print_row
from pretrain.config.data import BatchPlan
from pretrain.config.engine import EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.config.model import ModelConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.optim import OptimConfig
from pretrain.data.loader import cut_columns
from pretrain.dist import World
from pretrain.engine import build
from pretrain.engine.engine import Engine
from pretrain.model import build_model
from pretrain.model.build import fill_weights
from pretrain.model.sequence_parallel import share_rows
from pretrain.objective import build_loss
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters
from pretrain.parts import part_of
from pretrain.plan.activations import exchanged_bytes
from pretrain.plan.cluster import Cluster
from pretrain.plan.gpus import GPUS
from pretrain.plan.memory import rank_memory
from pretrain.plan.params import count_parameters
from pretrain.plan.roofline import collected_bytes, plan_work, wire_bytes
from pretrain.plan.task import ParallelLayout, TrainingTask
from pretrain.training.step import TrainModule
from pretrain.types import Batch, Columns

EXCHANGES = ("all_to_all_single", "all_gather_rows", "reduce_scatter_rows")
"""Collectives of ranks that share rows or matrices: operations of torch and our own that no engine calls."""
RINGS = {"allreduce_": 2, "_allgather_base_": 1, "allgather_": 1, "_reduce_scatter_base_": 1, "reduce_": 1}
"""How often the data of a collective pass the link of a rank."""
ALIKE = "deepspeed.runtime.zero.partitioned_param_coordinator.assert_ints_same_as_other_ranks"
"""Compares with what the other ranks say."""

_aten = torch.ops.aten
_MANY = {_aten.slice.Tensor, _aten.split.Tensor, _aten.view.default, _aten.cat.default}
"""Operations that DeepSpeed calls once a rank and parameter, when it cuts gradients."""


class Recorder(TorchDispatchMode):
    """Sums the bytes of each collective: of the whole data, on whichever side they are; counts numbers that are read.

    A number that the host reads is a wait for all that a GPU has still to do. With a mode of fake tensors, which have
    no numbers, what is read is 1, and live storage is counted.
    """

    def __init__(self, fake: FakeTensorMode | None = None) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.by_group: Counter[tuple[str, int]] = Counter()
        self.calls: Counter[tuple[str, int]] = Counter()
        self.reads = self.live = self.peak = 0
        self._fake = fake
        self._sizes: dict[int, tuple[Any, int]] = {}

    def clear(self) -> None:
        """Forgets the collectives."""
        for counter in (self.bytes, self.by_group, self.calls):
            counter.clear()

    def take_peak(self) -> int:
        """Returns the most live bytes since the last call."""
        peak = self.peak
        self.peak = self.live
        return peak

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        is_read = function is _aten._local_scalar_dense.default
        self.reads += is_read
        if self._fake is not None and is_read:
            dtype = arguments[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if self._fake is not None and function in _MANY and not options:
            parts = arguments[0] if isinstance(arguments[0], (list, tuple)) else arguments[:1]
            if all(type(part) is FakeTensor for part in parts):
                return self._on_meta(function, arguments, parts[0].device)
        found = function(*arguments, **(options or {}))
        if self._fake is not None:
            for leaf in pytree.tree_leaves(found):
                if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                    self._count(leaf)
        is_collective = function.namespace in ("c10d", "_c10d_functional") or function._opname in EXCHANGES
        if is_collective and not any(word in str(function) for word in ("barrier", "wait", "wrap")):
            leaves = pytree.tree_leaves((arguments, found))
            most = max((x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor)), default=0)
            key = (function._opname, _group_size(leaves))
            self.bytes[function._opname] += most
            self.by_group[key] += most
            self.calls[key] += 1
        return found

    def _on_meta(self, function: Any, arguments: Any, device: torch.device) -> Any:
        """Runs an operation without the checks of the mode, at a twentieth of its time."""
        with in_kernel_invocation_manager(self._fake):
            found = function(*arguments)
        if isinstance(found, (list, tuple)):
            return [FakeTensor(self._fake, part, device) for part in found]
        whole = FakeTensor(self._fake, found, device)
        if function is _aten.cat.default:
            self._count(whole)
        return whole

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._sizes:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self.live -= self._sizes.pop(key)[1]

        self._sizes[key] = (weakref.ref(storage, gone), size)
        self.live += size
        self.peak = max(self.peak, self.live)


def _group_size(arguments: list[Any]) -> int:
    """Returns the ranks of the group among the arguments of a collective; 0: it is not among them."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            # Of the script objects that a collective takes, operations on two numbers are the others.
            with suppress(RuntimeError):
                return td.ProcessGroup.unbox(argument).size()
        if isinstance(argument, str):
            with suppress(RuntimeError, ValueError):
                return td.distributed_c10d._resolve_process_group(argument).size()
    return 0


def join(rank: int, ranks: int, sequence: int = 1, tensor: int = 1) -> World:
    """Joins this process to a world of ranks that are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "8"}
    # accelerate asks for the address of a store, which this group does not use.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    td.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    return World(rank, ranks, 0, sequence=sequence, tensor=tensor)


def start_rank(
    world: World,
    config: EngineConfig,
    model: ModelConfig,
    accumulation: int,
    draw: Callable[[str, torch.Size], Tensor],
    *,
    size: int | None = None,
    prepare: Callable[[nn.Module], None] = lambda _: None,
) -> tuple[nn.Module, Engine]:
    """Builds model and engine as `training/build.py` does.

    Args:
        world: Rank and world.
        config: Requested engine.
        model: Model whose vocabulary is known.
        accumulation: Micro-batches of a step, of a row each.
        draw: Returns the initial value of a parameter.
        size: Number of parameters that buckets are sized by. None: of the model.
        prepare: Is called with the model before anything refers to its parameters.
    """
    AcceleratorState._reset_state(reset_partial_state=True)  # of an engine before it
    GradientState._reset_state()
    is_sharded = build.builds_sharded(config)
    plan = BatchPlan(accumulation * world.data_size, accumulation, 1, accumulation, sequence=world.row_ranks)
    accelerator = build.start_accelerator(config, 1.0, plan, size or count_parameters(model), world)
    built = build_model(model, config, torch.device("cpu"), storage=not is_sharded, world=world)
    prepare(built)
    share_rows(built, world, config.group_timeout_s)
    groups = group_parameters(built)
    if is_sharded:
        build.fill_sharded(built, draw, config, accelerator, world)
    else:
        fill_weights(built, draw)
    names = {id(parameter): name for name, parameter in built.named_parameters()}
    optimizer = build_optimizer(groups, OptimConfig(lr=1e-3), torch.device("cpu"))
    module = TrainModule(built, build_loss(ObjectiveConfig()))
    return built, build.build_engine(module, names, optimizer, accelerator, config, 1.0, world)


@dataclass(frozen=True)
class Case:
    """A model on machines.

    Attributes:
        model: It, whole.
        ranks: Number of ranks.
        length: Tokens of a row, of which a micro-batch has one.
        sequence: Ranks that share a row.
        tensor: Ranks that share matrices.
    """

    model: ModelConfig
    ranks: int
    length: int
    sequence: int = 1
    tensor: int = 1

    def of_layers(self, layers: int) -> ModelConfig:
        """Returns the model at another depth."""
        assert self.model.decoder is not None
        return self.model.model_copy(update={"decoder": self.model.decoder.model_copy(update={"layers": layers})})

    def task(self, model: ModelConfig) -> TrainingTask:
        """Returns the task that `plan` counts."""
        return TrainingTask(model, RowLengths(self.length, self.length), sequence=self.sequence, tensor=self.tensor)


def _decoder(vocab_size: int, length: int, **stack: Any) -> ModelConfig:
    size = {"vocab_size": vocab_size, "max_seq_len": length, "tied_embeddings": False}
    return ModelConfig.model_validate({"decoder": {"norm": "rms", **stack}, **size})


_DENSE = {"layers": 126, "width": 16384, "heads": 128, "kv_heads": 8, "ff_width": 53248, "rope_theta": 500000.0}
_EXPERTS = {"count": 256, "top_k": 8, "width": 2048, "shared": 1, "scores": "sigmoid", "scale": 2.5, "balance": "bias"}
_MIXTURE = {"layers": 58, "width": 7168, "heads": 128, "kv_heads": 8, "head_width": 128, "ff_width": 2048}
CASES = {
    "dense": Case(_decoder(128256, 8192, **_DENSE), 10_240, 8192, sequence=8),
    "experts": Case(_decoder(129280, 4096, **_MIXTURE, experts=_EXPERTS), 2048, 4096),
}
"""Llama 3 405B; and DeepSeek-V3's experts, in all of 58 layers, with grouped heads for its latent attention."""


@contextmanager
def fake_rank(config: EngineConfig) -> Iterator[Recorder]:
    """Context in which tensors are fake, and what is compiled is not."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(fake)
    with ExitStack() as stack:
        stack.enter_context(mock.patch(ALIKE, lambda *_: None))
        # Parameters are fake from the beginning, and fake tensors cannot be swapped.
        stack.enter_context(mock.patch("torch.utils.swap_tensors", lambda *_: None))
        if config.compile is True:
            stack.enter_context(mock.patch("torch.compile", lambda function: function))
        stack.enter_context(fake)
        stack.enter_context(recorder)
        yield recorder


def _give_storage(model: nn.Module) -> None:
    """Replaces parameters and buffers on the meta device by fake ones on the CPU; tied ones once."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in made:
                given: Any = nn.Parameter(torch.empty(parameter.shape, dtype=torch.bfloat16, device="cpu"))
                given.part = part_of(parameter)
                made[id(parameter)] = given
            if parameter is not None:
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


def simulate(case: Case, world: World, layers: int, config: EngineConfig, accumulation: int = 1) -> dict[str, Any]:
    """Takes two steps; returns calls and bytes of the second, and live bytes by part of it."""
    started = time.process_time()
    model = case.of_layers(layers)
    size = case.task(case.model).values.weights
    tokens = torch.zeros(1, case.length, dtype=torch.int64)
    batch = Batch(tokens, tokens)
    if world.row_ranks > 1:
        batch = cut_columns(batch, Columns(world.row_rank, world.row_ranks))

    def draw(_: str, shape: torch.Size) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cpu")

    with fake_rank(config) as recorder:
        built, engine = start_rank(world, config, model, accumulation, draw, size=size, prepare=_give_storage)
        peaks: dict[str, int] = {}

        def after_forward(*_: Any) -> None:
            peaks["forward"] = max(peaks.get("forward", 0), recorder.take_peak())

        engine.module.register_forward_hook(after_forward)
        for _ in range(2):
            recorder.clear()
            recorder.take_peak()
            peaks.clear()
            for number in range(accumulation):
                engine.forward_backward(batch, 1.0, number + 1 == accumulation)
                peaks["backward"] = max(peaks.get("backward", 0), recorder.take_peak())
            engine.update(1e-3)
            peaks["update"] = recorder.take_peak()
    return {
        "layers": layers,
        "parameters": sum(parameter.ds_numel for parameter in built.parameters()),
        "calls": sum(recorder.calls.values()),
        "bytes": {f"{name} of {group}": size for (name, group), size in recorder.by_group.items()},
        "state": recorder.live,
        "peaks": dict(peaks),
        "cpu_s": time.process_time() - started,
    }


def planned(case: Case, layers: int, config: EngineConfig, accumulation: int = 1) -> dict[str, Any]:
    """Returns what `plan` says of the same step: bytes by collective, and bytes of a rank without its overhead."""
    task = case.task(case.of_layers(layers))
    cluster = Cluster(case.ranks // 8, 8, GPUS["cpu"])
    sent = wire_bytes(plan_work(task, ParallelLayout(config, 1, accumulation), case.ranks, "cpu"), case.ranks)
    memory = rank_memory(task, ParallelLayout(config, 1, accumulation), cluster)
    exchanged = accumulation * (exchanged_bytes(task, config, 1) + collected_bytes(task, config, 1))
    state = memory.weights + memory.gradients + memory.optimizer + memory.buckets
    total = memory.total - memory.overhead
    return {"bytes": sent.total(accumulation), "exchanged": exchanged, "state": state, "peak": total}


def measured(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the same of a simulated step: bytes as often as they pass a link, and the highest peak."""
    by_name = {name.split(" of ")[0]: 0 for name in found["bytes"]}
    for name, size in found["bytes"].items():
        by_name[name.split(" of ")[0]] += size
    exchanged = sum(by_name.pop(name, 0) for name in EXCHANGES)
    sent = sum(RINGS[name] * size for name, size in by_name.items())
    return {"bytes": sent, "exchanged": exchanged, "state": found["state"], "peak": max(found["peaks"].values())}


def extend(few: dict[str, Any], many: dict[str, Any], layers: int) -> dict[str, Any]:
    """Returns the figures of a deeper model from two of n and 2 n layers, by the difference of these."""
    steps = (layers - few["layers"]) / (many["layers"] - few["layers"])

    def further(a: Any, b: Any) -> Any:
        if isinstance(a, dict):
            return {key: further(a[key], b[key]) for key in a}
        return a + (b - a) * steps

    return further(few, many)


def main() -> None:
    """Simulates a case and prints a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--layers", type=int, default=2, help="n, of n and 2 n layers that run")
    parser.add_argument("--ranks", type=int, help="others than those of the case")
    parser.add_argument("--compiled", action="store_true", help="gather whole blocks, as where they are compiled")
    parser.add_argument("--whole", action="store_true", help="run all layers instead of extending two depths")
    asked = parser.parse_args()
    case = CASES[asked.case]
    case = replace(case, ranks=asked.ranks or case.ranks)
    assert case.model.decoder is not None
    layers = case.model.decoder.layers
    engine = {"kind": "deepspeed", "zero_stage": 3, "precision": "bf16", "device": "cpu", "compile": asked.compiled}
    config = EngineConfig(**engine, activation_checkpointing="full")
    world = join(0, case.ranks, case.sequence, case.tensor)
    depths = [layers] if asked.whole else [asked.layers, 2 * asked.layers]
    found = [simulate(case, world, depth, config) for depth in depths]
    whole = found[0] if asked.whole else extend(*found, layers)
    says, does = planned(case, layers, config), measured(whole)
    ratios = {name: says[name] / does[name] for name in says if does[name]}
    figures = {"ranks": case.ranks, "simulated": whole, "measured": does, "plan": says, "plan / measured": ratios}
    ran = [{"layers": one["layers"], "cpu_s": round(one["cpu_s"], 1)} for one in found]
    print_row(f"simulated: {asked.case}", {**figures, "ran": ran}, ("torch", "deepspeed"))


if __name__ == "__main__":
    main()
