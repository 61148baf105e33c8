"""Initial weights, each a pure function of (seed, parameter name): the same for any order, sharding or world size."""

import hashlib
import math

import torch
from torch import Tensor, nn

from pretrain.config.model import ModelConfig

_RESIDUAL_OUTPUTS = ("attention.output.weight", "feedforward.down.weight")


def initial_std(name: str, config: ModelConfig) -> float:
    """Returns the standard deviation that matrix `name` starts with.

    The last projection of each residual branch starts at `init_std / sqrt(2 layers)` (GPT-2, 2.3), so that the variance
    of the residual stream does not grow with depth.
    """
    stack = config.encoder if name.startswith("encoder.") else config.decoder
    if config.init_scaled and stack is not None and name.endswith(_RESIDUAL_OUTPUTS):
        return config.init_std / math.sqrt(2 * stack.layers)
    return config.init_std


def initial_weight(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """Draws one parameter, fp32, on the CPU: biases 0, norm weights 1, matrices normal with mean 0."""
    if name.endswith(".bias"):
        return torch.zeros(shape, device="cpu")
    if len(shape) == 1:
        return torch.ones(shape, device="cpu")
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    weight = torch.empty(shape, dtype=torch.float32, device="cpu")
    return weight.normal_(0.0, initial_std(name, config), generator=generator)


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Overwrites every parameter of `model` in place, one at a time; costs one fp32 copy of the largest."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_weight(name, parameter.shape, config, seed))
