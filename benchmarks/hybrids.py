"""Mixers with a state on a CPU: cost against length, and tokens a CPU second beside the layers of transformers.

    python -m benchmarks.hybrids [--rounds 5] [--only length peers] [--width 256]

One layer, forward and backward pass, fp32, one thread, CPU time of the process. `length`: one row of 256 to 16,384
tokens, the least time of rounds, and bytes that autograd keeps; the slope is that of a line through the logarithms.
`peers`: 4,096 tokens in rows of 256 and of 2,048, ours and theirs (plain torch) in turn, medians of ratios.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import print_row
from pretrain.config.model import StackConfig
from pretrain.model.parts.attention import AttentionContext
from pretrain.model.parts.gated_convolution import GatedConvolution
from pretrain.model.parts.gated_delta import GatedDelta
from pretrain.model.parts.state_space import Mamba2

LENGTHS = (256, 1024, 4096, 16384)
TOKENS = 4096
HEAD = 64
PACKAGES = ("torch",)


def stack(width: int) -> StackConfig:
    """A stack whose mixers have heads 64 wide, as the released models of both kinds."""
    heads = width // (2 * HEAD)
    return StackConfig.model_validate(
        {
            "layers": 3, "width": width, "heads": heads, "ff_width": width,
            "mixers": ["delta", "mamba2", "convolution"],
            "delta": {
                "value_heads": 2 * heads, "key_width": HEAD, "value_width": HEAD, "negative_eigenvalues": False,
            },
            "mamba2": {"head_width": HEAD, "state_width": 2 * HEAD},
        }
    )  # fmt: skip


def filled(layer: nn.Module) -> nn.Module:
    """The layer with weights of 0.02."""
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0.0, 0.02)
    return layer


def ours(width: int) -> dict[str, nn.Module]:
    """Layers by name."""
    config = stack(width)
    kinds: dict[str, Callable[[StackConfig], nn.Module]] = {
        "delta": GatedDelta, "mamba2": Mamba2, "convolution": GatedConvolution,
    }  # fmt: skip
    return {name: filled(kind(config)) for name, kind in kinds.items()}


def theirs(width: int) -> dict[str, nn.Module]:
    """The layers of Qwen3-Next and Mamba 2 in transformers, of the same sizes."""
    from transformers import Mamba2Config, Qwen3NextConfig
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    heads = width // (2 * HEAD)
    delta = Qwen3NextConfig(
        hidden_size=width, linear_num_key_heads=heads, linear_num_value_heads=2 * heads, linear_key_head_dim=HEAD,
        linear_value_head_dim=HEAD, num_hidden_layers=4,
    )  # fmt: skip
    mamba = Mamba2Config(
        hidden_size=width,
        num_heads=2 * width // HEAD,
        head_dim=HEAD,
        state_size=2 * HEAD,
        n_groups=1,
        num_hidden_layers=1,
    )
    return {"delta": filled(Qwen3NextGatedDeltaNet(delta, 0)), "mamba2": filled(Mamba2Mixer(mamba, 0))}


def seconds(call: Callable[[Tensor], Any], x: Tensor) -> float:
    """CPU time of a forward and backward pass."""
    begun = time.process_time()
    result = call(x)
    (result if isinstance(result, Tensor) else result[0]).square().mean().backward()
    return time.process_time() - begun


def kept(call: Callable[[Tensor], Any], x: Tensor) -> int:
    """Bytes of storages that a forward pass saves."""
    storages: dict[int, int] = {}
    held = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        held.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(x)
    return sum(storages.values())


def slope(values: list[float]) -> float:
    """Returns the least-squares slope of the logarithms of values over logarithms of LENGTHS."""
    return statistics.linear_regression([math.log(n) for n in LENGTHS], [math.log(value) for value in values]).slope


def measure_lengths(width: int, rounds: int) -> None:
    """Prints a row for each layer."""
    for name, layer in ours(width).items():
        call = partial(layer, context=AttentionContext(None))
        rows = [torch.randn(1, length, width, requires_grad=True) for length in LENGTHS]
        times = [min(seconds(call, x) for _ in range(rounds)) for x in rows]
        sizes = [float(kept(call, x)) for x in rows]
        each = {f"us_per_token_{n}": round(1e6 * t / n, 1) for n, t in zip(LENGTHS, times, strict=True)}
        figures = {"layer": name, "width": width, "slope_of_time": round(slope(times), 3), **each}
        figures |= {"slope_of_memory": round(slope(sizes), 3)}
        figures |= {"kept_bytes_per_token": round(sizes[-1] / LENGTHS[-1])}
        print_row("hybrid layers: cost against length", figures, PACKAGES)


def measure_peers(width: int, rounds: int) -> None:
    """Prints a row for each layer that transformers has, and length."""
    mine, peers = ours(width), theirs(width)
    for name, peer in peers.items():
        call = partial(mine[name], context=AttentionContext(None))
        for length in (256, 2048):
            x = torch.randn(TOKENS // length, length, width, requires_grad=True)
            pairs = [(seconds(call, x), seconds(peer, x)) for _ in range(rounds)]
            again = [(seconds(call, x), seconds(call, x)) for _ in range(rounds)]
            figures = {
                "layer": name, "width": width, "length": length,
                "tokens_a_cpu_s": round(TOKENS / statistics.median(own for own, _ in pairs)),
                "ratio": round(statistics.median(other / own for own, other in pairs), 2),
                "same_against_same": round(statistics.median(other / own for own, other in again), 2),
            }  # fmt: skip
            print_row("hybrid layers beside transformers", figures, (*PACKAGES, "transformers"))


def main() -> None:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--only", nargs="+", choices=("length", "peers"), default=["length", "peers"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "length" in arguments.only:
        measure_lengths(arguments.width, arguments.rounds)
    if "peers" in arguments.only:
        measure_peers(arguments.width, arguments.rounds)


if __name__ == "__main__":
    main()
