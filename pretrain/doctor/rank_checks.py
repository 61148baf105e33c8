"""Checks between ranks: rendezvous, equal versions, shared files, speed of an all-reduce.

    start_ranks   alone: N processes of this machine are started, and rank 0 returns their findings
    meet          in a job of torchrun or srun: this process is a rank already

Over gloo on CPUs, over NCCL on GPUs. Every rank has the same findings.
"""

import os
import platform
import secrets
import socket
import statistics
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from pretrain import dist
from pretrain.config.engine import EngineConfig
from pretrain.dist import World
from pretrain.doctor.check import Check, Report, report_of
from pretrain.doctor.filesystem import nearest_folder
from pretrain.doctor.machine import GpuFound, ask_driver
from pretrain.doctor.spawn import run_ranks
from pretrain.doctor.versions import compare_reports, own_versions
from pretrain.errors import EXIT_DISK, LaunchError
from pretrain.utils.units import plural

MEET_WITHIN_S = 60.0
SEEN_WITHIN_S = 30.0
_BYTES = {"cpu": 2**24, "cuda": 2**28}  # of an all-reduce
_REPEATS = 5


def meet(
    world: World, engine: EngineConfig, folder: Path, report: Report | None = None
) -> tuple[list[Check], list[Report]]:
    """Meets the other ranks, by the environment, and runs the checks between them. Collective.

    Returns the checks, and the reports of all hosts, each from one of its processes. Raises:
    LaunchError: torch cannot be imported, or the ranks do not meet within a minute.
    """
    torch = import_torch()
    device = "cuda" if engine.device != "cpu" and torch.cuda.is_available() else "cpu"
    take_device(torch, world, device)
    gpus, _ = ask_driver() if world.local_rank == 0 and engine.device != "cpu" else ([], "")
    versions = own_versions() | build_versions(torch)
    mine = Report(socket.gethostname(), check_torch(torch, engine, gpus), versions)
    took = start_group(torch, world, device)
    host = asdict(report) if report else None
    all_facts = dist.gather_objects({"rank": asdict(mine), "took": took, "host": host})
    reports = [report_of(one["rank"]) for one in all_facts]
    slowest = max(one["took"] for one in all_facts)
    ranks = plural(world.size, "rank")
    *checks, same = compare_reports(reports)
    checks.append(Check("rendezvous", "pass", f"{ranks} met in {slowest:.1f} s"))
    checks += [same, _check_seen(world, folder)]
    if world.size > 1:
        num_hosts = len({one.host for one in reports})
        speed = all_reduce_speed(torch, world, device, _BYTES[device]) / 1e9
        where = f"{ranks} on {plural(num_hosts, 'host')}"
        text = f"{speed:.2f} GB/s a rank over {torch.distributed.get_backend()}, {where}"
        checks.append(Check("all-reduce", "pass", text))
    torch.distributed.destroy_process_group()
    return checks, [report_of(one["host"]) for one in all_facts if one["host"]]


def take_device(torch: Any, world: World, device: str) -> None:
    """Selects this rank's GPU, before anything is put on another one."""
    if device == "cuda":
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())


def start_group(torch: Any, world: World, device: str) -> float:
    """Sets up the process group; returns the seconds. Raises: LaunchError."""
    begun = time.monotonic()
    backend = "nccl" if device == "cuda" else "gloo"
    limit = timedelta(seconds=MEET_WITHIN_S)
    try:
        with dist.loopback_store(world):
            torch.distributed.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=limit)
        torch.distributed.barrier()
    except (torch.distributed.DistError, RuntimeError, OSError, ValueError) as error:
        here = f"rank {world.rank} on {socket.gethostname()}"
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LaunchError(
            f"{here} cannot meet the others at {address}: {str(error).splitlines()[0]}",
            fix="see that every node reaches it, and set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME",
        ) from error
    return time.monotonic() - begun


def _check_seen(world: World, folder: Path) -> Check:
    """Lets rank 0 make a file next to the run folder, and every rank wait until it sees it."""
    where = nearest_folder(folder)
    name = dist.broadcast_object(secrets.token_hex(6) if world.is_main else None)
    probe = where / f".doctor-{name}"
    problem = ""
    if world.is_main:
        try:
            probe.write_text(name, encoding="ascii")
        except OSError as error:
            problem = f"{where} cannot be written: {error.strerror}"
    problem = dist.broadcast_object(problem)
    begun = time.monotonic()
    is_seen = False
    while not problem and not is_seen and time.monotonic() - begun < SEEN_WITHIN_S:
        with suppress(OSError):
            is_seen = probe.read_text(encoding="ascii") == name
        if not is_seen:
            time.sleep(0.05)
    mine = {"host": socket.gethostname(), "s": time.monotonic() - begun, "is_seen": is_seen, "at": str(where)}
    seen = dist.gather_objects(mine)
    if world.is_main:
        probe.unlink(missing_ok=True)
    blind = [one for one in seen if not one["is_seen"]]
    if blind and not problem:
        problem = f"{blind[0]['host']} does not see in {blind[0]['at']} what rank 0 made in {seen[0]['at']}"
    if problem:
        fix = "set run.dir to a folder that every node sees under the same path"
        return Check("shared folder", "fail", problem, fix, EXIT_DISK)
    latest = max(float(one["s"]) for one in seen)
    return Check("shared folder", "pass", f"a file of rank 0 is seen by all within {latest:.2f} s")


def all_reduce_speed(torch: Any, world: World, device: str, num_bytes: int) -> float:
    """Returns the bus bandwidth of an all-reduce, bytes/s: 2 (n - 1) / n of its size a link."""
    values = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(_REPEATS + 1):
        torch.distributed.barrier()
        begun = time.perf_counter()
        torch.distributed.all_reduce(values)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    took = dist.gather_objects(statistics.median(seconds[1:]))
    return 2 * num_bytes * (world.size - 1) / world.size / max(took)


def meet_task(world: World, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs `meet` as a rank started by `run_ranks`."""
    checks, _ = meet(world, EngineConfig(**arguments["engine"]), Path(arguments["folder"]))
    return [asdict(check) for check in checks]


def start_ranks(num_ranks: int, engine: EngineConfig, folder: Path) -> list[Check]:
    """Starts ranks on this machine that meet; returns their checks."""
    task = "pretrain.doctor.rank_checks:meet_task"
    arguments = {"engine": engine.model_dump(mode="json"), "folder": str(folder)}
    try:
        return [Check(**one) for one in run_ranks(task, num_ranks, arguments, 3 * MEET_WITHIN_S)]
    except LaunchError as error:
        fix = error.fix or "run `pretrain doctor` with --ranks 1, and see whether torch works"
        return [Check("rendezvous", "fail", error.what, fix)]


def import_torch() -> Any:
    """Returns the module. Raises: LaunchError if it cannot be imported, with its error."""
    try:
        import torch
    except (ImportError, OSError) as error:  # a library of CUDA that is missing is an OSError
        raise LaunchError(
            f"torch cannot be imported: {error}", fix="install it anew; a CUDA build needs the libraries of its wheel"
        ) from None
    return torch


def build_versions(torch: Any) -> dict[str, str]:
    """Returns the versions that torch was built with; builds of one torch version may differ."""
    versions = {"cuda": torch.version.cuda or "none", "hip": getattr(torch.version, "hip", None) or "none"}
    if torch.cuda.is_available() and versions["cuda"] != "none":
        versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        versions["cudnn"] = str(torch.backends.cudnn.version())
    return versions


def check_torch(torch: Any, engine: EngineConfig, gpus: list[GpuFound]) -> list[Check]:
    """Compares the GPUs that torch sees with the driver and the config."""
    if engine.device == "cpu" or not torch.cuda.is_available():
        return [_check_without_cuda(torch, engine.device, [] if engine.device == "cpu" else gpus)]
    name = torch.cuda.get_device_name(0)
    checks = [Check("torch", "pass", f"{torch.__version__} sees {torch.cuda.device_count()} x {name}")]
    try:
        # A build without code for this GPU is found by running a kernel only.
        torch.ones(8, device="cuda").sum().item()
    except RuntimeError as error:
        text = f"it sees a GPU and cannot run a kernel: {str(error).splitlines()[0]}"
        return [Check("torch", "fail", text, "install a torch that was built for this GPU and driver")]
    if engine.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        fix = "use engine.precision=fp16 with ZeRO 1 to 3, or fp32"
        checks.append(Check("bf16", "warn", f"{name} has no bf16 in hardware", fix))
    if not torch.backends.cuda.flash_sdp_enabled() or not torch.backends.cuda.is_flash_attention_available():
        text = "torch was built without its flash kernel: attention takes more memory and time"
        checks.append(Check("attention", "warn", text, "install an official build of torch"))
        return checks
    from pretrain.model.build import why_no_fa3

    reason = why_no_fa3(engine, torch.cuda.get_device_capability(0), dropout=False)
    text = f"FlashAttention 2 of torch: {reason}"
    if reason is None:
        text = "FlashAttention 3 of flash_attn_interface, but for models with dropout of attention weights"
    checks.append(Check("attention", "pass", text))
    return checks


def _check_without_cuda(torch: Any, device: str, gpus: list[GpuFound]) -> Check:
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    if gpus and built is None:
        gpu = f"{len(gpus)} x {gpus[0].name}"
        text = f"the driver lists {gpu}, and torch {torch.__version__} is a build for CPUs"
        return Check("torch", "fail", text, "install a CUDA build of torch")
    if gpus:
        text = f"built for CUDA {built}, and cannot use driver {gpus[0].driver}: no GPU is seen"
        fix = "load a newer driver, or a torch of an older CUDA; see CUDA_VISIBLE_DEVICES"
        return Check("torch", "fail", text, fix)
    if device == "cuda":
        text = f"{torch.__version__} sees no GPU, and engine.device=cuda"
        return Check("torch", "fail", text, "ask Slurm for GPUs, or use engine.device=auto")
    return Check("torch", "pass", f"{torch.__version__}, on the CPU ({platform.machine()})")
