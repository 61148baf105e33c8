"""A real Slurm cluster on this machine, its jobs, and the faults of its nodes (scripts: tests/helpers/slurm/).

    lab = SlurmLab.start(folder, nodes=2)      slurmctld, a slurmd for each of n1, n2: hosts, addresses, processes apart
    job = lab.submit("job.sh")                 the file system is shared, as on a cluster
    lab.crash("n2"); lab.wait_for(job, "RUNNING"); lab.stop()

Never `sbatch --wait`: it looks at 2, 10, 42 s. The time limit is looked at every 30 s; `expire` moves it.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import uuid4

from tests.helpers import waiting
from tests.helpers.processes import is_running
from tests.helpers.waiting import LIMIT_S, pass_time

SCRIPTS = Path(__file__).resolve().parent / "slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "sbatch", "srun")
PACKAGES = "slurmctld slurmd slurm-client munge"
ASK_EVERY_S = 0.1
"""A question to the cluster is a process."""
REVOKED_S = 2.0
"""Slurm counts whole seconds."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE")
"""States in which a job stays."""


def why_no_slurm() -> str | None:
    """Returns why no cluster can be started here; None where one can."""
    if sys.platform != "linux":
        return "slurm tests need Linux"
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if missing:
        return f"slurm tests need {', '.join(missing)}: apt-get install {PACKAGES}"
    return None if os.geteuid() == 0 else "slurm tests need root: slurmd does"


class SlurmLab:
    """One cluster, in a folder of its own."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder, self.num_nodes = folder, num_nodes
        path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"], "/usr/sbin", "/sbin"])
        self.env = {**os.environ, "SLURM_CONF": str(folder / "etc" / "slurm.conf"), "PATH": path}
        """Environment of commands that speak to the cluster."""

    @classmethod
    def start(cls, folder: Path, nodes: int = 2, gpus: int = 0, settings: Sequence[str] = ()) -> "SlurmLab":
        """Starts a cluster, in a second or two.

        Args:
            folder: Where it lives; at most 64 characters, without `,`, `;`, `%` and blanks.
            nodes: n1 to nN.
            gpus: Fake GPUs a node.
            settings: `Key=Value` lines of slurm.conf.
        """
        options = [item for setting in settings for item in ("-x", setting)]
        command = [str(SCRIPTS / "slurm_up.sh"), "-d", str(folder), "-n", str(nodes), "-g", str(gpus), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr[-3000:]
        return cls(folder, nodes)

    def stop(self) -> None:
        """Takes it down, with whatever still runs on it; logs stay in the folder."""
        done = subprocess.run(
            [str(SCRIPTS / "slurm_down.sh"), "-k", "-d", str(self.folder)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr

    @property
    def nodes(self) -> list[str]:
        """Names of all nodes."""
        return [f"n{number}" for number in range(1, self.num_nodes + 1)]

    @property
    def has_own_hosts(self) -> bool:
        """Whether nodes have hosts, networks and processes of their own; without, no cable can be cut."""
        return "MODE=netns" in (self.folder / "etc" / "lab").read_text()

    # Commands and jobs

    def run(self, *command: str, expect: int | None = 0) -> str:
        """Runs a command that speaks to the cluster; returns what it prints, errors too."""
        done = subprocess.run(
            command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
        )
        assert expect is None or done.returncode == expect, f"{command}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def submit(self, *arguments: str) -> int:
        """Submits a batch job; returns its id."""
        return int(self.run("sbatch", "--parsable", *arguments).split(";")[0])

    def jobs(self, job: int | str) -> list[dict[str, str]]:
        """What `scontrol show job` says: one entry, or one for each element of an array."""
        lines = self.run("scontrol", "-o", "show", "job", str(job)).splitlines()
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines if line.startswith("JobId=")]

    def job(self, job: int | str) -> dict[str, str]:
        """What `scontrol show job` says of one job."""
        return self.jobs(job)[0]

    def state(self, job: int | str) -> str:
        """The state of a job."""
        return self.job(job)["JobState"]

    def restarts(self, job: int | str) -> int:
        """How often a job was requeued."""
        return int(self.job(job)["Restarts"])

    def nodes_of(self, job: int | str) -> list[str]:
        """The nodes that a job has."""
        return self.run("scontrol", "show", "hostnames", self.job(job)["NodeList"]).split()

    def wait_for(self, job: int | str, *states: str) -> str:
        """Waits until a job is in one of `states` (none given: has ended); returns it."""
        wanted = states or ENDED
        self.wait_until(lambda: self.state(job) in wanted, f"job {job} in {wanted}", lambda: str(self.job(job)))
        return self.state(job)

    def wait_until(self, is_done: Callable[[], object], what: str, say: Callable[[], str] = str) -> None:
        """Waits for anything; `say` tells what is instead where it does not come."""
        waiting.wait_until(is_done, what, say=say, pause_s=ASK_EVERY_S)

    def start_now(self, job: int | str) -> None:
        """Lets a requeued job begin, which would else wait some seconds; nodes refuse one of the same second."""
        pass_time(REVOKED_S)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now", expect=None)

    def expire(self, job: int | str, after_s: int) -> None:
        """Moves the time limit of a running job, for all its starts; `--signal=..@N` comes at the next tick."""
        self.run("scontrol", "update", f"JobId={job}", f"EndTime=now+{after_s}")

    # Faults

    def node(self, verb: str, name: str, *arguments: str) -> str:
        """Does something to a node: see tests/helpers/slurm/slurm_node.sh."""
        return self.run("slurm_node", verb, name, *arguments)

    def on_node(self, name: str, *command: str) -> str:
        """Runs a command on a node."""
        return self.node("exec", name, *command)

    def crash(self, name: str) -> None:
        """Power loss: peers hear nothing, Slurm notices within 40 s."""
        self.node("crash", name)

    def boot(self, name: str) -> None:
        """Starts a crashed node."""
        self.node("boot", name)

    def reboot(self, name: str) -> None:
        """Power loss and start within seconds: Slurm fails the node's jobs when it sees the new boot time."""
        self.node("reboot", name)

    def kill_slurmd(self, name: str) -> None:
        """Only the daemon dies; tasks live on, and Slurm gives the node up within 40 s."""
        self.node("kill-slurmd", name)

    def start_slurmd(self, name: str) -> None:
        """Starts the daemon of a node again."""
        self.node("start-slurmd", name)

    def cut(self, name: str) -> None:
        """Unplugs a node's network cable."""
        self.node("cut", name)

    def heal(self, name: str) -> None:
        """Plugs it in again."""
        self.node("heal", name)

    def drain(self, name: str) -> None:
        """Gives a node no new jobs."""
        self.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=test")

    def fail(self, name: str) -> None:
        """An administrator takes a node down: its jobs fail at once."""
        self.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=test")

    def resume(self, name: str) -> None:
        """Waits until a node answers, and lets it take jobs."""
        self.node("resume", name)

    def wait_saved(self, job: int) -> None:
        """Waits until slurmctld, which saves its state every five seconds, has saved what is so of a job by now."""
        mark, saved = f"mark{uuid4().hex}", self.folder / "spool" / "ctld" / "job_state"
        self.run("scontrol", "update", f"JobId={job}", f"Comment={mark}")
        self.wait_until(lambda: mark.encode() in _content(saved), f"{mark} of job {job} in {saved}")

    def kill_controller(self) -> None:
        """Kills slurmctld; it knows after its next start what it has saved (`wait_saved`)."""
        self._end_controller("ctld-kill")

    def stop_controller(self) -> None:
        """Stops slurmctld, which saves its state."""
        self._end_controller("ctld-stop")

    def _end_controller(self, verb: str) -> None:
        pid = int((self.folder / "run" / "ctld.pid").read_text())
        self.run("slurm_node", verb)
        self.wait_until(lambda: not is_running(pid), "slurmctld gone")

    def start_controller(self) -> None:
        """Starts slurmctld from its saved state, and waits until it answers."""
        self.run("slurm_node", "ctld-start")
        self.wait_until(lambda: "is UP" in self.run("scontrol", "ping", expect=None), "slurmctld up")


def _content(path: Path) -> bytes:
    """The content of a file; empty where there is none, as for a moment where one is replaced."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
