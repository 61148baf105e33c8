"""Slurm's commands, as lists of arguments, with timeouts and retries. Accounting (sacct) is not needed."""

import os
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from pretrain.errors import LaunchError

TIMEOUT_S = 60.0

RETRY_S = 3.0

_AWAY = ("Unable to contact slurm controller", "Connection refused", "Socket timed out", "Zero Bytes were transmitted",
         "Connection timed out", "Communication connection failure", "Unable to establish",
         "Unexpected message received")  # fmt: skip

"""The last is all that `scontrol requeue` says of a controller that is away (22.05)."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a command of Slurm."""

    code: int
    output: str
    error: str

    @property
    def is_away(self) -> bool:
        """Whether the controller was unreachable, so that a retry may succeed."""
        return self.code != 0 and any(words in self.error for words in _AWAY)

    @property
    def is_killed(self) -> bool:
        """Whether the command ended by a signal, which Slurm sends to every process of a job that it ends."""
        return self.code < 0

    @property
    def complaint(self) -> str:
        """The line that says what is wrong: the first error, which is the most exact."""
        lines = [line.strip() for line in (self.error or self.output).splitlines() if line.strip()]
        named = [line for line in lines if "error:" in line]
        return (named or lines[-1:] or [f"exit code {self.code}"])[0].rpartition("error: ")[2]


def run_tool(
    arguments: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> ToolResult:
    """Runs a command of Slurm's; one that does not answer in time counts as a controller that is away.

    Raises:
        LaunchError: It is not installed.
    """
    try:
        done = subprocess.run(
            list(arguments), env=env, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {arguments[0]} on this machine", fix="submit from a login node of a Slurm cluster"
        ) from None
    except subprocess.TimeoutExpired:
        return ToolResult(1, "", f"Socket timed out: no answer within {timeout_s:.0f} s")
    return ToolResult(done.returncode, done.stdout, done.stderr)


def ask(arguments: Sequence[str], patience_s: float = 60.0, env: Mapping[str, str] | None = None) -> ToolResult:
    """Runs a command, again and again while the controller is away; returns the last answer."""
    deadline = time.monotonic() + patience_s
    while True:
        answer = run_tool(arguments, env)
        if not answer.is_away or time.monotonic() > deadline:
            return answer
        time.sleep(RETRY_S)


def plain_environment() -> dict[str, str]:
    """Returns our environment without what another job has left in it, and without defaults of sbatch's options."""
    drop = ("SLURM_", "SBATCH_", "SRUN_")
    return {name: value for name, value in os.environ.items() if not name.startswith(drop) or name == "SLURM_CONF"}


def submit_job(arguments: Sequence[str]) -> str:
    """Runs sbatch (with --parsable); returns the job's number. Not repeated: it might be submitted twice.

    Raises:
        LaunchError: Slurm refuses it, in its own words, or there is none.
    """
    answer = run_tool(arguments, plain_environment())
    job = answer.output.strip().partition(";")[0]
    if answer.code or not job.isdecimal():
        raise LaunchError(f"Slurm refuses the job: {answer.complaint}", where="sbatch", fix="see `--dry-run`")
    return job


def parse_job(text: str) -> dict[str, str]:
    """Returns the fields of a line of `scontrol -o show job`; texts with spaces in them lose all but the first word."""
    return dict(item.split("=", 1) for item in text.split() if "=" in item)


def show_job(job: str, patience_s: float = 0.0) -> dict[str, str] | None:
    """Returns what the controller knows of a job; None where it knows none, or is away."""
    command = ["scontrol", "-o", "show", "job", job]
    answer = ask(command, patience_s)
    if answer.is_killed:  # the signal comes once; the next is SIGKILL, and ends us too
        answer = ask(command, patience_s)
    lines = answer.output.splitlines()
    return parse_job(lines[0]) if answer.code == 0 and lines else None


def host_names(nodelist: str) -> list[str]:
    """Returns the names of a compressed list, as `n[1-3,7]`. Needs no controller. Raises: LaunchError."""
    answer = run_tool(["scontrol", "show", "hostnames", nodelist])
    if answer.code:
        raise LaunchError(f"{nodelist!r} is no list of nodes: {answer.complaint}", where="scontrol")
    return answer.output.split()


# What Slurm says of the jobs that a run folder names: one call of squeue, however many they are.


QUEUE_TIMEOUT_S = 20.0

_FIELDS = ("job", "element", "state", "reason", "nodes", "elapsed", "limit", "starts")

_FORMAT = "%A|%i|%T|%r|%N|%M|%l|%S"


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job that waits or runs.

    Attributes:
        job: Id of the job.
        element: `job_task` for an element of an array, else the id.
        state: Slurm's state: PENDING, RUNNING, COMPLETING, ...
        reason: Reason for waiting.
        nodes: Nodes in Slurm's notation: n[1-4].
        elapsed: Time since its start.
        limit: Time limit.
        starts: Actual or expected start time.
    """

    job: str
    element: str
    state: str
    reason: str
    nodes: str
    elapsed: str
    limit: str
    starts: str

    @property
    def is_waiting(self) -> bool:
        """Whether the job waits for nodes."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")

    def facts(self) -> dict[str, str]:
        """Returns plain values, for JSON."""
        return asdict(self)


def find_jobs(jobs: Iterable[str]) -> dict[str, SlurmJob] | None:
    """Asks Slurm for jobs and elements of arrays; those that have ended are not among what it returns.

    Args:
        jobs: Ids, `123` or `123_4`.

    Returns:
        Jobs by both their ids; None where Slurm is not here or does not answer, so that nothing is known.
    """
    asked = sorted(set(jobs))
    if not asked:
        return {}
    command = ["squeue", "--noheader", "--array", f"--format={_FORMAT}", f"--jobs={','.join(asked)}"]
    try:
        answer = run_tool(command, timeout_s=QUEUE_TIMEOUT_S)
    except LaunchError:  # not installed
        return None
    if answer.code:
        # Of a single job that it has forgotten it says so; of several it lists the others.
        return {} if "Invalid job id" in answer.error else None
    return parse_jobs(answer.output)


def parse_jobs(text: str) -> dict[str, SlurmJob]:
    """Returns the jobs of squeue's answer by both their ids. Lines that it does not understand are left out."""
    found: dict[str, SlurmJob] = {}
    for line in text.splitlines():
        values = [value.strip() for value in line.split("|")]
        if len(values) == len(_FIELDS):
            job = SlurmJob(**dict(zip(_FIELDS, values, strict=True)))
            # Elements of an array that wait still share the id of the array.
            found |= {job.element: job} if "_" in job.element else {job.job: job}
            if "_" in job.element and not job.is_waiting:
                found[job.job] = job
    return found
