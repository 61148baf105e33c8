"""CPU seconds and memory of what a start or a report costs behind a long history, or with many shards or sources.

    python -m benchmarks.history [--rounds 5] [--before FOLDER] [--only ledger index ...]

Each operation runs in a process of its own, which has imported its module before; `--before` is a checkout of another
commit, whose arm runs in turn. CPU time of the operation, user and system; memory is the peak of the process above its
size before the operation. Medians of rounds. Inputs are generated, and lie in the page cache. Linux only.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from itertools import islice
from pathlib import Path

from benchmarks.common import ROOT, print_row
from pretrain.checkpoint.fragments import write_pieces
from pretrain.kinds.layouts import LAYOUTS
from pretrain.shards.index import DataIndex, ShardIndex, Sidecar, build_split, write_index

KINDS = ("weight", "exp_avg", "exp_avg_sq")
NUM_STEPS = 1_000_000
ENDINGS = {".idx.npy": LAYOUTS["text"].table_columns, ".lengths.npy": LAYOUTS["text"].length_columns}
MEASURED = """
import sys, time
from pathlib import Path
folder = Path({folder!r})
{imports}
def size(name):
    text = Path("/proc/self/status").read_text()
    return int(text.split(name + ":")[1].split()[0]) / 1024
Path("/proc/self/clear_refs").write_text("5")
size_mb, begun = size("VmRSS"), time.process_time()
{operation}
print(time.process_time() - begun, size("VmHWM") - size_mb)
"""
REWIND = ("from pretrain.utils.jsonl import JsonLines", "JsonLines(folder / {!r}).rewind(999_990)")
REPORT = ("from pretrain.cli.commands import run", "run(['report', str(folder / {!r}), '--output', '/dev/null'])")
OPERATIONS = {
    "ledger": (REWIND[0], REWIND[1].format("audit.jsonl")),
    "metrics": (REWIND[0], REWIND[1].format("metrics.jsonl")),
    "evaluations": (
        "from pretrain.training.claim import recall_evaluations; from pretrain.run.folder import RunDir\n"
        "class Checkpoints:\n    def note_evaluation(self, *_): pass",
        "recall_evaluations(Checkpoints(), 'val_loss', RunDir(folder))",
    ),
    "mixture": (
        "from pretrain.data.mixture import MixtureOrder",
        "MixtureOrder([(0, [0.002654, 0.006215, 0.009128, 0.009159, 0.014316, 0.016969, 0.018471, 0.019878, 0.023466,"
        " 0.025248, 0.026538, 0.027563, 0.031235, 0.031846, 0.033076, 0.033507, 0.038233, 0.049533, 0.049674,"
        " 0.533291])]).pick(range(512))",
    ),
    "headers": (
        "from pretrain.checkpoint.fragments import FragmentReader; import inspect, torch\n"
        "place = [0.5] if 'place' in inspect.signature(FragmentReader).parameters else []",
        "reader = FragmentReader(sorted((folder / 'ranks').iterdir()), *place)\n"
        "for number in range(483):\n    for kind in ('weight', 'exp_avg', 'exp_avg_sq'):\n"
        "        reader.read_into(f'layers.{number}.mlp.up.weight', kind, 512, torch.empty(1))",
    ),
    "report of 100,000": (REPORT[0], REPORT[1].format("short")),
    "report of 1,000,000": (REPORT[0], REPORT[1].format("long")),
    "index": ("from pretrain.shards.index import load_index", "load_index(folder)"),
}


def ledger_rows() -> Iterator[dict]:
    """Yields the rows of a ledger."""
    for step in range(1, NUM_STEPS + 1):
        floats = {"loss": (3 + 1 / step).hex(), "grad_norm": (1 / step).hex()}
        yield {"step": step, "tokens": 65536, "digest": f"{step * 7919:016x}", **floats, "attempt": 1}


def metrics_rows() -> Iterator[dict]:
    """Yields rows of metrics, of 19 numbers and 450 bytes as a run has them, and an evaluation every thousand steps."""
    names = ("accuracy", "skipped_steps", "epochs", "tokens_per_s", "step_time_s", "data_wait", "eta_s", "memory_bytes")
    parts = ("data_s", "forward_s", "backward_s", "optimizer_s", "evaluation_s", "other_s")
    for step in range(1, NUM_STEPS + 1):
        row = {"step": step, "loss": 3 + 1 / step, "lr": 3e-4 / step, "grad_norm": 1 / step, "tokens": step * 65536.0}
        yield row | dict.fromkeys((*names, *parts), 1 / (step + 7))
        if step % 1000 == 0:
            yield {"step": step, "val_loss": 3 + 1 / step, "val_bpb": 1 + 1 / step}


def write_inputs(folder: Path) -> None:
    """Writes the files of all operations."""
    for name, rows in (("audit.jsonl", ledger_rows()), ("metrics.jsonl", metrics_rows())):
        with (folder / name).open("w") as file:
            file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    for name, num_rows in (("short", 100_000), ("long", NUM_STEPS)):
        (folder / name).mkdir()
        with (folder / "metrics.jsonl").open("rb") as file:
            (folder / name / "metrics.jsonl").write_bytes(b"".join(islice(file, num_rows)))
        attempt = {"number": 1, "started": "2026-03-01T08:00:00+00:00", "from_step": 0}
        record = {"id": "1a2b3c4d", "name": name, "created": attempt["started"], "attempts": [attempt]}
        (folder / name / "run.json").write_text(json.dumps(record))
        (folder / name / "config.yaml").write_text("seed: 1\n")
    (folder / "ranks").mkdir()
    for rank in range(1024):
        kinds = [f"layers.{number}.mlp.up.weight/{kind}@{rank}" for number in range(483) for kind in KINDS]
        parts = [memoryview(bytes(4 * len(kinds)))]
        write_pieces(folder / "ranks" / f"rank-{rank:05d}.safetensors", [(kind, 1) for kind in kinds], parts)
    shards = []
    for number in range(20_000):
        name = f"train/part-{number // 100:05d}-{number % 100:05d}"
        digest = sha256(name.encode()).hexdigest()
        sidecars = [Sidecar(f"{name}{end}", number * 7919, columns) for end, columns in ENDINGS.items()]
        shards.append(ShardIndex(f"{name}.tar", 10**9 + number, digest, 5 * 10**8 + number, 10**6, 1000, *sidecars))
    splits = {"train": build_split(shards, 2 * 10**13)}
    write_index(folder, DataIndex(sha256().hexdigest(), 50_257, "uint16", 0, splits))


def measure(tree: Path, folder: Path, name: str) -> tuple[float, float]:
    """Returns CPU seconds and MiB of an operation of a tree, over a copy of the file that it changes."""
    for file in folder.glob(f"{name if name == 'metrics' else 'audit'}.jsonl"):
        work = folder / "work"
        work.mkdir(exist_ok=True)
        shutil.copyfile(file, work / file.name)
    imports, operation = OPERATIONS[name]
    where = folder / "work" if name in ("ledger", "metrics") else folder
    code = MEASURED.format(folder=str(where), imports=imports, operation=operation)
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'launch'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    cpu_s, size_mb = map(float, done.stdout.splitlines()[-1].split())
    return cpu_s, size_mb


def main() -> None:
    """Measures, and prints a row an operation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--only", nargs="+", default=list(OPERATIONS))
    asked = parser.parse_args()
    trees = {"ours": ROOT} | ({"before": asked.before.resolve()} if asked.before else {})
    with tempfile.TemporaryDirectory(prefix="pretrain-history-") as folder:
        write_inputs(Path(folder))
        for name in asked.only:
            runs: dict[str, list[tuple[float, float]]] = {arm: [] for arm in trees}
            for _ in range(asked.rounds):
                for arm, tree in trees.items():
                    runs[arm].append(measure(tree, Path(folder), name))
            figures = {}
            for arm, pairs in runs.items():
                cpu_s, size_mb = zip(*pairs, strict=True)
                figures |= {f"{arm}_cpu_s": round(statistics.median(cpu_s), 4), f"{arm}_all": cpu_s}
                figures |= {f"{arm}_mb": round(statistics.median(size_mb), 1)}
            print_row(f"cost of {name}", figures, ("torch", "numpy"))


if __name__ == "__main__":
    main()
