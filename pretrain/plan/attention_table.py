"""Fastest kernel of attention on a GPU in 16 bits, by packing and length of rows.

    documents of a row     keys of a row     kernel     where it was measured

`engine.attention: auto` takes it, and `plan` counts its time. `cudnn` and `flash` are torch's kernels
for rows without a mask; `varlen` is FlashAttention over the documents of a row, `flex` is compiled
for a mask. An entry without a measurement says so. The arm `attention` of `benchmarks/gpu.py` times
all of them, and writes the entries of its GPU in this form.
"""

from typing import NamedTuple


class KernelChoice(NamedTuple):
    """A kernel for rows of so many keys and more."""

    packed: bool  # documents of a row do not attend to each other, or rows are padded
    keys: int
    kernel: str  # `cudnn`, `flash`, `varlen` or `flex`
    measured: str  # row of benchmarks/results.md; empty: not measured


KERNELS = [
    KernelChoice(False, 1, "cudnn", ""),
    KernelChoice(False, 32_768, "cudnn", "H200: 0.81 of the peak; flash, from 65,536 on, 0.54"),
    KernelChoice(True, 1, "varlen", ""),
]
"""Entries by rising keys: the last that applies is taken."""


def fastest_kernel(packed: bool, keys: int) -> str:
    """Returns the kernel of the table for rows of so many keys."""
    return [entry.kernel for entry in KERNELS if entry.packed == packed and entry.keys <= keys][-1]
