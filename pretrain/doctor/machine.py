"""The machine: processors, memory, GPUs and their driver, a compiler. Imports no torch."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from pretrain.config.engine import EngineConfig
from pretrain.doctor.check import Check, Status
from pretrain.utils.process import usable_cores

_ASK_WITHIN_S = 10.0
_TF32_SWITCH = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
_BF16_SINCE = 8.0  # compute capability from which tensor cores multiply bf16 (Ampere)
_LEAST_SHM = 64 * 2**20


@dataclass(frozen=True, slots=True)
class GpuFound:
    """A GPU as its driver describes it."""

    name: str
    memory_bytes: int
    driver: str
    capability: float  # 0: unknown


def ask_driver() -> tuple[list[GpuFound], str]:
    """Returns the GPUs that `nvidia-smi` lists, and its error; neither without the program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], ""
    query = "--query-gpu=name,memory.total,driver_version,compute_cap"
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_WITHIN_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi: {error}"
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        return [], f"nvidia-smi: {said[0] if said else f'exit code {done.returncode}'}"
    return parse_gpus(done.stdout), ""


def parse_gpus(text: str) -> list[GpuFound]:
    """Reads the output of `nvidia-smi`; lines and numbers that are none are left out."""
    gpus = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            memory_mib, capability = (_number_of(parts[at]) for at in (1, 3))
            gpus.append(GpuFound(parts[0], int(memory_mib * 2**20), parts[2], capability))
    return gpus


def _number_of(text: str) -> float:
    with suppress(ValueError):
        return float(text)
    return 0.0  # [N/A]


def check_gpus(
    engine: EngineConfig,
    gpus: list[GpuFound],
    problem: str,
    ranks_here: int,
    environment: Mapping[str, str] = os.environ,
) -> list[Check]:
    """Compares the result of `ask_driver` with the config; `ranks_here` of 0: unknown."""
    if engine.device == "cpu":
        return [Check("GPUs", "pass", f"{len(gpus)}; engine.device=cpu asks for none")]
    if problem:
        status: Status = "fail" if engine.device == "cuda" else "warn"
        fix = "load the driver, or give the container the devices (--nv, --gpus all)"
        return [Check("GPUs", status, problem, fix)]
    if not gpus and engine.device == "cuda":
        fix = "ask Slurm for GPUs, or use engine.device=auto"
        return [Check("GPUs", "fail", "none, and engine.device=cuda", fix)]
    if not gpus:
        return [Check("GPUs", "pass", "none: training runs on CPUs")]
    kinds = sorted({gpu.name for gpu in gpus})
    names = ", ".join(kinds)
    count = f"{len(gpus)} x {names}"
    checks = [Check("GPUs", "pass", f"{count}, driver {gpus[0].driver}")]
    if ranks_here > len(gpus):
        fix = "start one rank a GPU, or ask Slurm for more (--gpus-per-node)"
        checks = [Check("GPUs", "fail", f"{count} for {ranks_here} ranks of this host", fix)]
    if len(kinds) > 1:
        fix = "use GPUs of one kind: the slowest sets the pace"
        checks.append(Check("GPUs alike", "warn", names, fix))
    return checks + _check_precision(engine, gpus, names, environment)


def _check_precision(
    engine: EngineConfig, gpus: list[GpuFound], names: str, environment: Mapping[str, str]
) -> list[Check]:
    """Checks that the GPUs multiply in the config's precision, at its speed."""
    checks = []
    if engine.precision == "bf16" and any(0 < gpu.capability < _BF16_SINCE for gpu in gpus):
        fix = "use engine.precision=fp16 with ZeRO 1 to 3, or fp32"
        text = f"{names} multiplies no bf16 in hardware: it is emulated, slowly"
        checks.append(Check("bf16", "warn", text, fix))
    # TF32 came with bf16. Training never turns it on; torch reads this variable.
    has_tf32 = any(gpu.capability >= _BF16_SINCE for gpu in gpus)
    if engine.precision == "fp32" and has_tf32 and environment.get(_TF32_SWITCH) != "1":
        fix = f"use engine.precision=bf16, or export {_TF32_SWITCH}=1 for factors of 10 bits"
        text = f"{names} multiplies fp32 without TF32: at a tenth of the speed of bf16"
        checks.append(Check("TF32", "warn", text, fix))
    return checks


def check_processor_bf16(engine: EngineConfig, flags: set[str] | None = None) -> Check | None:
    """Checks that a CPU has instructions for bf16 if the config computes in it."""
    if engine.precision != "bf16":
        return None
    cpu_flags = _processor_flags() if flags is None else flags
    if cpu_flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        return Check("bf16", "pass", "the CPU has instructions for it")
    text = "the CPU has no instructions for it: it is emulated, slowly"
    return Check("bf16", "warn", text, "use engine.precision=fp32 on CPUs")


def _processor_flags() -> set[str]:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, values = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return set(values.split())
    return set()


def check_cores(ranks_here: int) -> Check:
    """Compares the cores that this process may use with the ranks of this host."""
    usable = usable_cores()
    text = f"{usable} of {os.cpu_count() or 1}"
    if ranks_here > usable:
        fix = "ask Slurm for more (--cpus-per-task), or start fewer ranks"
        return Check("CPU cores", "warn", f"{text} for {ranks_here} ranks: they take turns", fix)
    return Check("CPU cores", "pass", f"{text} may be used")


_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def read_memory() -> tuple[int, int]:
    """Returns bytes of memory that this process may use, in total and now."""
    machine = psutil.virtual_memory()
    total = int(machine.total)
    available = int(machine.available)
    for limit, used in _CGROUP_FILES:
        with suppress(OSError, ValueError):
            most = int(Path(limit).read_text(encoding="ascii"))  # the text `max`: no limit
            if most < total:
                total = most
                available = min(available, most - int(Path(used).read_text(encoding="ascii")))
    return total, available


def check_memory(needed: int, memory: tuple[int, int]) -> Check:
    """Compares the result of `read_memory` with the bytes that ranks keep there; 0: unknown."""
    total, available = memory
    text = f"{available / 2**30:,.1f} GiB of {total / 2**30:,.1f} available"
    wanted = f"{needed / 2**30:,.1f} GiB"
    if needed > total:
        fix = "use more nodes, fewer ranks a node, or offload less (engine.offload_*)"
        return Check("memory", "fail", f"{text}, and the ranks of this host need {wanted}", fix)
    if needed > available:
        fix = "end other processes here; Slurm: --mem=0 gives all of a node"
        return Check("memory", "warn", f"{text}, {wanted} needed", fix)
    return Check("memory", "pass", f"{text}, {wanted} needed by the ranks" if needed else text)


def check_shared_memory(ranks_here: int) -> Check | None:
    """Checks /dev/shm, which NCCL uses on one host; None without it, or for one rank."""
    folder = Path("/dev/shm")
    if ranks_here == 1 or not folder.is_dir():
        return None
    room = shutil.disk_usage(folder)
    text = f"{room.free / 2**30:,.2f} GiB of {room.total / 2**30:,.2f} free"
    if room.free < _LEAST_SHM:
        fix = "start the container with --ipc=host or --shm-size=8g; remove leftovers"
        return Check("/dev/shm", "warn", text, fix)
    return Check("/dev/shm", "pass", text)


def check_compiler(engine: EngineConfig, environment: Mapping[str, str] = os.environ) -> Check:
    """Finds the C++ compiler that DeepSpeed's host optimizer and torch.compile need."""
    name = environment.get("CXX") or "g++"
    compiler = shutil.which(name) or shutil.which("c++")
    if compiler:
        return Check("compiler", "pass", compiler)
    needs = ["engine.offload_optimizer=cpu"] if engine.offload_optimizer != "none" else []
    needs += ["engine.compile=true"] if engine.compile is True else []
    if needs:
        fix = "install g++, load the site's compiler module, or set CXX"
        text = f"no {name}, and {' and '.join(needs)} builds code at its start"
        return Check("compiler", "fail", text, fix)
    return Check("compiler", "pass", "none, and this run builds nothing")
