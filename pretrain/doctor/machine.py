"""The machine: processors, memory, GPUs and their driver, a compiler. Imports no torch."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pretrain.config.engine import EngineConfig
from pretrain.doctor.check import Check, Status

_ASK_WITHIN_S = 10.0
_BF16_SINCE = 8.0
"""Compute capability from which tensor cores multiply bf16 (Ampere)."""
_LEAST_SHM = 64 * 2**20


@dataclass(frozen=True, slots=True)
class GpuFound:
    """A GPU as its driver describes it; `capability` is 0 where it does not say."""

    name: str
    memory_bytes: int
    driver: str
    capability: float


def ask_driver() -> tuple[list[GpuFound], str]:
    """Returns the GPUs that `nvidia-smi` lists, and why it does not: empty where there is none, or it did."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], ""
    query = "--query-gpu=name,memory.total,driver_version,compute_cap"
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=_ASK_WITHIN_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi: {error}"
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        return [], f"nvidia-smi: {said[0] if said else f'exit code {done.returncode}'}"
    return parse_gpus(done.stdout), ""


def parse_gpus(text: str) -> list[GpuFound]:
    """Reads the answer of `nvidia-smi`."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            memory, capability = 0.0, 0.0
            with suppress(ValueError):
                memory = float(parts[1])
            with suppress(ValueError):
                capability = float(parts[3])
            found.append(GpuFound(parts[0], int(memory * 2**20), parts[2], capability))
    return found


def check_gpus(engine: EngineConfig | None, gpus: list[GpuFound], problem: str, ranks_here: int) -> list[Check]:
    """Sees that there are the GPUs that a config asks for.

    Args:
        engine: Engine section of the config; None without a config.
        gpus: That the driver lists.
        problem: Why it does not.
        ranks_here: Ranks of this host; 0: not known.
    """
    device = engine.device if engine else "auto"
    if device == "cpu":
        return [Check("GPUs", "pass", f"{len(gpus)}; engine.device=cpu asks for none")]
    bad: Status = "fail" if device == "cuda" else "warn"
    if problem:
        return [Check("GPUs", bad, problem, "load the driver, or give the container the devices (--nv, --gpus all)")]
    if not gpus:
        if device == "cuda":
            return [
                Check("GPUs", "fail", "none, and engine.device=cuda", "ask Slurm for GPUs, or use engine.device=auto")
            ]
        return [Check("GPUs", "pass", "none: training runs on CPUs")]
    names = ", ".join(sorted({gpu.name for gpu in gpus}))
    checks = [Check("GPUs", "pass", f"{len(gpus)} x {names}, driver {gpus[0].driver}")]
    if ranks_here > len(gpus):
        text = f"{len(gpus)} x {names} for {ranks_here} ranks of this host"
        checks = [Check("GPUs", "fail", text, "start one rank a GPU, or ask Slurm for more (--gpus-per-node)")]
    if len({gpu.name for gpu in gpus}) > 1:
        checks.append(Check("GPUs alike", "warn", names, "use GPUs of one kind: the slowest sets the pace"))
    if engine and engine.precision == "bf16" and any(0 < gpu.capability < _BF16_SINCE for gpu in gpus):
        text = f"{names} multiplies no bf16 in hardware: it is emulated, slowly"
        checks.append(Check("bf16", "warn", text, "use engine.precision=fp16 with ZeRO 1 to 3, or fp32"))
    return checks


def check_processor_bf16(engine: EngineConfig | None, flags: set[str] | None = None) -> Check | None:
    """Says where a CPU is to compute in bf16 and has no instructions for it; None where that is not asked for."""
    if engine is None or engine.precision != "bf16":
        return None
    found = _processor_flags() if flags is None else flags
    if found & {"avx512_bf16", "amx_bf16", "bf16"}:
        return Check("bf16", "pass", "the CPU has instructions for it")
    fix = "use engine.precision=fp32 on CPUs"
    return Check("bf16", "warn", "the CPU has no instructions for it: it is emulated, slowly", fix)


def _processor_flags() -> set[str]:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, values = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return set(values.split())
    return set()


def check_cores(ranks_here: int) -> Check:
    """Counts the cores that this process may use."""
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    text = f"{usable} of {total}"
    if ranks_here > usable:
        fix = "ask Slurm for more (--cpus-per-task), or start fewer ranks"
        return Check("CPU cores", "warn", f"{text} for {ranks_here} ranks: they take turns", fix)
    return Check("CPU cores", "pass", f"{text} may be used")


def read_memory() -> tuple[int, int]:
    """Returns bytes of memory that this process may have in all, and that are available now; 0: not known."""
    found: dict[str, int] = {}
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            found[name] = int(value.split()[0]) * 1024
    total, available = found.get("MemTotal", 0), found.get("MemAvailable", 0)
    for limit, used in _CGROUP_FILES:
        with suppress(OSError, ValueError):
            most = int(Path(limit).read_text(encoding="ascii"))  # `max` where there is none
            if most < total:
                total = most
                available = min(available, most - int(Path(used).read_text(encoding="ascii")))
    return total, available


_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def check_memory(needed: int, memory: tuple[int, int]) -> Check:
    """Compares the memory of the host with what ranks keep there: what is offloaded, and the copy that is saved.

    Args:
        needed: Bytes of all ranks of this host; 0: not known.
        memory: In all, and available.
    """
    total, available = memory
    if not total:
        return Check("memory", "pass", "not known")
    text = f"{available / 2**30:,.1f} GiB of {total / 2**30:,.1f} available"
    if needed > total:
        fix = "use more nodes, fewer ranks a node, or engine.offload_optimizer=none"
        return Check("memory", "fail", f"{text}, and the ranks of this host keep {needed / 2**30:,.1f} GiB there", fix)
    if needed > available:
        text += f", {needed / 2**30:,.1f} GiB needed"
        return Check("memory", "warn", text, "see what else runs here; Slurm: --mem=0 gives all of a node")
    return Check("memory", "pass", text + (f", {needed / 2**30:,.1f} GiB needed by the ranks" if needed else ""))


def check_shared_memory(ranks_here: int) -> Check | None:
    """Looks at /dev/shm, through which NCCL's ranks of one host speak; None where there is none, or one rank."""
    folder = Path("/dev/shm")
    if ranks_here == 1 or not folder.is_dir():
        return None
    room = shutil.disk_usage(folder)
    text = f"{room.free / 2**30:,.2f} GiB of {room.total / 2**30:,.2f} free"
    if room.free < _LEAST_SHM:
        return Check("/dev/shm", "warn", text, "start the container with --ipc=host or --shm-size=8g; remove leftovers")
    return Check("/dev/shm", "pass", text)


def check_compiler(engine: EngineConfig | None, environment: Mapping[str, str] = os.environ) -> Check:
    """Looks for the C++ compiler that DeepSpeed's host optimizer and torch.compile need; other runs need none."""
    name = environment.get("CXX") or "g++"
    found = shutil.which(name) or shutil.which("c++")
    needs = [
        text
        for text, is_needed in (
            ("engine.offload_optimizer=cpu", engine is not None and engine.offload_optimizer != "none"),
            ("engine.compile=true", engine is not None and engine.compile),
        )
        if is_needed
    ]
    if found:
        return Check("compiler", "pass", found)
    if needs:
        fix = "install g++, load the site's compiler module, or set CXX"
        return Check("compiler", "fail", f"no {name}, and {' and '.join(needs)} builds code at its start", fix)
    return Check("compiler", "pass", "none, and this run builds nothing")
