"""Decay groups, the optimizer, and the learning rate as a pure function of the step."""

from pretrain.optim.build import build_adamw

OPTIMIZERS = {"adamw": build_adamw}
"""Builder of each `optim.kind`: (groups, OptimConfig, device) -> torch.optim.Optimizer."""
