"""Decay groups, the optimizers, and the learning rate as a pure function of the step."""

from pretrain.optim.adafactor import build_adafactor
from pretrain.optim.build import build_adamw
from pretrain.optim.muon import build_muon

OPTIMIZERS = {"adamw": build_adamw, "adafactor": build_adafactor, "muon": build_muon}
"""Builder of each `optim.kind`: (groups, OptimConfig, device) -> torch.optim.Optimizer."""
