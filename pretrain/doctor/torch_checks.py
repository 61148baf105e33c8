"""What torch makes of the machine: whether it can be imported, sees the GPUs, and what it was built with."""

import platform
from typing import Any

from pretrain.config.engine import EngineConfig
from pretrain.doctor.check import Check
from pretrain.doctor.machine import GpuFound
from pretrain.errors import LaunchError


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
        engine: Of the config; None: there is none.
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
