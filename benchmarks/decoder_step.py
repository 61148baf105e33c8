"""Time of a decoder's training step: ours against nanoGPT and Hugging Face, fp32, one thread, in one run.

    python -m benchmarks.decoder_step --nanogpt PATH [--quick]        (needs transformers beside the core install)

PATH is a clone of github.com/karpathy/nanoGPT, bare or not. A step is forward, backward and AdamW on a GPT-2 shape
(biases, exact GELU, tied embeddings, no dropout, no decay). All arms start from the same weights, and their losses on
the same batches are compared first: within 1e-4 over ten steps, or no timing counts.

    ours            the model, the objective and the optimizer that `pretrain train` builds
    nanogpt         with the optimizer that its own configure_optimizers gives on a CPU
    nanogpt_fused   with torch's fused AdamW, which it takes on CUDA only: the stronger peer
    hf              transformers' GPT2LMHeadModel with SDPA, fused AdamW
"""

import argparse
import contextlib
import importlib.util
import io
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common import Timing, is_conclusive, measure, print_row, ratio
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig, StackConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.optim import OptimConfig
from pretrain.model import Transformer, build_model, init_weights
from pretrain.objective import build_loss
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters
from pretrain.plan.flops import count_flops
from pretrain.types import Batch

CPU = torch.device("cpu")
LR, BETAS = 1e-3, (0.9, 0.95)
LOSS_TOLERANCE = 1e-4
MUST = {"nanogpt": 0.97, "nanogpt_fused": 0.97, "hf": 1.1}

Step = Callable[[Batch], Tensor]


@dataclass(frozen=True, slots=True)
class Size:
    """A model and the batch it is timed on: 4 rows of 256 tokens."""

    layers: int
    width: int
    heads: int
    vocab_size: int
    rounds: int
    rows: int = 4
    seq_len: int = 256


SIZES = {
    "1M": Size(layers=4, width=128, heads=4, vocab_size=1024, rounds=60),
    "10M": Size(layers=6, width=320, heads=5, vocab_size=8192, rounds=20),
    "30M": Size(layers=8, width=512, heads=8, vocab_size=8192, rounds=12),
}


def stepper(optimizer: torch.optim.Optimizer, loss_of: Step) -> Step:
    """Returns a function that takes one training step and returns the loss before it."""

    def step(batch: Batch) -> Tensor:
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)


def plan_model(size: Size) -> ModelConfig:
    stack = StackConfig(
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        ff_width=4 * size.width,
        activation="gelu",
        gated=False,
        norm="layer",
        bias=True,
        position="learned",
    )
    return ModelConfig(decoder=stack, vocab_size=size.vocab_size, max_seq_len=size.seq_len, tied_embeddings=True)


def build_ours(size: Size) -> tuple[Transformer, Step]:
    config = plan_model(size)
    model = build_model(config, PLAIN_ENGINE, CPU)
    init_weights(model, config, seed=0)
    objective = build_loss(ObjectiveConfig())
    optim = OptimConfig(lr=LR, beta1=BETAS[0], beta2=BETAS[1], weight_decay=0.0)
    optimizer = build_optimizer(group_parameters(model), optim, CPU)

    def loss_of(batch: Batch) -> Tensor:
        output = objective(model, batch)
        return output.loss_sum / batch.num_targets()

    return model, stepper(optimizer, loss_of)


PARTS = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "feedforward_norm": "ln_2",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
}
"""Modules of a block: our name, and the one that both peers use."""


@torch.no_grad()
def lend_weights(ours: Transformer, theirs: nn.Module, *, conv1d: bool) -> None:
    """Copies our weights to a peer; Conv1D keeps matrices transposed."""
    mine, copied = dict(ours.named_parameters()), 0
    names = {"embedding.weight": "wte.weight", "decoder.position.weight": "wpe.weight"}
    for kind in ("weight", "bias"):
        names[f"decoder.norm.{kind}"] = f"ln_f.{kind}"
        for number in range(ours.num_layers):
            for our_part, their_part in PARTS.items():
                names[f"decoder.blocks.{number}.{our_part}.{kind}"] = f"h.{number}.{their_part}.{kind}"
    parameters = dict(theirs.named_parameters())
    for our_name, their_name in names.items():
        value, target = mine[our_name], parameters[f"transformer.{their_name}"]
        target.copy_(value.t() if conv1d and "c_" in their_name and value.ndim == 2 else value)
        copied += 1
    assert copied == len(mine) == len(parameters)


def load_nanogpt(path: Path) -> ModuleType:
    """Imports nanoGPT's model.py from a clone, bare or not; nothing of it is kept."""
    with tempfile.TemporaryDirectory() as folder:
        source = path / "model.py"
        if not source.is_file():
            shown = subprocess.run(["git", "-C", str(path), "show", "HEAD:model.py"], capture_output=True, check=True)
            source = Path(folder) / "model.py"
            source.write_bytes(shown.stdout)
        spec = importlib.util.spec_from_file_location("nanogpt_model", source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def build_nanogpt(module: ModuleType, size: Size, ours: Transformer, *, fused: bool) -> Step:
    config = module.GPTConfig(
        block_size=size.seq_len,
        vocab_size=size.vocab_size,
        n_layer=size.layers,
        n_head=size.heads,
        n_embd=size.width,
        dropout=0.0,
        bias=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        model = module.GPT(config)
        own = model.configure_optimizers(0.0, LR, BETAS, "cpu")
    lend_weights(ours, model, conv1d=False)
    optimizer = fused_adamw(model) if fused else own
    return stepper(optimizer, lambda batch: model(batch.tokens_BT, batch.targets_BT)[1])


def build_hf(size: Size, ours: Transformer) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocab_size,
        n_positions=size.seq_len,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config).train()
    lend_weights(ours, model, conv1d=True)

    def loss_of(batch: Batch) -> Tensor:
        return model(input_ids=batch.tokens_BT, labels=batch.targets_BT, shift_labels=batch.targets_BT).loss

    return stepper(fused_adamw(model), loss_of)


def build_arms(size: Size, nanogpt: ModuleType) -> dict[str, Step]:
    ours, step = build_ours(size)
    arms = {"ours": step, "ours_again": build_ours(size)[1]}
    arms["nanogpt"] = build_nanogpt(nanogpt, size, ours, fused=False)
    arms["nanogpt_fused"] = build_nanogpt(nanogpt, size, ours, fused=True)
    arms["hf"] = build_hf(size, ours)
    return arms


def random_batches(size: Size, count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(size.vocab_size, (count, size.rows, size.seq_len + 1), generator=generator)
    return [Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in ids]


def check_same_work(arms: dict[str, Step], batches: list[Batch]) -> float:
    """Takes a step on each batch; returns the largest difference of a loss from ours."""
    losses = {name: torch.stack([step(batch) for batch in batches]) for name, step in arms.items()}
    worst = max(float((values - losses["ours"]).abs().max()) for values in losses.values())
    assert worst < LOSS_TOLERANCE, f"losses differ by {worst}: the arms do not do the same work"
    return worst


def report(name: str, timings: dict[str, list[Timing]]) -> dict[str, Any]:
    """Prints one size and returns its figures."""
    aa = ratio(timings["ours"], timings["ours_again"])
    figures: dict[str, Any] = {"aa": str(aa), "conclusive": is_conclusive(aa), "ms": {}, "ratios": {}}
    for arm, runs in timings.items():
        figures["ms"][arm] = round(1e3 * float(np.median([run.cpu_s for run in runs])), 1)
    for peer, must in MUST.items():
        found = ratio(timings[peer], timings["ours"])
        figures["ratios"][peer] = str(found)
        verdict = "holds" if found.low >= must else "MISSED"
        print(f"{name:4s} ours over {peer:14s} {found}  must be {must}: {verdict}")
    print(f"{name:4s} A/A {aa}{'' if figures['conclusive'] else ' (inconclusive: wider than 3%)'}  ms {figures['ms']}")
    return figures


def fit_cost(figures: dict[str, dict[str, Any]], gigaflops: dict[str, float]) -> dict[str, dict[str, float]]:
    """Fits `ms = fixed + slope x GFLOP` over the sizes, for each arm."""
    fits = {}
    for arm in ("ours", *MUST):
        slope, fixed = np.polyfit([gigaflops[name] for name in figures], [figures[n]["ms"][arm] for n in figures], 1)
        fits[arm] = {"fixed_ms": round(float(fixed), 2), "ms_per_gflop": round(float(slope), 3)}
    return fits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of nanoGPT, bare or not")
    parser.add_argument("--quick", action="store_true", help="the two smaller sizes, under a minute")
    options = parser.parse_args()
    torch.set_num_threads(1)
    nanogpt = load_nanogpt(options.nanogpt)
    figures, gigaflops, worst = {}, {}, 0.0
    for name in list(SIZES)[: 2 if options.quick else 3]:
        size = SIZES[name]
        arms = build_arms(size, nanogpt)
        batches = random_batches(size, 3 if options.quick else 10)
        worst = max(worst, check_same_work(arms, batches))
        rounds = size.rounds // 4 if options.quick else size.rounds
        timings = measure({arm: partial(step, batches[0]) for arm, step in arms.items()}, rounds)
        figures[name] = report(name, timings)
        gigaflops[name] = count_flops(plan_model(size), size.seq_len).whole.total * size.rows / 1e9
    row = {"unit": "CPU ms a step", "loss_difference": worst, "sizes": figures, "fit": fit_cost(figures, gigaflops)}
    print_row("decoder_step", row, ("torch", "transformers"))


if __name__ == "__main__":
    main()
