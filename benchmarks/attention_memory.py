"""Memory of attention by length: ours against torch's math kernel and the reference, fp32, one thread.

    python -m benchmarks.attention_memory [--quick]        (Linux)

One attention, forward and backward, of one row and 4 heads of width 32, in a process of its own for each length. Two
figures, each with the exponent of its growth (a least-squares line through the logarithms):

    saved   bytes that autograd keeps between forward and backward
    peak    most resident memory while it runs, less what there was before: temporaries and gradients too

    ours    the backend that `engine.attention=auto` gives on a CPU
    math    scaled_dot_product_attention with its math kernel and a mask or bias of all pairs: what torch itself falls
            back to under dropout, or with a bias that is learned
    eager   the formula
"""

import argparse
import ctypes
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common import print_row
from pretrain.model.backends import build_backend
from pretrain.model.backends.backend import (
    AttentionNeeds,
    DistanceBias,
    MaskSize,
    additive_mask,
    call_kernel,
    dense_bias,
    dense_mask,
)
from pretrain.types import AttentionMask

CPU = torch.device("cpu")
HEADS, HEAD_WIDTH = 4, 32
QUICK_LENGTHS, LENGTHS = (1024, 2048), (1024, 2048, 4096)
WARM_UP_LENGTH = 256
M_MMAP_THRESHOLD = -3
"""Of malloc.h."""
MUST_OURS, MUST_PEER = 1.05, 1.9


class Case(NamedTuple):
    """What is attended to, and with how much dropout; the mask is a function of the length."""

    mask: Callable[[int], AttentionMask]
    dropout: float = 0.0
    bias: bool = False


CASES = {
    "causal": Case(lambda length: AttentionMask(causal=True)),
    "causal, dropout": Case(lambda length: AttentionMask(causal=True), dropout=0.1),
    "documents": Case(lambda length: AttentionMask(causal=True, documents_BT=documents(length))),
    "documents, dropout": Case(lambda length: AttentionMask(causal=True, documents_BT=documents(length)), dropout=0.1),
    "window": Case(lambda length: AttentionMask(causal=False, window=128)),
    "padding": Case(lambda length: AttentionMask(causal=False, key_lengths_B=torch.tensor([3 * length // 4]))),
    "T5 bias": Case(lambda length: AttentionMask(causal=False), bias=True),
    "T5 bias, dropout": Case(lambda length: AttentionMask(causal=False), dropout=0.1, bias=True),
}
ARMS = ("ours", "math", "eager")


def documents(length: int) -> Tensor:
    """Four documents a row."""
    return (torch.arange(length) // (length // 4))[None]


def build_step(arm: str, case: Case, length: int) -> Callable[[], Tensor]:
    """Returns a function that attends, ready to be differentiated."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, length, HEADS, HEAD_WIDTH)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    values = torch.randn(HEADS, 2 * length - 1, generator=generator).requires_grad_()
    mask, bias = case.mask(length), DistanceBias(values) if case.bias else None
    if arm == "math":
        return lambda: attend_math(q, k, v, mask, bias, case.dropout)
    backend = build_backend("auto" if arm == "ours" else arm, AttentionNeeds(CPU, bias=case.bias))
    size = MaskSize(1, length, length, CPU)
    return lambda: backend.attend(q, k, v, backend.prepare(mask, size, bias), dropout=case.dropout)


def attend_math(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, bias: DistanceBias | None, drop: float) -> Tensor:
    """Attends as a user of torch would, were there nothing but its math kernel."""
    whole = range(q.shape[1])
    plain = mask == AttentionMask(causal=True) and bias is None
    allowed = None if plain else dense_mask(mask, queries=whole, keys=whole, device=CPU)
    if bias is not None:
        allowed = additive_mask(allowed, dense_bias(bias, queries=whole, keys=whole, num_queries=len(whole)), q.dtype)
    with sdpa_kernel(SDPBackend.MATH):
        return call_kernel(q, k, v, allowed=allowed, is_causal=plain, dropout=drop)


def saved_bytes(step: Callable[[], Tensor]) -> int:
    """Bytes of what autograd keeps; a tensor that is kept several times counts once."""
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        nbytes = min(tensor.nbytes, tensor.untyped_storage().nbytes())
        kept[tensor.data_ptr()] = max(kept.get(tensor.data_ptr(), 0), nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        mixed = step()
    del mixed
    return sum(kept.values())


def measure_in_child(arm: str, name: str, length: int, results: Any) -> None:
    """Measures one length; what torch sets up once is done before, and not counted."""
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    # Tensors come from the kernel and go back to it at once: what a heap would keep is no business of ours.
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    build_step(arm, CASES[name], WARM_UP_LENGTH)().sum().backward()
    step = build_step(arm, CASES[name], length)
    libc.malloc_trim(0)
    before = _reset_peak()
    step().sum().backward()
    peak = _status_bytes("VmHWM") - before
    results.put((saved_bytes(build_step(arm, CASES[name], length)), peak))


def _reset_peak() -> int:
    """Makes the kernel forget the largest resident size so far; returns the present one."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def measure_arm(arm: str, name: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Measures every length in a process of its own; returns MiB at the longest, and both exponents."""
    fork = multiprocessing.get_context("fork")
    found = []
    for length in lengths:
        results = fork.SimpleQueue()
        child = fork.Process(target=measure_in_child, args=(arm, name, length, results))
        child.start()
        child.join()
        assert child.exitcode == 0, f"{arm} on {name} at {length} ended with {child.exitcode}"
        found.append(results.get())
    saved, peak = zip(*found, strict=True)
    return {
        "saved_mib": round(saved[-1] / 2**20, 1),
        "saved_slope": round(exponent(lengths, saved), 3),
        "peak_mib": round(peak[-1] / 2**20, 1),
        "peak_slope": round(exponent(lengths, peak), 3),
    }


def exponent(lengths: tuple[int, ...], values: tuple[int, ...]) -> float:
    """Returns the slope of a line through the logarithms."""
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="lengths up to 2048, under a minute")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = QUICK_LENGTHS if options.quick else LENGTHS
    print(
        f"{'T = ' + str(lengths[-1]):22s} {'arm':6s} {'saved MiB':>10s} {'slope':>6s} {'peak MiB':>10s} {'slope':>6s}"
    )
    figures: dict[str, dict[str, Any]] = {}
    for name in CASES:
        figures[name] = {}
        for arm in ARMS:
            row = figures[name][arm] = measure_arm(arm, name, lengths)
            good = row["saved_slope"] <= MUST_OURS if arm == "ours" else row["saved_slope"] >= MUST_PEER
            row["holds"] = good
            must = f"must be at most {MUST_OURS}" if arm == "ours" else f"expected at least {MUST_PEER}"
            print(
                f"{name:22s} {arm:6s} {row['saved_mib']:10.1f} {row['saved_slope']:6.3f} {row['peak_mib']:10.1f} "
                f"{row['peak_slope']:6.3f}  saved slope {must}: {'holds' if good else 'MISSED'}"
            )
    print_row("attention_memory", {"unit": "MiB, exponent of length", "lengths": lengths, "cases": figures}, ("torch",))


if __name__ == "__main__":
    main()
