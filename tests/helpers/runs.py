"""Starts runs of a tiny model through the real command line, stops and kills them, and compares what they leave."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open

from pretrain.checkpoint.format import list_checkpoints
from pretrain.run.folder import RunDir
from pretrain.tracking.audit import compare, read_audit
from pretrain.utils.process import rank_of_process
from tests.helpers.fork_server import ROOT, SOURCE_PATH
from tests.helpers.waiting import finish, wait_until
from tests.helpers.warm_jobs import WarmJob, start_warm

CONFIG = """
seed: 7
run: {{dir: {runs}, name: run}}
data: {{path: {data}, lanes: 3, block_samples: 16}}
model:
  preset: llama-tiny
  max_seq_len: 32
  decoder: {{width: 32, heads: 4, kv_heads: 2, ff_width: 48, dropout: 0.1}}
batch: {{global_tokens: 384, seq_len: 32, micro: 2}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 5}}}}
train: {{steps: 160}}
engine: {{kind: deepspeed, zero_stage: 2, precision: fp32, device: cpu}}
checkpoint: {{every_steps: 20}}
tracking: {{log_every_steps: 10, wandb: off}}
"""


class RunMaker:
    """Runs that share a config and differ in their run folder."""

    def __init__(self, folder: Path, data: Path, template: str = CONFIG) -> None:
        self._folder, self._data, self._template = folder, data, template

    def config(self, name: str = "runs") -> Path:
        """Writes a config whose run folder is `name/run`."""
        path = self._folder / f"{name}.yaml"
        path.write_text(self._template.format(runs=self._folder / name, data=self._data))
        return path

    def folder(self, name: str = "runs") -> RunDir:
        """The run folder of `name`."""
        return RunDir(self._folder / name / "run")

    def start(
        self, name: str, *overrides: str, ranks: int = 2, launcher: list[str] | None = None, **env: str
    ) -> subprocess.Popen[str]:
        """Starts a run; its output is in `stdout` of the process."""
        command = launcher or [sys.executable, "-m", "pretrain", "launch", "local", "--ranks", str(ranks)]
        path = [env.get("PYTHONPATH", ""), SOURCE_PATH]
        return subprocess.Popen(
            [*command, str(self.config(name)), *overrides],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env, "PYTHONPATH": os.pathsep.join(path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def complete(self, name: str, *overrides: str, expect: int = 0, **options: object) -> str:
        """Runs to the end; returns the output."""
        process = self.start(name, *overrides, **options)  # type: ignore[arg-type]
        try:
            output, _ = finish(process)
        finally:
            process.kill()  # ranks end with their launcher: one that hangs must not slow down the other tests
        assert process.returncode == expect, f"exit code {process.returncode}, not {expect}:\n{output[-5000:]}"
        return output

    def start_warm(self, name: str, *overrides: str, ranks: int = 2, **env: str) -> WarmJob:
        """Starts the ranks of a run without a launcher, in forks that have imported torch."""
        arguments = ("train", str(self.config(name)), *overrides)
        return start_warm(*arguments, cwd=ROOT, output=self._folder / f"{name}-output", ranks=ranks, **env)

    def train(self, name: str, *overrides: str, expect: int = 0, **options: object) -> str:
        """Runs to the end as `start_warm` does, where no launcher is looked at; returns what all ranks print."""
        job = self.start_warm(name, *overrides, **options)  # type: ignore[arg-type]
        code = job.end()
        assert code == expect, f"exit code {code}, not {expect}:\n{job.output()[-8000:]}"
        return job.output()

    def wait_for_step(self, name: str, step: int, process: subprocess.Popen[str], after_attempt: int = 0) -> None:
        """Waits until an attempt later than `after_attempt` has written `step` to the ledger."""

        def is_written() -> bool:
            last = self.last_row(name)
            return last["step"] >= step and last["attempt"] > after_attempt

        wait_until(is_written, f"step {step} is written", process, say=lambda: _output_of(process))

    def last_row(self, name: str) -> dict[str, int]:
        """The last whole row of the ledger, as it is now; zeros where there is none."""
        audit = self.folder(name).audit
        lines = audit.read_bytes().splitlines(keepends=True) if audit.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        return json.loads(whole[-1]) if whole else {"step": 0, "attempt": 0}


def _output_of(process: subprocess.Popen[str]) -> str:
    """The output of a process, if it has ended."""
    return process.communicate()[0][-5000:] if process.poll() is not None else ""


def rank_pids(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """Process id of each rank of a launcher; none where that is gone."""
    found = {}
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    for child in children.read_text().split() if children.exists() else ():
        if (rank := rank_of_process(int(child))) is not None:
            found[rank] = int(child)
    return found


def kill_rank(launcher: subprocess.Popen[str], rank: int, number: int = signal.SIGKILL) -> None:
    """Kills a rank, as soon as there is one."""
    pid = wait_until(lambda: rank_pids(launcher).get(rank), f"there is a rank {rank}", launcher)
    os.kill(pid, number)


def tensors_of(checkpoint: Path) -> dict[str, np.ndarray]:
    """Every weight and moment of a checkpoint by name: whole, or one after another the stripes of each rank."""
    pieces: dict[str, list[tuple[int, np.ndarray]]] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                name, _, offset = key.rpartition("@")
                first = int(offset.partition("+")[0])
                pieces.setdefault(name, []).append((first, file.get_tensor(key)))
    return {name: np.concatenate([a for _, a in sorted(found, key=lambda p: p[0])]) for name, found in pieces.items()}


def assert_same_run(runs: RunMaker, name: str, golden: str, steps: int) -> None:
    """Ledger and weights of a run equal those of one that nobody interrupted."""
    assert_same_folders(runs.folder(name), runs.folder(golden), steps)


def assert_same_folders(ours: RunDir, expected: RunDir, steps: int) -> None:
    """The same of two run folders, wherever they are."""
    assert compare(expected.audit, ours.audit) is None
    assert [row.step for row in read_audit(ours.audit)] == list(range(1, steps + 1))
    left, right = (tensors_of(list_checkpoints(folder.checkpoints)[-1]) for folder in (expected, ours))
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[key], right[key]) for key in left)
