"""Checks between ranks: rendezvous, equal versions, shared files, speed of an all-reduce.

    start_ranks   alone: N processes of this machine are started, and rank 0's findings come back
    meet          in a job of torchrun or srun: this process is a rank already

Over gloo on CPUs, over NCCL on GPUs. Every rank brings back the same findings.
"""

import os
import platform
import secrets
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
from pretrain.doctor.check import Check, Report, report_of, this_host
from pretrain.doctor.filesystem import nearest_folder
from pretrain.doctor.machine import GpuFound, ask_driver
from pretrain.doctor.spawn import run_ranks
from pretrain.doctor.versions import check_same, own_versions
from pretrain.errors import EXIT_DISK, LaunchError

MEET_WITHIN_S = 60.0

SEEN_WITHIN_S = 30.0

_BYTES = {"gloo": 2**24, "nccl": 2**28}

_REPEATS = 5


def meet(
    world: World, engine: EngineConfig | None, folder: Path, report: Report | None = None
) -> tuple[list[Check], list[Report]]:
    """Meets the other ranks and looks at what can be seen together. Collective.

    Args:
        world: Rank of this process; the environment has the address of rank 0.
        engine: Engine section of the config; None without a config.
        folder: Run folder, existing or not.
        report: Report of this host; None if another process of the host has it.

    Returns:
        What was found together, and the reports of all hosts; the same on every rank.

    Raises:
        LaunchError: torch cannot be imported, or the ranks do not meet within a minute.
    """
    torch = import_torch()
    device = pick_device(torch, engine)
    take_device(torch, world, device)
    gpus, _ = ask_driver() if world.local_rank == 0 and not (engine and engine.device == "cpu") else ([], "")
    own = check_torch(torch, engine, gpus)
    took = start_group(torch, world, device)
    facts = {
        "host": this_host(),
        "versions": own_versions() | build_versions(torch),
        "checks": [asdict(check) for check in own],
        "took": took,
        "report": asdict(report) if report else None,
    }
    all_facts = dist.gather_objects(facts)
    hosts = [(one["host"], one["versions"]) for one in all_facts]
    checks = _worst_of([(one["host"], [Check(**check) for check in one["checks"]]) for one in all_facts])
    slowest = max(one["took"] for one in all_facts)
    text = f"{world.size} rank{'s' if world.size > 1 else ''} met in {slowest:.1f} s"
    checks += [Check("rendezvous", "pass", text), check_same(hosts), _check_seen(world, folder)]
    if world.size > 1:
        checks.append(_check_all_reduce(torch, world, device, len({host for host, _ in hosts})))
    torch.distributed.destroy_process_group()
    return checks, [report_of(one["report"]) for one in all_facts if one["report"]]


def pick_device(torch: Any, engine: EngineConfig | None) -> str:
    """Returns `cuda` or `cpu`, as the engine would take it where both are there."""
    return "cpu" if (engine and engine.device == "cpu") or not torch.cuda.is_available() else "cuda"


def take_device(torch: Any, world: World, device: str) -> None:
    """Makes a GPU this rank's, before anything is on another's."""
    if device == "cuda":
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())


def _worst_of(found: list[tuple[str, list[Check]]]) -> list[Check]:
    """Merges the checks of ranks: of each name the worst, with the host that it is of; equal ones appear once."""
    order = {"fail": 0, "warn": 1, "pass": 2}
    merged: dict[str, Check] = {}
    for host, checks in found:
        for check in checks:
            known = merged.get(check.name)
            if known is None or order[check.status] < order[known.status]:
                detail = check.detail if check.status == "pass" else f"{host}: {check.detail}"
                merged[check.name] = Check(check.name, check.status, detail, check.fix, check.exit_code)
    return list(merged.values())


def start_group(torch: Any, world: World, device: str) -> float:
    """Sets up the process group; returns the seconds. Raises: LaunchError, which names who could not reach what."""
    begun = time.monotonic()
    backend = "nccl" if device == "cuda" else "gloo"
    try:
        torch.distributed.init_process_group(
            backend, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=MEET_WITHIN_S)
        )
        torch.distributed.barrier()
    except (torch.distributed.DistError, RuntimeError, OSError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LaunchError(
            f"rank {world.rank} on {this_host()} cannot meet the others at {address}: {str(error).splitlines()[0]}",
            fix="see that every node reaches that address and port, and set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME",
        ) from error
    return time.monotonic() - begun


def _check_seen(world: World, folder: Path) -> Check:
    """Has rank 0 make a file beside the run folder, and every other rank wait until it is there."""
    where = nearest_folder(folder)
    name = dist.broadcast_object(secrets.token_hex(6) if world.is_main else None)
    probe, problem = where / f".doctor-{name}", ""
    if world.is_main:
        try:
            probe.write_text(name, encoding="ascii")
        except OSError as error:
            problem = f"{where} cannot be written: {error.strerror}"
    problem = dist.broadcast_object(problem)
    begun, is_seen = time.monotonic(), False
    while not problem and not is_seen and time.monotonic() - begun < SEEN_WITHIN_S:
        with suppress(OSError):
            is_seen = probe.read_text(encoding="ascii") == name
        if not is_seen:
            time.sleep(0.05)
    seen = dist.gather_objects(
        {"host": this_host(), "s": time.monotonic() - begun, "is_seen": is_seen, "at": str(where)}
    )
    if world.is_main:
        probe.unlink(missing_ok=True)
    fix = "set run.dir to a folder that every node sees under the same path"
    if problem:
        return Check("shared folder", "fail", problem, fix, EXIT_DISK)
    blind = [one for one in seen if not one["is_seen"]]
    if blind:
        text = f"{blind[0]['host']} does not see in {blind[0]['at']} what rank 0 made in {seen[0]['at']}"
        return Check("shared folder", "fail", text, fix, EXIT_DISK)
    latest = max(seen, key=lambda one: float(one["s"]))
    return Check("shared folder", "pass", f"a file of rank 0 is seen by all within {latest['s']:.2f} s")


def all_reduce_speed(torch: Any, world: World, device: str, num_bytes: int) -> float:
    """Returns the bus bandwidth of a sum over all ranks, bytes a second: 2 (n - 1) / n of its size pass each link.

    Args:
        torch: The module.
        world: Ranks.
        device: `cuda` or `cpu`.
        num_bytes: Size of the tensor.
    """
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


def _check_all_reduce(torch: Any, world: World, device: str, num_hosts: int) -> Check:
    backend = "nccl" if device == "cuda" else "gloo"
    speed = all_reduce_speed(torch, world, device, _BYTES[backend])
    where = f"{world.size} ranks on {num_hosts} host{'s' if num_hosts > 1 else ''}"
    return Check("all-reduce", "pass", f"{speed / 1e9:.2f} GB/s a rank over {backend}, {where}")


def meet_task(world: World, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Is `meet` for a rank that `run_ranks` has started."""
    engine = EngineConfig(**arguments["engine"]) if arguments["engine"] else None
    checks, _ = meet(world, engine, Path(arguments["folder"]))
    return [asdict(check) for check in checks]


def start_ranks(num_ranks: int, engine: EngineConfig | None, folder: Path) -> list[Check]:
    """Starts ranks on this machine that meet; returns what they have found."""
    arguments = {"engine": engine.model_dump(mode="json") if engine else None, "folder": str(folder)}
    try:
        return [
            Check(**one)
            for one in run_ranks("pretrain.doctor.rank_checks:meet_task", num_ranks, arguments, 3 * MEET_WITHIN_S)
        ]
    except LaunchError as error:
        fix = error.fix or "run `pretrain doctor` with --ranks 1, and see whether torch works"
        return [Check("rendezvous", "fail", error.what, fix)]


def import_torch() -> Any:
    """Returns the module. Raises: LaunchError where it cannot be imported, with what it says."""
    try:
        import torch
    except (ImportError, OSError) as error:  # a library of CUDA that is missing is an OSError
        raise LaunchError(
            f"torch cannot be imported: {error}", fix="install it anew; a CUDA build needs the libraries of its wheel"
        ) from None
    return torch


def build_versions(torch: Any) -> dict[str, str]:
    """Returns the versions of what torch was built with, which may differ where its own version does not."""
    found = {"cuda": torch.version.cuda or "none", "hip": getattr(torch.version, "hip", None) or "none"}
    if torch.cuda.is_available() and found["cuda"] != "none":
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def check_torch(torch: Any, engine: EngineConfig | None, gpus: list[GpuFound]) -> list[Check]:
    """Compares what torch sees with what the driver lists and the config asks for.

    Args:
        torch: The module.
        engine: Engine section of the config; None without a config.
        gpus: That the driver lists.
    """
    device = engine.device if engine else "auto"
    if device == "cpu":
        return [Check("torch", "pass", f"{torch.__version__}, on the CPU ({platform.machine()})")]
    if not torch.cuda.is_available():
        return [_without_cuda(torch, device, gpus)]
    count = torch.cuda.device_count()
    checks = [Check("torch", "pass", f"{torch.__version__} sees {count} x {torch.cuda.get_device_name(0)}")]
    try:
        # A kernel: a build without code for this GPU is found here, and not by any question.
        torch.ones(8, device="cuda").sum().item()
    except RuntimeError as error:
        text = f"it sees a GPU and cannot run a kernel: {str(error).splitlines()[0]}"
        checks = [Check("torch", "fail", text, "install a torch that was built for this GPU and driver")]
    else:
        if engine and engine.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            text = f"{torch.cuda.get_device_name(0)} has no bf16 in hardware"
            checks.append(Check("bf16", "warn", text, "use engine.precision=fp16 with ZeRO 1 to 3, or fp32"))
        if not torch.backends.cuda.flash_sdp_enabled() or not torch.backends.cuda.is_flash_attention_available():
            text = "torch was built without its flash kernel: attention takes more memory and time"
            checks.append(Check("attention", "warn", text, "install an official build of torch"))
    return checks


def _without_cuda(torch: Any, device: str, gpus: list[GpuFound]) -> Check:
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    if gpus and built is None:
        text = f"the driver lists {len(gpus)} x {gpus[0].name}, and torch {torch.__version__} is a build for CPUs"
        return Check("torch", "fail", text, "install a CUDA build of torch")
    if gpus:
        text = f"built for CUDA {built}, and cannot use driver {gpus[0].driver}: no GPU is seen"
        return Check(
            "torch", "fail", text, "load a newer driver, or a torch of an older CUDA; see CUDA_VISIBLE_DEVICES"
        )
    if device == "cuda":
        text = f"{torch.__version__} sees no GPU, and engine.device=cuda"
        return Check("torch", "fail", text, "ask Slurm for GPUs, or use engine.device=auto")
    return Check("torch", "pass", f"{torch.__version__}, on the CPU ({platform.machine()})")
