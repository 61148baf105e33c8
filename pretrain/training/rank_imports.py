"""Imports of a rank up to its first step, for a process that forks ranks.

A module that is missing here is imported by each rank for itself, later and as often as there are ranks.
"""

import contextlib
import importlib

import pretrain.training.run  # noqa: F401
from pretrain.config.run import RunConfig
from pretrain.engine.build import import_packages
from pretrain.kinds.optimizers import OPTIMIZERS
from pretrain.model.lazy_compiler import deferred_decorators

_LATER: dict[str, tuple[str, ...]] = {
    "deepspeed": (
        "deepspeed.comm.mori",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.runtime.zero.muon.muon_optimizer",
    ),
    "ddp": ("torch._dynamo", "torch.distributed.tensor"),  # DDP asks the compiler whether it is in use
    "single": (),
}
"""Modules that libraries import when they are used, by engine."""


def import_for_ranks(config: RunConfig, world_size: int) -> None:
    """Imports everything. Raises: LaunchError: A package is missing."""
    engine = config.engine.on(world_size)
    import_packages(engine)
    optimizer, _, _ = OPTIMIZERS[config.optim.kind].build.partition(":")
    for name in ("numpy.random", optimizer):
        importlib.import_module(name)
    with deferred_decorators():
        for name in _LATER[engine.kind]:
            with contextlib.suppress(ImportError):  # of another version
                importlib.import_module(name)
