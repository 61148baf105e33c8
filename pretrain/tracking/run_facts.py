"""Facts of a run for Weights & Biases, besides its config: code, machine, job and data.

Collected in the tracker's thread, so that a slow `git` or disk delays no step. Nothing here may
fail: unknown facts are left out.
"""

import contextlib
import logging
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from pretrain import __version__
from pretrain.shards.dataset import Dataset

SLURM_NAMES = (
    *("JOB_ID", "JOB_NAME", "JOB_PARTITION", "JOB_ACCOUNT", "JOB_QOS", "JOB_NUM_NODES", "JOB_NODELIST"),
    *("CLUSTER_NAME", "NTASKS", "RESTART_COUNT", "ARRAY_JOB_ID", "ARRAY_TASK_ID"),
)
_MAX_CARD_CHARACTERS = 20_000
_GIT_S = 10.0

logger = logging.getLogger(__name__)


def find_facts(dataset: Dataset, num_ranks: int) -> dict[str, Any]:
    """Returns `code`, `machine`, `slurm` (under it) and `data_card`, for the run's config."""
    slurm = slurm_variables()
    machine = machine_facts() | {"ranks": num_ranks}
    facts = {"code": code_facts(Path(__file__).parent), "machine": machine}
    return facts | ({"slurm": slurm} if slurm else {}) | {"data_card": data_facts(dataset)}


def code_facts(folder: Path) -> dict[str, Any]:
    """Returns the version; in a git checkout also the commit, and whether files were changed."""
    facts: dict[str, Any] = {"version": __version__}
    try:
        facts["commit"] = _git(folder, "rev-parse", "HEAD")
        facts["dirty"] = bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("no commit: %s: %s", error, getattr(error, "stderr", None) or "")
    return facts


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_GIT_S, check=True)
    return done.stdout.strip()


def machine_facts() -> dict[str, Any]:
    """Returns host, cores, memory, and the GPUs of this node."""
    facts: dict[str, Any] = {"host": platform.node(), "system": platform.platform(), "cores": os.cpu_count()}
    with contextlib.suppress(OSError, ValueError):  # not every system tells
        facts["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        facts["gpus"] = [torch.cuda.get_device_properties(number).name for number in range(count)]
        facts["gpu_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
        facts["cuda"] = torch.version.cuda
    return facts


def numeric_facts(device: torch.device) -> dict[str, Any]:
    """Returns the hardware and settings, besides versions, on which the last bits of a sum depend."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return {"device": name, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    isa = torch.backends.cpu.get_cpu_capability()
    return {"device": _processor(), "isa": isa, "threads": torch.get_num_threads()}


def _processor() -> str:
    """Returns the name of the processor, as Linux has it."""
    with contextlib.suppress(OSError, IndexError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return names[0]
    return platform.processor() or platform.machine()


def slurm_variables() -> dict[str, str]:
    """Returns the variables of the Slurm job, by name in lower case; none outside of one."""
    values = {name.lower(): os.environ.get(f"SLURM_{name}") for name in SLURM_NAMES}
    return {name: value for name, value in values.items() if value is not None}


def data_facts(dataset: Dataset) -> dict[str, Any]:
    """Returns size by split, identity and data card (if any) of each source."""
    sources: dict[str, Any] = {}
    for source in dataset.sources:
        splits = {
            name: {"tokens": split.num_tokens, "documents": split.num_documents, "shards": len(split.shards)}
            for name, split in source.index.splits.items()
        }
        sources[source.name] = {"kind": source.index.kind, "vocab_size": source.index.vocab_size, **splits}
        with contextlib.suppress(OSError, UnicodeDecodeError):  # old versions, servers: no card
            card = (source.folder / "data_card.md").read_text(encoding="utf-8")
            sources[source.name]["card"] = card[:_MAX_CARD_CHARACTERS]
    return {"sha256": dataset.sha256, "tokenizer": dataset.index.tokenizer_sha256, "sources": sources}
