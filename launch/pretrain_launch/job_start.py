"""One start of a Slurm job: its environment, its nodes and their quick examination, and its record.

    srun, once a node: pretrain doctor CONFIG --quick --json  ->  a file each  ->  launch/doctor.jsonl
    ->  pretrain doctor --compare

The doctor runs in processes of its own: `launch` imports none of it. A file each, because srun cuts
a line of more than 1 KiB into pieces, and those of several nodes come mixed.
"""

import contextlib
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pretrain.errors import ConfigError, LaunchError, PretrainError
from pretrain.plan.course import parse_time
from pretrain.run.folder import end_attempt, slurm_facts
from pretrain.utils.io import write_file
from pretrain.utils.safe_read import parse_json
from pretrain_launch.exits import StepExit
from pretrain_launch.journal import find_failing_nodes, job_of, read_journal
from pretrain_launch.slurm_tools import choose_excluded, exclude_command, find_jobs, host_names, run_tool, show_job
from pretrain_launch.spec import LaunchSpec

AT_LIMIT = "stopped at the time limit"
EARLY_S = 60
"""How much earlier than asked Slurm may send the signal before a limit, by sbatch's manual."""
ROUNDED_S = 90
"""How much more than its true limit Slurm shows of a job whose end was moved forward: its limit is
in whole minutes, and the difference is rounded to one towards zero, less half a minute."""
_BY_SIGNAL = re.compile("^stopped by (SIGUSR1|a signal to another rank)")
LIMIT_S = 120.0
TRIES = 3
TRIED_OUT = {"hostname", "interfaces", "loopback"}
"""Checks whose failure does not prevent training: the rendezvous finds an address by trying."""


def say(text: str) -> None:
    """Prints a line into the output of the job."""
    print(f"launch: {text}", flush=True)


def examine_nodes(spec: LaunchSpec, step: Sequence[str], world_size: int) -> StepExit | None:
    """Runs the doctor on every node by srun (`step`); returns the first problem."""
    folder = spec.folder.launch
    doctor = [spec.python, "-m", "pretrain", "doctor"]
    own_files = (f"--output={folder}/doctor-%t.out", "--open-mode=truncate", "--error=all")
    options = ("--quick", "--json", f"--ranks={world_size}")
    ended = _run([*step, *own_files, *doctor, str(spec.config), *options])
    reports = ""
    for task in range(world_size // spec.ranks_per_node):
        path = folder / f"doctor-{task}.out"
        with contextlib.suppress(OSError):  # a node without an answer has no file
            reports += path.read_text(encoding="utf-8", errors="replace")
            path.unlink()
    if ended is None:  # a doctor that times out does not prevent training
        return None
    write_file(folder / "doctor.jsonl", reports.encode())
    for text, hosts in warnings_of(reports).items():
        say(f"warning: {', '.join(hosts)}: {text}")
    failure = first_failure(reports)
    if failure is not None:
        return failure
    compared = _run([*doctor, "--compare", str(folder / "doctor.jsonl"), "--json"])
    return first_failure(compared or "")


def first_failure(output: str) -> StepExit | None:
    """Returns the first check that fails in reports of `doctor --json`; skips other lines."""
    for host, check in _checks(output):
        if check["status"] == "fail" and check["name"] not in TRIED_OUT:
            return StepExit(int(check["exit_code"]), f"{host}: {_described(check)}", False)
    return None


def warnings_of(output: str) -> dict[str, list[str]]:
    """Returns the warnings in reports of `doctor --json`, each with the hosts that have it."""
    hosts: dict[str, list[str]] = {}
    for host, check in _checks(output):
        if check["status"] == "warn":
            hosts.setdefault(_described(check), []).append(host)
    return hosts


def _described(check: Mapping[str, Any]) -> str:
    fix = f"; {check['fix']}" if check.get("fix") else ""
    return f"{check['name']}: {check['detail']}{fix}"


def _checks(output: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the host and each check of reports of `doctor --json`; skips other lines."""
    for line in output.splitlines():
        with contextlib.suppress(ValueError, TypeError, LookupError):
            report = parse_json(line)
            yield from ((report["host"], check) for check in report["checks"])


def _run(command: Sequence[str]) -> str | None:
    """Returns the stdout of a command; None if it does not end in time."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout


@dataclass(frozen=True, slots=True)
class JobStart:
    """A start of a job."""

    job: str  # number; each element of an array has one
    array: str | None  # `job_task` of an element; its number may be that of the whole array
    restart: int  # restarts by Slurm so far
    nodes: tuple[str, ...]  # this one first

    @property
    def handle(self) -> str:
        """Id of the job for Slurm's commands."""
        return self.array or self.job


def read_start(environment: Mapping[str, str]) -> JobStart:
    """Reads the variables that Slurm sets for a batch script. Raises: LaunchError without them."""
    facts = slurm_facts(environment).get("slurm")
    if facts is None or not environment.get("SLURM_JOB_NODELIST") or not environment.get("SLURMD_NODENAME"):
        raise LaunchError(
            "not a Slurm job",
            where="pretrain_launch.job",
            fix="submit it with `pretrain launch slurm`",
        )
    here = environment["SLURMD_NODENAME"]
    helpers = [node for node in host_names(environment["SLURM_JOB_NODELIST"]) if node != here]
    return JobStart(facts["job"], facts["array"], facts["restart"], (here, *helpers))


def find_spec(target: Path, environment: Mapping[str, str]) -> Path:
    """Returns the spec of this job: `target`, or in an array the one of this element in its list."""
    task = environment.get("SLURM_ARRAY_TASK_ID")
    if task is None:
        return target
    try:
        return Path(parse_json(target.read_text(encoding="utf-8"))["specs"][int(task)])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(
            f"lists no element {task}",
            where=str(target),
            fix="submit the array again",
        ) from None


def choose_nodes(spec: LaunchSpec, nodes: Sequence[str]) -> tuple[str, ...]:
    """Returns the nodes to train on: the most that divide the batch. Raises: ConfigError."""
    counts = [count for count in spec.node_counts if count <= len(nodes)]
    if not counts:
        valid = ", ".join(str(count) for count in spec.node_counts)
        raise ConfigError(
            f"{len(nodes)} nodes of {spec.ranks_per_node} ranks do not divide the batch",
            where="rendezvous",
            fix=f"it can be trained on {valid} nodes",
        )
    return tuple(nodes[: max(counts)])


def was_cancelled(job: Mapping[str, str] | None, restart: int) -> bool:
    """Returns whether the user has ended a job that still runs its script, from `show_job`."""
    if job is None or is_requeued(job, restart):
        return False
    # A job is COMPLETING at any end; if Slurm requeues it, `Restarts` has risen already.
    state = job.get("JobState", "")
    return state == "CANCELLED" or (state == "COMPLETING" and job.get("Reason") != "TimeLimit")


def is_requeued(job: Mapping[str, str] | None, restart: int) -> bool:
    """Returns whether Slurm is putting the job back into the queue by itself."""
    job = job or {}
    count = job.get("Restarts", "")
    is_newer = count.isdecimal() and int(count) > restart
    return is_newer or job.get("JobState") in ("PENDING", "REQUEUED")


def step_command(spec: LaunchSpec, nodes: Sequence[str], tasks: int) -> list[str]:
    """Returns srun, with `tasks` a node, up to the program of a step. Pure."""
    site = spec.site
    options = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes) * tasks}", f"--ntasks-per-node={tasks}"]
    options += [f"--nodelist={','.join(nodes)}", "--export=ALL", "--cpu-bind=none", "--quiet"]
    if site.cpus_per_node:
        options.append(f"--cpus-per-task={max(1, site.cpus_per_node // tasks)}")
    if site.container:
        options.append(f"--container-image={site.container.image}")
        if site.container.mounts:
            options.append(f"--container-mounts={','.join(site.container.mounts)}")
        options.append(f"--container-workdir={spec.cwd}")
    return ["srun", *options, *site.srun]


def is_at_limit(job: Mapping[str, str] | None, signal_s: int) -> bool:
    """Returns whether the time limit of a job is near, from `show_job`; False if unknown."""
    limit, run = ((job or {}).get(name, "") for name in ("TimeLimit", "RunTime"))
    with contextlib.suppress(ConfigError):  # such as UNLIMITED
        return parse_time(limit) - parse_time(run) <= signal_s + EARLY_S + ROUNDED_S
    return False


def note_attempt(spec: LaunchSpec, start: JobStart, code: int, reason: str, *, at_limit: bool = False) -> str:
    """Writes the end of a start into run.json, if rank 0 could not; returns the better reason.

    `at_limit`: the signal was that of the time limit, which the ranks cannot know.
    """
    if at_limit:
        reason = _BY_SIGNAL.sub(AT_LIMIT, reason)
    with contextlib.suppress(PretrainError):
        attempt = spec.folder.read_record()["attempts"][-1]
        slurm = attempt.get("slurm") or {}
        if (slurm.get("job"), slurm.get("restart")) != (start.job, start.restart):
            return reason
        if "ended" in attempt and attempt.get("exit_code") == code:
            cause = str(attempt.get("reason") or reason)
            reason = _BY_SIGNAL.sub(AT_LIMIT, cause) if at_limit else cause
            if reason == cause:
                return cause
        end_attempt(spec.folder, {"exit_code": code, "reason": reason or f"exit code {code}"})
    return reason


def plan_exclusions(spec: LaunchSpec, start: JobStart, kind: Literal["requeue", "next"]) -> dict[str, list[str]]:
    """Returns the commands that keep jobs from nodes which have failed their chain, by job, after a decision.

    The jobs are those of the chain that wait, and with `requeue` the one of `start`, once it has been requeued.
    """
    rows = read_journal(spec.folder)
    failing = find_failing_nodes(rows, spec.chain)
    if not failing:
        return {}
    submitted = {job_of(row) for row in rows if (row["event"], row.get("chain")) == ("submit", spec.chain)}
    queue = find_jobs(submitted - {start.handle}) or {}
    jobs = {job.element for job in queue.values() if job.is_waiting} | ({start.handle} if kind == "requeue" else set())
    if not jobs:
        return {}
    partition = (show_job(start.handle) or {}).get("Partition", "")
    where = "the requeue" if kind == "requeue" else "the next job"
    nodes = choose_excluded(failing, partition, min(spec.node_counts), where, say)
    return {job: exclude_command(job, nodes) for job in jobs if nodes}


def exclude(command: Sequence[str]) -> None:
    """Changes a job that waits, again if this process's own end has killed the command."""
    for _ in range(TRIES):
        answer = run_tool(command)
        if not answer.is_killed:  # Slurm signals every process of the job that it ends
            if answer.code:
                say(f"not excluded: {answer.complaint}")
            return
