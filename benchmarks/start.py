"""CPU seconds until a command does what it is asked for: training its first step, an answer, the help.

    python -m benchmarks.start [--rounds 5] [--before FOLDER] [--only train launch2 ...]

User and system time of all processes of a command, those included that leave its session; the model has 0.4M
parameters, so that a start is all of it. A training counts up to its first row in the ledger, and is killed then;
other commands count whole. `--before` is a checkout of another commit, whose arm runs in turn with that of this tree.
Medians of rounds, and modules of all processes together, counted once by `-X importtime`. Linux only.
"""

import argparse
import ctypes
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.common import ROOT, print_row

PR_SET_CHILD_SUBREAPER = 36
CONFIG = """
run: {dir: RUNS, name: start}
data: {path: DATA}
model: {preset: llama-tiny}
objective: {kind: causal}
batch: {global_tokens: 1024, seq_len: 64, micro: 4}
optim: {kind: adamw, lr: 1e-3}
train: {steps: 1000}
engine: {kind: single, zero_stage: 0, precision: fp32, device: cpu}
checkpoint: {every_steps: 2}
"""
ZERO = ["engine.kind=deepspeed", "engine.zero_stage=2"]
TRAININGS = {
    "train": ["train", "CONFIG"],
    "deepspeed": ["train", "CONFIG", *ZERO],
    "launch2": ["launch", "local", "CONFIG", *ZERO, "--ranks", "2"],
    "launch4": ["launch", "local", "CONFIG", *ZERO, "--ranks", "4"],
    "launch2 resumed": ["launch", "local", "CONFIG", *ZERO, "--ranks", "2"],
}
ANSWERS = {
    "help": ["--help"],
    "generate": ["generate", "MODEL", "--prompt", "def", "--max-tokens", "16"],
    "evaluate": ["evaluate", "MODEL"],
}


def descendants(pid: int) -> list[int]:
    """Returns the processes below one, orphans among them: this process adopts them."""
    found, waiting = [], [pid]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with suppress(OSError):
                waiting += map(int, task.read_text().split())
        found = list(dict.fromkeys([*found, *waiting]))
    return found


def cpu_s(pids: list[int]) -> float:
    """Returns the CPU time of processes and of their children that have ended."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def reap() -> None:
    """Waits for every process that is left."""
    with suppress(ChildProcessError):
        while True:
            os.wait()


class Arm:
    """The commands of one tree."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self._folder = folder
        self._runs, self._model, self._log = folder / "runs", folder / "model", folder / "log"
        self._config = folder / "start.yaml"
        self._config.write_text(CONFIG.replace("RUNS", str(self._runs)).replace("DATA", str(folder.parent / "data")))
        path = os.pathsep.join([str(tree), str(tree / "launch")])
        self._environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"}
        self._environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        saved = [f"run.dir={self._model}", "train.steps=4"]
        subprocess.run(self._command(["train", "CONFIG", *saved]), check=True, **self._options())
        reap()

    def _command(self, words: list[str], *options: str) -> list[str]:
        places = {"CONFIG": str(self._config), "MODEL": str(self._model / "start")}
        return [sys.executable, *options, "-m", "pretrain", *(places.get(word, word) for word in words)]

    def _options(self) -> dict:
        log = self._log.open("w")
        return {
            "env": self._environment,
            "cwd": self._folder,
            "stdin": subprocess.DEVNULL,
            "stdout": log,
            "stderr": log,
        }

    def measure(self, name: str) -> float:
        """Returns the CPU seconds of a command."""
        if name in ANSWERS:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(self._command(ANSWERS[name]), check=True, **self._options())
            reap()
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        shutil.rmtree(self._runs, ignore_errors=True)
        if "resumed" in name:
            words = [*TRAININGS[name], "train.stop_after=4"]
            subprocess.run(self._command(words), check=True, **self._options())
            reap()
        return self._until_first_step(self._command(TRAININGS[name]))

    def _until_first_step(self, command: list[str]) -> float:
        ledger = self._runs / "start" / "audit.jsonl"
        rows = ledger.read_bytes().count(b"\n") if ledger.exists() else 0
        process = subprocess.Popen(command, **self._options())
        while not (ledger.exists() and ledger.read_bytes().count(b"\n") > rows):
            if process.poll() is not None:
                raise SystemExit(f"{command} ended without a step:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.005)
        found = descendants(os.getpid())
        spent = cpu_s(found)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        return spent

    def count_modules(self, name: str) -> int:
        """Returns the modules that all processes of a command import, of a training up to its first step."""
        if name in ANSWERS:
            subprocess.run(self._command(ANSWERS[name], "-X", "importtime"), check=True, **self._options())
        else:
            self._environment["PYTHONPROFILEIMPORTTIME"] = "1"
            self._until_first_step(self._command(TRAININGS[name]))
            del self._environment["PYTHONPROFILEIMPORTTIME"]
        reap()
        logs = [self._log, *(self._runs / "start" / "logs").glob("*.out")]
        return sum(path.read_text(errors="replace").count("import time:") for path in logs if path.exists())


def main() -> None:
    """Measures, and prints a row a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--only", nargs="+", default=[*ANSWERS, *TRAININGS])
    asked = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    trees = {"ours": ROOT} | ({"before": asked.before.resolve()} if asked.before else {})
    with tempfile.TemporaryDirectory(prefix="pretrain-start-") as folder:
        texts = sorted(str(path) for path in (ROOT / "docs").glob("*.md"))
        words = ["prepare", *texts, "--output", f"{folder}/data", "--vocab-size", "512", "--split", "tail:0.02"]
        subprocess.run([sys.executable, "-m", "pretrain", *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        arms = {}
        for name, tree in trees.items():
            (Path(folder) / name).mkdir()
            arms[name] = Arm(tree, Path(folder) / name)
        for command in asked.only:
            spent: dict[str, list[float]] = {name: [] for name in arms}
            for _ in range(asked.rounds):
                for name, arm in arms.items():
                    spent[name].append(arm.measure(command))
            figures = {f"{name}_cpu_s": round(statistics.median(values), 2) for name, values in spent.items()}
            figures |= {f"{name}_all": [round(value, 2) for value in values] for name, values in spent.items()}
            if "resumed" not in command:
                figures |= {f"{name}_modules": arm.count_modules(command) for name, arm in arms.items()}
            print_row(f"start of {command}", figures, ("torch", "deepspeed"))


if __name__ == "__main__":
    main()
