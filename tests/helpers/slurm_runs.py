"""Runs of a tiny model that are launched over Slurm and wait at chosen steps, so that faults come when they should.

    job = SlurmRun(lab, config, folder); job.hold(30); job.submit("--nodes", "2"); job.wait_held(30)
    ... break something ...
    job.release(30); job.wait_end()

A step is held by a file: every rank waits before it until the file is gone (module `held`, named under `extend`).
"""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from pretrain.run.folder import RunDir
from pretrain_launch.journal import read_journal
from tests.helpers.fork_server import SOURCE_PATH
from tests.helpers.slurm_lab import ENDED, SlurmLab

CONFIG = """
seed: 7
extend: [held]
run: {{dir: {runs}, name: run}}
data: {{path: {data}, lanes: 2, block_samples: 16}}
model:
  preset: llama-tiny
  max_seq_len: 32
  decoder: {{layers: 1, width: 32, heads: 4, kv_heads: 2, ff_width: 48, dropout: 0.1}}
batch: {{global_tokens: 256, seq_len: 32, micro: 2}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 5}}}}
train: {{steps: 80}}
engine: {{kind: single, zero_stage: 0, precision: fp32, device: cpu, timeout_s: 1000}}
checkpoint: {{every_steps: 10}}
tracking: {{log_every_steps: 5, wandb: off}}
"""
"""One rank; `on_two_ranks` makes it two."""
STEPS = 80

MODULE = """
import os
import signal
from pathlib import Path

from pretrain.run.heartbeat import Progress
from pretrain.run.stop import StopFlag
from tests.helpers.waiting import poll_pause

HOLDS = Path(__file__).with_name("holds")
TASK = os.environ.get("SLURM_ARRAY_TASK_ID", "")
ENTER, HANDLE = Progress.enter, StopFlag._handle
ASKED = []


def handle(self, number):
    HANDLE(self, number)
    ASKED.append(number)


def enter(self, phase, step=None):
    ENTER(self, phase, step)
    hold = HOLDS / f"{step}"
    is_begun = step is not None and phase != "data"
    while is_begun and hold.exists():
        hold.with_suffix(f".held{TASK}").touch()
        if ASKED:
            hold.with_suffix(f".asked{TASK}").touch()
        poll_pause()
    if is_begun and (HOLDS / f"{step}.die").exists():
        os.kill(os.getpid(), signal.SIGKILL)


Progress.enter, StopFlag._handle = enter, handle
"""
SITE = "signal_s: 120\ndoctor: false\nexport: [RES_OPTIONS]\n"
"""Slurm looks at limits every 30 s, and a busy machine takes some to save; the doctor costs each start seconds; nodes
of a lab have no name servers."""


def on_two_ranks(zero_stage: int | None) -> str:
    """Returns `CONFIG` for two ranks: DeepSpeed of a ZeRO stage, or DDP."""
    kind = "ddp, zero_stage: 0" if zero_stage is None else f"deepspeed, zero_stage: {zero_stage}"
    return CONFIG.replace("single, zero_stage: 0", kind)


def prepare_folder(folder: Path) -> None:
    """Writes what runs of `CONFIG` need into the folder in which they are started."""
    (folder / "held.py").write_text(MODULE)
    (folder / "site.yaml").write_text(SITE)
    (folder / "holds").mkdir(exist_ok=True)


class SlurmRun:
    """One launched run."""

    def __init__(self, lab: SlurmLab, config: Path, folder: RunDir) -> None:
        self.lab, self.folder, self._config = lab, folder, config
        self._folder = config.parent
        self.job: int | str = 0
        self._task = ""

    def element(self, task: int) -> "SlurmRun":
        """An element of this run, submitted as an array."""
        run = SlurmRun(self.lab, self._config, RunDir(self.folder.path.with_name(f"{self.folder.path.name}-{task}")))
        run.job, run._task = f"{self.job}_{task}", str(task)
        return run

    # Steps

    def hold(self, *steps: int) -> None:
        """Lets the ranks wait before these steps."""
        for step in steps:
            held, asked = ((self._folder / "holds").glob(f"{step}.{mark}*") for mark in ("held", "asked"))
            for mark in [*held, *asked]:
                mark.unlink()
            (self._folder / "holds" / f"{step}").touch()

    def wait_held(self, step: int) -> None:
        """Waits until a rank waits before a step."""
        self._wait_marked(step, "held")

    def wait_asked(self, step: int) -> None:
        """Waits until a rank that waits before a step has been asked to stop: it will, as soon as it is let go on."""
        self._wait_marked(step, "asked")

    def _wait_marked(self, step: int, mark: str) -> None:
        path = self._folder / "holds" / f"{step}.{mark}{self._task}"
        self.lab.wait_until(path.exists, f"before step {step} a rank is {mark}", self.tell)

    def release(self, step: int) -> None:
        """Lets the ranks go on."""
        (self._folder / "holds" / f"{step}").unlink()

    def die_at(self, step: int) -> None:
        """Lets every rank that comes to a step be killed there."""
        (self._folder / "holds" / f"{step}.die").touch()

    def live_at(self, step: int) -> None:
        """Undoes `die_at`."""
        (self._folder / "holds" / f"{step}.die").unlink()

    # Commands

    def run(self, *command: str, expect: int | None = 0) -> str:
        """Runs a command as a user of the cluster does, in the folder of the config; returns what it prints."""
        path = f"PATH={Path(sys.executable).parent}:{self.lab.env['PATH']}"
        items = [f"PYTHONPATH={self._folder}{os.pathsep}{SOURCE_PATH}", "OMP_NUM_THREADS=1", path]
        return self.lab.run("env", "-C", str(self._folder), *items, *command, expect=expect)

    def pretrain(self, *arguments: str, expect: int | None = 0) -> str:
        """Runs `pretrain ARGUMENTS`; returns what it prints."""
        return self.run(sys.executable, "-m", "pretrain", *arguments, expect=expect)

    def sbatch(self, *arguments: str) -> int:
        """Runs sbatch; returns the job's id."""
        return int(self.run("sbatch", "--parsable", *arguments))

    def submit(self, *options: str) -> int:
        """Submits the run (`pretrain launch slurm`); returns the job's id."""
        site = str(self._folder / "site.yaml")
        command = ("launch", "slurm", str(self._config), "--cluster", site, "--time", "30m", *options)
        said = self.pretrain(*command)
        found = re.search(r"submitted .*?job (?:array )?(\d+)", said)
        assert found, said
        self.job = int(found[1])
        return int(self.job)

    def status(self) -> dict[str, Any]:
        """What `pretrain launch status --json` says."""
        return json.loads(self.pretrain("launch", "status", str(self.folder.path), "--json"))

    # What becomes of it

    @property
    def output(self) -> str:
        """What the job has printed so far, in all its starts."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.logs.glob("slurm-*.out")))

    def tell(self) -> str:
        """What a failed test should show."""
        rows = "\n".join(map(str, self.journal()))
        return f"{self.lab.job(self.job) if self.job else ''}\n{rows}\n{self.output[-6000:]}"

    def journal(self, event: str = "") -> list[dict[str, Any]]:
        """The rows of the journal, or those of an event."""
        return [row for row in read_journal(self.folder) if not event or row["event"] == event]

    def attempts(self) -> list[dict[str, Any]]:
        """The attempts in run.json."""
        return self.folder.read_record()["attempts"]

    def wait_told(self, text: str, count: int = 1) -> None:
        """Waits until the job has printed something `count` times."""
        self.lab.wait_until(lambda: self.output.count(text) >= count, f"{text!r} in its output", self.tell)

    def wait_restart(self, count: int) -> None:
        """Waits until the driver has begun restart number `count`; cuts short what Slurm would let it wait."""

        def has_begun() -> bool:
            state = self.lab.state(self.job)  # before the journal: what has ended by now has begun before
            if len(self.journal("start")) > count:
                return True
            assert state not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), self.tell()
            self._start_if_waiting()
            return False

        self.lab.wait_until(has_begun, f"restart {count}", self.tell)

    def wait_end(self, state: str = "COMPLETED") -> None:
        """Waits until the job has ended, in this state."""
        self.lab.wait_until(self._has_ended, "the job has ended", self.tell)
        assert self.lab.state(self.job) == state, self.tell()

    def _has_ended(self) -> bool:
        self._start_if_waiting()
        return self.lab.state(self.job) in ENDED

    def _start_if_waiting(self) -> None:
        if self.lab.state(self.job) == "PENDING":
            self.lab.start_now(self.job)

    def kill_rank(self, rank: int) -> None:
        """Kills a rank, on whatever node."""
        found = self.processes("-m pretrain train", f"RANK={rank}")
        assert found, f"no rank {rank} runs: {self.tell()}"
        os.kill(found[0], signal.SIGKILL)

    def processes(self, text: str, *variables: str) -> list[int]:
        """Processes of this job whose command line has a text in it, by their numbers on this machine.

        Args:
            text: Of the command line.
            variables: `NAME=value` that they have besides.
        """
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ours = (f"SLURM_JOB_ID={self.job}", f"SLURM_CONF={self.lab.env['SLURM_CONF']}", *variables)
            if text in command and {item.encode() for item in ours} <= set(environment):
                found.append(int(path.name))
        return found
