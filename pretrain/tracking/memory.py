"""How much memory a rank uses: the device's where there is one, else that of the process."""

import os
import sys
from pathlib import Path

import torch


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Returns `memory_bytes`, and on CUDA `memory_reserved_bytes`; takes some 10 us. Of this rank alone.

    On CUDA the most that tensors have held at once so far, and the most that the allocator has kept for them: what
    must fit. On a CPU what of the process is in memory now.
    """
    if device.type != "cuda":
        return {"memory_bytes": float(_resident_bytes())}
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"memory_bytes": float(peak), "memory_reserved_bytes": float(reserved)}


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux: the most that it ever was
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
