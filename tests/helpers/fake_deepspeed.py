"""Small engines with the attributes of DeepSpeed's that `pretrain/engine/` touches, over ranks that are threads.

    ranks = Ranks(3)
    engines = ranks.run(lambda world: FakeEngine(*toy(), ranks, stage=2, precision="bf16"))

Their optimizers are in `fake_zero.py`; at stage 0 in fp32 it is torch's own. Every public or single-underscore
attribute of either file's classes is one of DeepSpeed's, under its name, except those that begin with `fake_`:
`tests/integration/test_deepspeed_private.py` compares each with the installed DeepSpeed's. Nothing here imports it.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.fake_zero import FakeUnfused, FakeZero3, FakeZero12, convert_to_zero
from tests.helpers.thread_ranks import Ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FakeEngine:
    """DeepSpeedEngine of one rank.

    Args:
        module: Its parameters are cast, and cut as the stage says.
        optimizer: Over them.
        ranks: Which this is one of.
        stage: ZeRO stage.
        precision: `fp32`, `bf16` or `fp16`.
        clip: Largest norm of the gradient; 0: any.
        offload: What is said to be in the host's memory: `optimizer`, `params`.
        persistent: Parameters of at most so many elements stay whole at stage 3.
        sub_group_size: Elements after which stage 3 begins another row of shares.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        stage: int,
        precision: str,
        *,
        clip: float = 0.0,
        offload: Sequence[str] = (),
        persistent: int = 0,
        sub_group_size: int = 10**9,
    ) -> None:
        self.fake_stage, self.fake_ranks = stage, ranks
        self.fake_boundary, self.fake_applied = True, False
        self.module = module.to(DTYPES[precision])
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        self.basic_optimizer = optimizer
        is_offloaded = ("optimizer" in offload, "params" in offload)
        if stage == 3:
            parameters: list[Any] = list(module.parameters())
            convert_to_zero(parameters, ranks)
            kept = [parameter for parameter in parameters if parameter.ds_numel <= persistent]
            self.optimizer = FakeZero3(optimizer, ranks, clip, precision, is_offloaded, sub_group_size, kept)
        elif stage:
            self.optimizer = FakeZero12(optimizer, ranks, clip, precision, is_offloaded[0])
        else:
            self.optimizer = optimizer if precision == "fp32" else FakeUnfused(optimizer, clip)

    def zero_optimization_stage(self) -> int:
        """The stage."""
        return self.fake_stage

    def train(self) -> None:
        """Sets the mode of the module."""
        self.module.train()

    def eval(self) -> None:
        """Sets the mode of the module."""
        self.module.eval()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says whether the next micro-batch is the step's last."""
        self.fake_boundary = is_boundary

    def __call__(self, batch: Any) -> Any:
        """Runs the module, its weights gathered."""
        for parameter in self.module.parameters() if self.fake_stage == 3 else ():
            parameter.all_gather([parameter])
        result = self.module(batch)
        if not torch.is_grad_enabled():
            self.fake_cut()
        return result

    def fake_cut(self) -> None:
        """Lets go of what stage 3 has gathered."""
        for parameter in self.module.parameters() if self.fake_stage == 3 else ():
            if not any(parameter is kept for kept in self.optimizer.fake_persistent):
                parameter.partition([parameter])

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool) -> None:
        """Accumulates the gradient; at the boundary its mean over the ranks is taken."""
        assert not scale_wrt_gas, "our scale is that of the whole step"
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        (loss * (self.optimizer.loss_scaler.cur_scale if self.fake_stage else 1.0)).backward()
        if self.fake_stage:
            kept = self.optimizer.fake_gradients
            for parameter in trained:
                if parameter.grad is not None:
                    kept[parameter] = parameter.grad + kept[parameter] if parameter in kept else parameter.grad
                    parameter.grad = None
            self.fake_cut()
        else:
            kept = {parameter: parameter.grad for parameter in trained if parameter.grad is not None}
        if self.fake_boundary:
            of_ranks = self.fake_ranks.gather([gradient.clone() for gradient in kept.values()])
            for gradient, parts in zip(kept.values(), zip(*of_ranks, strict=True), strict=True):
                gradient.data = torch.stack([part / self.fake_ranks.size for part in parts]).sum(0)

    def step(self) -> None:
        """Steps the optimizer at the boundary; clears gradients."""
        if not self.fake_boundary:
            return
        if self.optimizer is self.basic_optimizer:
            self.basic_optimizer.step()
        else:
            self.optimizer.fake_step()
        self.fake_applied = not getattr(self.optimizer, "fake_overflow", False)
        for parameter in self.module.parameters():
            parameter.grad = None

    def was_step_applied(self) -> bool:
        """Whether the last step changed the weights."""
        return self.fake_applied


class FakeAccelerator:
    """accelerate's front, on the CPU.

    Args:
        ranks: Which this is one of.
        engine: Arguments of `FakeEngine`.
    """

    def __init__(self, ranks: Ranks, **engine: Any) -> None:
        self.device, self.num_processes = torch.device("cpu"), ranks.size
        self.fake_ranks, self.fake_options = ranks, engine
        self.state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config={}))

    def prepare(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        """Wraps a module for DeepSpeed."""
        return FakeEngine(module, optimizer, self.fake_ranks, **self.fake_options), optimizer


def fake_deepspeed(ranks: Ranks) -> SimpleNamespace:
    """The module `deepspeed`, as far as it is imported; `fake_leaves` is what it was told about leaf modules."""

    def init(*, module: nn.Module, config_dict_or_path: Any, dtype: torch.dtype) -> None:
        assert all(parameter.dtype == dtype for parameter in module.parameters())
        convert_to_zero(list(module.parameters()), ranks)

    def set_z3_leaf_modules(module: nn.Module, classes: list[type]) -> None:
        leaves.append((module, classes))

    leaves: list[Any] = []
    return SimpleNamespace(
        DeepSpeedEngine=FakeEngine,
        utils=SimpleNamespace(set_z3_leaf_modules=set_z3_leaf_modules),
        zero=SimpleNamespace(Init=init),
        ops=SimpleNamespace(),
        fake_leaves=leaves,
    )


def offered(thing: Any) -> list[str]:
    """Returns the names of DeepSpeed's attributes that a fake has: of its class and its own."""
    own = {name for kind in type(thing).__mro__[:-1] for name in vars(kind)} | set(vars(thing))
    return sorted(name for name in own if not name.startswith(("fake_", "__")))
