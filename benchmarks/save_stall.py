"""Stall of training by a save to a slow disk: a real run with a model of hundreds of millions of parameters.

    python -m benchmarks.save_stall [--layers 16] [--rates 0 1 0.2] [--rounds 2]

`pretrain train` with one process on a CPU and a LLaMA of width 1,024; a save every six steps. Each arm writes its files
at so many GB/s at most (0: as the disk does), by a thread that sleeps in place of the disk: blocked, as in `write`.
Reported of each save: the wait of the step and the seconds until it is committed, by the run itself; and the CPU time
of the thread that steps, in beginning it and in waiting for its copy before the next update. Beside them: a copy of as
many bytes in memory. Arms in turn; a wait that grows as the rate falls is the disk's.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, print_row

EVERY = 6
CONFIG = """
run: {dir: RUNS, name: big}
data: {path: DATA}
model:
  preset: llama-tiny
  max_seq_len: 64
  decoder: {layers: LAYERS, width: 1024, heads: 16, kv_heads: 16, ff_width: 2752}
objective: {kind: causal}
batch: {global_tokens: 64, seq_len: 64, micro: 1}
optim: {kind: adamw, lr: 1e-4, schedule: {warmup_steps: 1}}
train: {steps: STEPS}
engine: {kind: single, zero_stage: 0, precision: fp32, device: cpu}
checkpoint: {every_steps: EVERY, keep: 2}
tracking: {wandb: "off", log_every_steps: 1}
extend: [slow_disk]
"""
SLOW_DISK = """
import os, time
from pretrain.training.saving import Saving
from pretrain.utils.io import set_fault_hook

RATE, begun = 1e9 * float(os.environ["DISK_GB_S"]), {}


def wait(operation, path):
    if path.suffix != ".safetensors":
        return
    if operation == "open":
        begun[path] = time.monotonic()
    elif RATE and path in begun:
        time.sleep(max(0.0, begun[path] + path.stat().st_size / RATE - time.monotonic()))


def timed(method):
    def call(*args, **options):
        before = time.thread_time()
        try:
            return method(*args, **options)
        finally:
            spent = time.thread_time() - before
            with open(os.environ["SPENT"], "a") as file:
                file.write(f"{method.__name__} {spent}\\n")

    return call


set_fault_hook(wait)
Saving._begin, Saving.before_update = timed(Saving._begin), timed(Saving.before_update)
"""


def time_copy(num_bytes: int) -> tuple[float, float]:
    """Returns wall and CPU seconds of a copy of so many bytes to memory that is there, by one thread."""
    torch.set_num_threads(1)
    source, target = torch.ones(num_bytes // 8), torch.ones(num_bytes // 8)
    begun, cpu = time.perf_counter(), time.thread_time()
    for _ in range(2):
        target.copy_(source)
    return time.perf_counter() - begun, time.thread_time() - cpu


def run_arm(folder: Path, rate: float) -> dict[str, Any]:
    """Trains once; returns the figures of its saves and steps."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    spent = folder / f"spent-{time.time_ns()}"
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "DISK_GB_S": str(rate)}
    environment["SPENT"] = str(spent)
    command = [sys.executable, "-m", "pretrain", "train", str(folder / "big.yaml"), f"run.name=big-{time.time_ns()}"]
    subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    run = max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    saves = [row for row in rows if "checkpoint_stall_s" in row]
    manifest = next((run / "checkpoints").glob("step-*"))
    num_bytes = sum(path.stat().st_size for path in manifest.glob("*.safetensors"))
    shutil.rmtree(run)
    cpu = [line.split() for line in spent.read_text().splitlines()]
    return {
        "cpu_s": round(sum(float(seconds) for _, seconds in cpu) / max(1, sum(name == "_begin" for name, _ in cpu)), 4),
        "stall_s": [round(row["checkpoint_stall_s"], 3) for row in saves],
        "write_s": [round(row["checkpoint_write_s"], 2) for row in saves],
        "num_bytes": num_bytes,
    }


def main() -> None:
    """Measures, and prints a row an arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 1.0, 0.2])
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pretrain-save-") as name:
        folder = Path(name)
        texts = sorted(str(path) for path in (ROOT / "docs").glob("*.md"))
        words = ["prepare", *texts, "--output", f"{folder}/data", "--vocab-size", "512", "--split", "tail:0.02"]
        subprocess.run([sys.executable, "-m", "pretrain", *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        (folder / "slow_disk.py").write_text(SLOW_DISK)
        values = {"RUNS": folder / "runs", "DATA": folder / "data", "LAYERS": asked.layers, "EVERY": EVERY}
        text = CONFIG.replace("STEPS", str(2 * EVERY + 1))
        for key, value in values.items():
            text = text.replace(key, str(value))
        (folder / "big.yaml").write_text(text)
        arms: dict[float, list[dict[str, Any]]] = {rate: [] for rate in asked.rates}
        for _ in range(asked.rounds):
            for rate in asked.rates:
                arms[rate].append(run_arm(folder, rate))
        num_bytes = arms[asked.rates[0]][0]["num_bytes"]
        copy_wall, copy_cpu = time_copy(num_bytes)
    for rate, rounds in arms.items():
        # The first save of a run allocates the copy's memory, unless its thread was faster.
        stalls = [value for one in rounds for value in one["stall_s"]]
        writes = [value for one in rounds for value in one["write_s"]]
        figures = {"gb_s": rate or "the disk's", "num_bytes": num_bytes, "stalls_s": stalls, "writes_s": writes}
        figures |= {"stall_s": statistics.median(stalls), "write_s": statistics.median(writes)}
        figures["stall_cpu_s"] = [one["cpu_s"] for one in rounds]
        print_row("stall by a save", figures | {"copy_s": copy_wall, "copy_cpu_s": copy_cpu}, ("torch",))


if __name__ == "__main__":
    main()
