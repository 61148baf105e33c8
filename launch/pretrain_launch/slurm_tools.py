"""Slurm's commands, with timeouts and retries. Needs no accounting (sacct)."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pretrain.errors import ConfigError, LaunchError, PretrainError
from pretrain_launch.journal import MAX_NODE_FAILURES

TIMEOUT_S = 60.0
RETRY_S = 3.0
QUEUE_TIMEOUT_S = 20.0

_AWAY = (
    *("Unable to contact slurm controller", "Connection refused", "Socket timed out"),
    *("Zero Bytes were transmitted", "Connection timed out", "Communication connection failure"),
    *("establish a configuration source", "Unable to establish", "Unexpected message received"),
)
"""The last is the only message of `scontrol requeue` without a controller (22.05)."""

_IN_SERVICE = ("idle", "mix", "alloc", "comp")
"""States of nodes, as sinfo writes them, that take jobs now or later."""


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
        """Whether a signal ended it: Slurm signals all processes of a job that it ends."""
        return self.code < 0

    @property
    def complaint(self) -> str:
        """The first error line, which is the most exact, else the last line."""
        lines = [line.strip() for line in (self.error or self.output).splitlines() if line.strip()]
        named = [line for line in lines if "error:" in line]
        line = (named or lines[-1:] or [f"exit code {self.code}"])[0].rpartition("error: ")[2]
        return line.removeprefix("allocation failure: ")  # of `sbatch --test-only`


def run_tool(
    arguments: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> ToolResult:
    """Runs a command; a timeout counts as a controller that is away. Raises: LaunchError: not installed."""
    try:
        done = subprocess.run(
            list(arguments), env=env, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {arguments[0]} on this machine",
            fix="submit from a login node of a Slurm cluster",
        ) from None
    except subprocess.TimeoutExpired:
        return ToolResult(1, "", f"Socket timed out: no answer within {timeout_s:.0f} s")
    return ToolResult(done.returncode, done.stdout, done.stderr)


def ask(arguments: Sequence[str], patience_s: float = 60.0) -> ToolResult:
    """Runs a command, again and again while the controller is away; returns the last answer."""
    deadline = time.monotonic() + patience_s
    while True:
        answer = run_tool(arguments)
        if not answer.is_away or time.monotonic() > deadline:
            return answer
        time.sleep(RETRY_S)


def submit_job(arguments: Sequence[str], fix: str) -> str:
    """Runs sbatch once, as a repetition might submit twice; returns the job's number.

    Raises:
        ConfigError: Slurm refuses the job.
        LaunchError: There is no sbatch, or it does not reach Slurm.
    """
    answer = _run_sbatch(arguments)
    job = answer.output.strip().partition(";")[0]
    if answer.code or not job.isdecimal():
        raise _refusal(answer, fix)
    return job


def try_job(arguments: Sequence[str], fix: str) -> str:
    """Asks sbatch about a job without submitting it; returns what was found, such as its start.

    Raises:
        ConfigError: Slurm refuses the job.
    """
    try:
        answer = _run_sbatch([arguments[0], "--test-only", *arguments[1:]])
    except LaunchError:
        return "Slurm is not asked, as there is no sbatch here"
    if answer.is_away:
        return "Slurm is not asked, as it does not answer"
    if answer.code == 0:
        start = answer.error.partition(" to start at ")[2].partition("\n")[0]
        return f"Slurm would start it at {start}" if start else "Slurm accepts it"
    if _NOT_NOW.search(answer.complaint):
        return f"as its nodes are now, Slurm would not start it: {answer.complaint}"
    raise _refusal(answer, fix)


_NOT_NOW = re.compile("not available|busy")
"""Said of nodes that are drained, whose job would wait, and of nodes that no partition has."""


def _run_sbatch(arguments: Sequence[str]) -> ToolResult:
    """Runs sbatch without variables of another job or defaults of options. Raises: LaunchError."""
    drop = ("SLURM_", "SBATCH_", "SRUN_")
    names = [name for name in os.environ if not name.startswith(drop) or name == "SLURM_CONF"]
    return run_tool(arguments, {name: os.environ[name] for name in names})


def _refusal(answer: ToolResult, fix: str) -> PretrainError:
    if answer.is_away:
        return LaunchError(
            f"Slurm does not answer: {answer.complaint}",
            where="sbatch",
            fix="see `squeue` before another attempt",
        )
    if "invalid partition" in answer.complaint:
        partitions = ask(["sinfo", "--noheader", "--format=%R"]).output.split()
        fix = f"the partitions are {', '.join(partitions)}"
    return ConfigError(f"Slurm refuses the job: {answer.complaint}", where="sbatch", fix=fix)


_PARTITION = re.compile(r"^(\S+?)(\*?)\|(\d+)\|(?:\d+-)?(\d+|infinite)\|(\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PartitionLimit:
    """What a job may have in a partition at most."""

    nodes: int
    time: str  # as Slurm writes it: `1-00:00:00`, `30:00`, `infinite`


def partition_limits() -> dict[str, PartitionLimit]:
    """Returns the limits of each partition, of the default one also as ``; empty without Slurm."""
    command = ["sinfo", "--noheader", "--all", "--format=%P|%D|%s|%l"]
    try:
        answer = run_tool(command, timeout_s=QUEUE_TIMEOUT_S)
    except LaunchError:
        return {}
    nodes: Counter[str] = Counter()
    most: dict[str, tuple[int, str]] = {}
    for name, default, count, largest, time_limit in _PARTITION.findall(answer.output):
        for key in {name, "" if default else name}:
            nodes[key] += int(count)
            most[key] = sys.maxsize if largest == "infinite" else int(largest), time_limit
    return {key: PartitionLimit(min(nodes[key], num), limit) for key, (num, limit) in most.items()}


def show_job(job: str, timeout_s: float = TIMEOUT_S) -> dict[str, str] | None:
    """Returns the fields of a job, of texts their first word; None if unknown, or without a controller."""
    command = ["scontrol", "-o", "show", "job", job]
    answer = run_tool(command, timeout_s=timeout_s)
    if answer.is_killed:  # the signal comes once; the next is SIGKILL, and ends this process too
        answer = run_tool(command)
    lines = answer.output.splitlines()
    if answer.code or not lines:
        return None
    return dict(item.split("=", 1) for item in lines[0].split() if "=" in item)


def choose_excluded(
    failing: Sequence[str], partition: str, num_nodes: int, where: str, say: Callable[[str], None]
) -> list[str]:
    """Returns the nodes that have failed a run, named by `say`; none where too few others are up.

    Args:
        failing: Nodes that would be excluded.
        partition: Names of partitions; empty for the default one.
        num_nodes: Nodes that the run needs.
        where: Words for the job that is kept from them.
        say: Prints a line.
    """
    if not failing:
        return []
    said = f"{', '.join(failing)}: ranks were killed there {MAX_NODE_FAILURES} times"
    if not _leaves_enough(partition, failing, num_nodes):
        say(f"{said}; too few other nodes are up")
        return []
    say(f"{said}; excluded from {where}")
    return [*failing]


def _leaves_enough(partition: str, without: Iterable[str], num_nodes: int) -> bool:
    """Returns whether a partition has that many nodes in service besides some."""
    options = [f"--partition={partition}"] if partition else []
    answer = run_tool(["sinfo", "--noheader", "--Node", *options, "--responding", "--format=%N %t %P"])
    rows = [line.split() for line in answer.output.splitlines()]
    # An asterisk marks the default partition.
    rows = [row for row in rows if len(row) == 3 and (partition or row[2].endswith("*"))]
    up = {row[0] for row in rows if row[1].rstrip("*~#$@+-") in _IN_SERVICE}
    return len(up - {*without}) >= num_nodes


def exclude_command(job: str, nodes: Iterable[str]) -> list[str]:
    """Returns the command that keeps a job from nodes, and from those that it excludes already."""
    current = (show_job(job) or {}).get("ExcNodeList", "(null)")
    excluded = ",".join([*([] if current == "(null)" else [current]), *nodes])
    return ["scontrol", "update", f"JobId={job}", f"ExcNodeList={excluded}"]


def job_end(job: str) -> tuple[str, str, int | None] | None:
    """Returns state, reason and exit code of a job that Slurm has ended lately; None if unknown.

    Slurm forgets a job `MinJobAge` after its end: five minutes, unless the site says otherwise.
    """
    try:
        job_facts = show_job(job, QUEUE_TIMEOUT_S) or {}
    except LaunchError:
        return None
    code, _, number = job_facts.get("ExitCode", "").partition(":")
    numbers = [int(text) for text in (code, number) if text.isdecimal()]
    exit_code = numbers[0] or 128 * bool(numbers[1]) + numbers[1] if len(numbers) == 2 else 0
    state = job_facts.get("JobState", "")
    return (state, job_facts.get("Reason", ""), exit_code or None) if state else None


def host_names(nodelist: str) -> list[str]:
    """Returns the names of a list as `n[1-3,7]`. Needs no controller. Raises: LaunchError."""
    answer = run_tool(["scontrol", "show", "hostnames", nodelist])
    if answer.code:
        raise LaunchError(f"{nodelist!r} is no list of nodes: {answer.complaint}", where="scontrol")
    return answer.output.split()


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job that waits or runs, with the fields of `_FORMAT`."""

    job: str
    element: str  # `job_task` for an element of an array, else the id
    state: str  # PENDING, RUNNING, COMPLETING, ...
    reason: str  # for waiting
    nodes: str  # in Slurm's notation: n[1-4]
    elapsed: str  # since its start
    limit: str
    starts: str  # actual or expected start time

    @property
    def is_waiting(self) -> bool:
        """Whether the job waits for nodes."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


_FORMAT = "%A|%i|%T|%r|%N|%M|%l|%S"


def find_jobs(jobs: Iterable[str]) -> dict[str, SlurmJob] | None:
    """Asks Slurm for jobs (`123`) and elements of arrays (`123_4`), in one call.

    Returns those that have not ended, by both their ids; None without Slurm or an answer.
    """
    asked = sorted(set(jobs))
    if not asked:
        return {}
    command = ["squeue", "--noheader", "--array", f"--format={_FORMAT}", f"--jobs={','.join(asked)}"]
    try:
        answer = run_tool(command, timeout_s=QUEUE_TIMEOUT_S)
    except LaunchError:
        return None
    if answer.code:
        # So for a single job that it has forgotten; of several it lists the others.
        return {} if "Invalid job id" in answer.error else None
    return parse_jobs(answer.output)


def parse_jobs(text: str) -> dict[str, SlurmJob]:
    """Returns the jobs of squeue's answer by both their ids; skips other lines."""
    jobs: dict[str, SlurmJob] = {}
    for line in text.splitlines():
        values = [value.strip() for value in line.split("|")]
        if len(values) == _FORMAT.count("%"):
            job = SlurmJob(*values)
            # Waiting elements of an array still share the id of the array.
            if "_" not in job.element or not job.is_waiting:
                jobs[job.job] = job
            if "_" in job.element:
                jobs[job.element] = job
    return jobs
