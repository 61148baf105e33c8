"""State of a GPU in words, as NVML tells by `nvidia-smi`: clock, heat, limits, errors."""

import shutil
import subprocess
from contextlib import suppress

_WITHIN_S = 10.0
_FIELDS = (
    "clocks.sm",
    "clocks.max.sm",
    "temperature.gpu",
    "clocks_throttle_reasons.active",
    "ecc.errors.uncorrected.volatile.total",
)
_REASONS = {
    0x4: "the power limit",
    0x8: "a slowdown by hardware",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake",
}
"""Bits of `nvmlClocksThrottleReasons` that slow a busy GPU down."""


def describe_gpu(name: str) -> str:
    """Returns the state of a GPU by its UUID or PCI address; empty where no driver tells it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = f"--query-gpu={','.join(_FIELDS)}"
    command = [program, f"--id={name}", query, "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WITHIN_S)
        return describe_row(done.stdout) if not done.returncode else ""
    return ""


def describe_row(text: str) -> str:
    """Returns a row of `nvidia-smi` in words; a value that the GPU does not have is left out."""
    fields = [field.strip() for field in text.strip().split(",")]
    if len(fields) != len(_FIELDS):
        return ""
    clock, most, heat, reasons, errors = fields
    words = []
    if clock.isdecimal() and most.isdecimal():
        words.append(f"{clock} of {most} MHz")
    if heat.isdecimal():
        words.append(f"{heat} C")
    with suppress(ValueError):
        active = int(reasons, 16)
        if slowed := [reason for bit, reason in _REASONS.items() if active & bit]:
            words.append(f"slowed down by {' and '.join(slowed)}")
    if errors.isdecimal() and int(errors):
        words.append(f"{errors} uncorrected memory errors")
    return ", ".join(words)
