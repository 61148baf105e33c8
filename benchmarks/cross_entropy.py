"""Chunked cross-entropy against materialised logits: time, bytes kept for the backward pass, and the peak (Linux).

    python -m benchmarks.cross_entropy [--quick]

Forward and backward of the loss of a linear head at V = 50,304 and 4,096 or 8,192 tokens: on a CPU in fp32 on one
thread, ratios of CPU time; on a GPU, where torch finds one, in fp32 and under bf16 autocast, ratios of wall time.
Losses and gradients are compared first, or no timing counts.

    ours    linear_cross_entropy
    plain   F.linear and F.cross_entropy
    liger-kernel, cut-cross-entropy   on a GPU in bf16, where installed; the casts of autocast included

Bytes kept are those of what autograd keeps between forward and backward, parameters apart. The peak is the most memory
held at once, less what there was before: the gradients of hidden states and weight are in both.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.common import is_conclusive, measure, print_row, ratio
from benchmarks.gpu_kernels import LOSS_PEERS, HeadInputs, loss_of_peer
from pretrain.errors import ConfigError
from pretrain.objective.loss import linear_cross_entropy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 50304
MUST_BYTES, MUST_SPEED = 1 / 8, 0.95
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
GRADIENT_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
"""Norm of the difference from plain fp32, relative. bf16 rounds by up to 2**-9."""


class Case(NamedTuple):
    """What is timed."""

    width: int
    precision: str
    rounds: int
    tokens: int = 4096

    @property
    def name(self) -> str:
        """For the table."""
        return f"D={self.width} {self.precision}, {self.tokens} tokens"


CASES = {
    ("cpu", True): [Case(128, "fp32", 3)],
    ("cpu", False): [Case(256, "fp32", 6), Case(768, "fp32", 5), Case(768, "fp32", 3, 8192)],
    ("cuda", True): [Case(768, "bf16", 50), Case(768, "fp32", 20)],
    ("cuda", False): [Case(width, p, 100) for width in (768, 2048) for p in ("bf16", "fp32")],
}


class Inputs(NamedTuple):
    """Of a head; the first two want gradients."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor


def make_inputs(width: int, tokens: int) -> Inputs:
    """Draws hidden states as after a norm, and a weight that gives logits of the order of 1."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(VOCAB, width, generator=generator) * width**-0.5
    targets = torch.randint(VOCAB, (tokens,), generator=generator)
    return Inputs(hidden.to(DEVICE).requires_grad_(), weight.to(DEVICE).requires_grad_(), targets.to(DEVICE))


def ours(inputs: Inputs) -> Tensor:
    """Chunked."""
    return linear_cross_entropy(*inputs, vocab_size=VOCAB).loss_sum / len(inputs.targets)


def plain(inputs: Inputs) -> Tensor:
    """Materialised."""
    return functional.cross_entropy(functional.linear(inputs.hidden, inputs.weight), inputs.targets)


def peers(inputs: Inputs, precision: str) -> dict[str, Callable[[Inputs], Tensor]]:
    """Returns those that can run here, after a run of each; says of the others why not."""
    found: dict[str, Callable[[Inputs], Tensor]] = {}
    for package in LOSS_PEERS if precision == "bf16" else ():

        def loss(inputs: Inputs, package: str = package) -> Tensor:
            return loss_of_peer(package, HeadInputs(inputs.hidden.bfloat16(), inputs.weight.bfloat16(), inputs.targets))

        try:
            step(loss, inputs, precision)
        except ConfigError as error:
            print(error)
        else:
            found[package] = loss
    return found


def forward(function: Callable[[Inputs], Tensor], inputs: Inputs, precision: str) -> Tensor:
    """Returns the mean loss."""
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "bf16"):
        return function(inputs)


def step(function: Callable[[Inputs], Tensor], inputs: Inputs, precision: str) -> tuple[Tensor, ...]:
    """Runs forward and backward to their end; returns the loss and both gradients."""
    loss = forward(function, inputs, precision)
    gradients = torch.autograd.grad(loss, (inputs.hidden, inputs.weight))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return loss.detach(), *gradients


def check_same_work(inputs: Inputs, precision: str) -> float:
    """Compares losses and gradients with plain fp32; returns our largest relative difference of a gradient."""
    loss, *gradients = step(plain, inputs, "fp32")
    found, *others = step(ours, inputs, precision)
    apart = float((found - loss).abs())
    assert apart < LOSS_TOLERANCE[precision], f"losses differ by {apart}: the arms do not do the same work"
    differences = [float((x - y).norm() / y.norm()) for x, y in zip(others, gradients, strict=True)]
    assert max(differences) < GRADIENT_TOLERANCE[precision], f"gradients differ by {differences}"
    return max(differences)


def kept_bytes(function: Callable[[Inputs], Tensor], inputs: Inputs, precision: str) -> int:
    """Bytes that autograd keeps, each storage once, the weight not counted."""
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = forward(function, inputs, precision)
    del loss
    kept.pop(inputs.weight.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def peak_bytes(function: Callable[[Inputs], Tensor], inputs: Inputs, precision: str) -> int:
    """Most bytes held at once by a step: of the allocator on a GPU, resident ones on a CPU."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(function, inputs, precision)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes("VmRSS")
    step(function, inputs, precision)
    return _resident_bytes("VmHWM") - before


def _resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def run_case(case: Case) -> dict[str, Any]:
    """Measures one case, prints it and returns its figures."""
    inputs = make_inputs(case.width, case.tokens)
    difference = check_same_work(inputs, case.precision)
    others = peers(inputs, case.precision)
    memory = {
        name: [count(function, inputs, case.precision) for function in (ours, plain, *others.values())]
        for name, count in (("kept", kept_bytes), ("peak", peak_bytes))
    }
    arms = {"ours": ours, "ours_again": ours, "plain": plain, **others}
    timings = measure({arm: partial(step, f, inputs, case.precision) for arm, f in arms.items()}, case.rounds)
    clock = "wall_s" if DEVICE.type == "cuda" else "cpu_s"
    speed, aa = (ratio(timings[arm], timings["ours"], clock=clock) for arm in ("plain", "ours_again"))
    ms = {arm: round(1e3 * float(np.median([getattr(run, clock) for run in runs])), 1) for arm, runs in timings.items()}
    print(
        f"{case.name:24s} speed over plain {speed}, must be {MUST_SPEED}: "
        f"{'holds' if speed.low >= MUST_SPEED else 'MISSED'}; A/A {aa}"
        f"{'' if is_conclusive(aa) else ' (inconclusive: wider than 3%)'}; ms {ms}"
    )
    for name, (mine, theirs, *_) in memory.items():
        print(f"{'':24s} {name} {mine / 2**20:.0f} MiB of {theirs / 2**20:.0f}: {mine / theirs:.3f}")
    mine, theirs, *_ = memory["kept"]
    print(f"{'':24s} kept must be {MUST_BYTES}: {'holds' if mine <= MUST_BYTES * theirs else 'MISSED'}")
    return {
        "speed": str(speed),
        "aa": str(aa),
        "conclusive": is_conclusive(aa),
        "ms": ms,
        "peers": list(others),
        "mib": {name: [round(value / 2**20, 1) for value in values] for name, values in memory.items()},
        "gradient_difference": difference,
    }


def main() -> None:
    """Measures every case of this machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one width, under a minute")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {case.name: run_case(case) for case in CASES[DEVICE.type, options.quick]}
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    unit = f"ms and MiB at V={VOCAB}; memory of ours, of plain, of peers"
    print_row("cross_entropy", {"unit": unit, "device": device, "cases": figures}, ("torch",))


if __name__ == "__main__":
    main()
