"""Bytes kept for the backward pass under each mode of activation checkpointing, by length; counts, no noise.

    python -m benchmarks.checkpointing_memory [--quick]

`llama-5m` with 8 blocks, one row, fp32, without the head: bytes that autograd keeps between forward and backward, each
storage once, parameters not counted; and under `full` the most that one block adds when it is run again. The blocks'
inputs grow with depth, one block's inside does not: one layer is live.
"""

import argparse
import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import print_row
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.model import Transformer, build_model, init_weights
from pretrain.model.backends.backend import MaskSize
from pretrain.model.block import BlockInput
from pretrain.model.parts.attention import AttentionContext
from pretrain.model.parts.position import RowPlace
from pretrain.types import AttentionMask, Batch

MODES = {
    "none": {},
    "selective": {"activation_checkpointing": "selective"},
    "full, every 2nd": {"activation_checkpointing": "full", "activation_checkpointing_every": 2},
    "full": {"activation_checkpointing": "full"},
}
LAYERS = 8


def build(mode: dict[str, object], max_seq_len: int) -> Transformer:
    """Builds the model under a mode."""
    over = {"preset": "llama-5m", "vocab_size": 512, "max_seq_len": max_seq_len, "decoder": {"layers": LAYERS}}
    config = ModelConfig.model_validate(expand_preset(over))
    model = build_model(config, PLAIN_ENGINE.model_copy(update=mode), torch.device("cpu"))
    init_weights(model, config, seed=0)
    return model


class Kept:
    """Counts the storages that autograd keeps; those that are the model's own are not counted."""

    def __init__(self, model: Transformer) -> None:
        self._own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._sizes: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Called for each tensor that is kept."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def mib(self) -> float:
        """So far."""
        return sum(self._sizes.values()) / 2**20


def live_tensors() -> dict[int, Tensor]:
    """Returns every fp32 tensor that Python holds, by identity."""
    gc.collect()
    return {
        id(thing): thing for thing in gc.get_objects() if isinstance(thing, Tensor) and thing.dtype == torch.float32
    }


def measure(mode: str, length: int) -> tuple[float, float]:
    """Returns MiB kept by the forward pass, and MiB that one block keeps when it is run again."""
    model = build(MODES[mode], length)
    ids = torch.zeros(1, length, dtype=torch.int64)
    kept, before = Kept(model), live_tensors()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        output = model(Batch(ids, ids), logits=False)
    assert output.hidden_BTD.requires_grad
    # What `selective` keeps lies in Python, where no hook of autograd sees it.
    for tensor in live_tensors().values():
        if id(tensor) not in before:
            kept.pack(tensor)
    stack = model.stacks[0]
    inside = Kept(model)
    x_BTD = torch.zeros(1, length, stack.blocks[0].attention.qkv.in_features, requires_grad=True)
    causal = AttentionMask(causal=True)
    mask = stack.backend.prepare(causal, MaskSize(1, length, length, x_BTD.device))
    rotation = stack.position(x_BTD, None, RowPlace()).rotation
    with torch.autograd.graph.saved_tensors_hooks(inside.pack, lambda tensor: tensor):
        assert stack.blocks[0](*BlockInput(x_BTD, AttentionContext(mask, rotation))).x_BTD.requires_grad
    return kept.mib, inside.mib


def main() -> None:
    """Counts, prints a table and the row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    lengths = (512, 1024) if parser.parse_args().quick else (1024, 2048, 4096)
    figures: dict[str, dict[str, float]] = {}
    for mode in MODES:
        found = [measure(mode, length) for length in lengths]
        slope = float(np.polyfit(np.log(lengths), np.log([kept for kept, _ in found]), 1)[0])
        kept, one_block = found[-1]
        figures[mode] = {"kept_mib": round(kept, 2), "slope": round(slope, 3), "one_block_mib": round(one_block, 2)}
        print(f"{mode:16} T={lengths[-1]}: {kept:8.1f} MiB kept, slope {slope:.3f}; one block {one_block:.1f} MiB")
    print_row("activation checkpointing", figures | {"lengths": list(lengths), "layers": LAYERS}, ("torch",))


if __name__ == "__main__":
    main()
