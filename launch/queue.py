"""What Slurm says of the jobs that a run folder names: one call of squeue, however many they are."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from launch.slurm_tools import run_tool
from pretrain.errors import LaunchError

TIMEOUT_S = 20.0
_FIELDS = ("job", "element", "state", "reason", "nodes", "elapsed", "limit", "starts")
_FORMAT = "%A|%i|%T|%r|%N|%M|%l|%S"


@dataclass(frozen=True, slots=True)
class Job:
    """A job that waits or runs.

    Attributes:
        job: Its id.
        element: `job_task` of an array's element; else its id.
        state: As Slurm writes it: PENDING, RUNNING, COMPLETING, ...
        reason: Why it waits.
        nodes: Those that it has, as Slurm writes them: n[1-4].
        elapsed: Since it began.
        limit: Its time limit.
        starts: When it began, or may.
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
        """Whether it has no nodes yet."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")

    def facts(self) -> dict[str, str]:
        """Returns plain values, for JSON."""
        return asdict(self)


def find_jobs(jobs: Iterable[str]) -> dict[str, Job] | None:
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
        answer = run_tool(command, timeout_s=TIMEOUT_S)
    except LaunchError:  # not installed
        return None
    if answer.code:
        # Of a single job that it has forgotten it says so; of several it lists the others.
        return {} if "Invalid job id" in answer.error else None
    return parse_jobs(answer.output)


def parse_jobs(text: str) -> dict[str, Job]:
    """Returns the jobs of squeue's answer by both their ids. Lines that it does not understand are left out."""
    found: dict[str, Job] = {}
    for line in text.splitlines():
        values = [value.strip() for value in line.split("|")]
        if len(values) == len(_FIELDS):
            job = Job(**dict(zip(_FIELDS, values, strict=True)))
            # Elements of an array that wait still share the id of the array.
            found |= {job.element: job} if "_" in job.element else {job.job: job}
            if "_" in job.element and not job.is_waiting:
                found[job.job] = job
    return found
