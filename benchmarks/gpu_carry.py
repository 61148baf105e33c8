"""Wheels of the GPU campaign, for a machine that can download nothing.

The machine is expected to have CUDA's torch, transformers, accelerate, peft, tokenizers and pytest, and an x86-64
processor. DeepSpeed is published as source alone, from which a wheel without compiled operations is built: torch's own
optimizers are used.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.common import ROOT

MAX_BYTES = 64 * 2**20
"""Largest size of the wheels, which travel with the tree."""
BUILT = ("deepspeed",)
DOWNLOADED = (
    "annotated-types",
    "backports-zstd",
    "braceexpand",
    "colorama",
    "cut-cross-entropy",
    "hjson",
    "liger-kernel",
    "lxml",
    "portalocker",
    "pydantic",
    "pydantic-core",
    "sacrebleu",
    "sacremoses",
    "tabulate",
    "torchao",
    "typing-inspection",
    "webdataset",
)
"""Needs of pretrain and DeepSpeed that an image for machine learning lacks; two peers of the loss, Liger and Cut
Cross-Entropy; torchao, which FP8 needs; sacrebleu, which scores translations."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def carry(folder: Path, python: str) -> str:
    """Fills a folder with wheels for CPython `python` on Linux; returns what is in it and how to install it.

    Raises: SystemExit: A wheel could not be had, or they are more than `MAX_BYTES`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    locked = _locked_versions()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    downloaded = [_pinned(name, locked) for name in DOWNLOADED]
    _run([*pip, "download", "--no-deps", *target, "--dest", str(folder), *downloaded])
    built = [_pinned(name, locked) for name in BUILT]
    _run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), *built])
    files = sorted(folder.glob("*.whl"))
    num_bytes = sum(file.stat().st_size for file in files)
    if num_bytes > MAX_BYTES:
        raise SystemExit(f"{folder} has {num_bytes / 2**20:.0f} MiB, more than {MAX_BYTES / 2**20:.0f}")
    sizes = [f"{file.stat().st_size / 2**20:6.2f} MiB  {file.name}" for file in files]
    names = " ".join((*BUILT, *DOWNLOADED))
    install = f"python3 -m pip install --no-index --no-deps --find-links {folder} {names}"
    return "\n".join([*sizes, f"{num_bytes / 2**20:6.2f} MiB in all; there:", install])


def _locked_versions() -> dict[str, str]:
    """Returns the versions of the lock; of several for different Pythons the last."""
    lines = (ROOT / ".ci/constraints.txt").read_text().splitlines()
    return {match[1]: match[2] for line in lines if (match := re.match(r"([\w.-]+)==([\w.]+)", line))}


def _pinned(name: str, locked: dict[str, str]) -> str:
    return f"{name}=={locked[name]}" if name in locked else name


def _run(command: list[str]) -> None:
    done = subprocess.run(command, env={**os.environ, "DS_BUILD_OPS": "0"}, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}: {' '.join(command)}")
