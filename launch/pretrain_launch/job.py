"""The driver of a job, on its first node: `python -m pretrain_launch.job SPEC`.

    journal: a start  ->  breaker  ->  no other owner of the run  ->  doctor  ->  rendezvous
    ->  srun pretrain_launch.node on every node  ->  exit codes  ->  decide
    ->  journal: an end  ->  scontrol requeue, or exit with the code of the ranks

    SIGUSR1 (the time limit comes, or a preemption)  ->  the step, once; ranks commit and exit 75
    SIGTERM (Slurm ends the job)                     ->  Slurm sends it to the ranks itself

The decision is a pure function of the outcome:

    0                                     end: the run is done
    cancelled by the user                 end
    64 65 66 69 73 74 77 126 127          end: a restart cannot help
    70 and no new checkpoint              end: the bug would be met again
    else (75, 76, a signal, a lost node)  again, unless restarts bring no new checkpoint

A requeue ends the job at once, so it comes last, and is repeated until the controller answers. A
node on which ranks were killed twice is excluded from it, and from jobs of the chain that wait.
Not here: the reaction of a rank to a signal (pretrain/run/stop.py).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from pretrain.errors import (
    EXIT_BUG,
    EXIT_CHECKPOINT,
    EXIT_DATA,
    EXIT_DISK,
    EXIT_DIVERGED,
    EXIT_LOCKED,
    EXIT_OK,
    EXIT_RESUME_ME,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    DiskError,
    LaunchError,
    LockedError,
    PretrainError,
)
from pretrain.run.lease import refuse_if_owned
from pretrain.run.owner import LEASE_S
from pretrain.utils.io import make_dir, remove_tree, write_file
from pretrain.utils.process import guard_streams
from pretrain.utils.units import plural
from pretrain_launch.exits import StepExit, are_ready, read_ending, shell_code
from pretrain_launch.job_start import (
    AT_LIMIT,
    JobStart,
    choose_nodes,
    examine_nodes,
    exclude,
    find_spec,
    is_at_limit,
    is_requeued,
    note_attempt,
    plan_exclusions,
    read_start,
    say,
    step_command,
    was_cancelled,
)
from pretrain_launch.journal import (
    append_row,
    count_idle_restarts,
    last_end,
    mark_of_cancel,
    read_journal,
)
from pretrain_launch.modes import Meeting, hostfile_text
from pretrain_launch.rendezvous import find_meeting_point
from pretrain_launch.slurm_tools import run_tool, show_job
from pretrain_launch.spec import LaunchSpec, load_spec

FINAL = {EXIT_USAGE, EXIT_DATA, EXIT_CHECKPOINT, EXIT_UNAVAILABLE, EXIT_LOCKED, EXIT_DISK, EXIT_DIVERGED, 126, 127}
POLL_S = 0.1
READY_S = 120.0
"""A rank that has not announced by then that it can be stopped failed to, or is still to begin."""
LAUNCHES = 3  # attempts at a rendezvous: another program may take the port
QUICK_S = 120.0
RETRY_S = 5.0
OWNER_S = LEASE_S + 5.0
REQUEUE_S = 90.0
END_WAIT_S = 150
"""From the end of the first node to that of all: the tracker of rank 0 may still be sending."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a start."""

    code: int  # exit code of the ranks
    reason: str  # one line
    has_progressed: bool  # a newer checkpoint than at its beginning exists
    idle_restarts: int  # restarts in a row without a new checkpoint, this one included
    is_cancelled: bool = False  # by the user
    may_requeue: bool = True  # the site lets a job requeue itself


@dataclass(frozen=True, slots=True)
class Decision:
    """Next action of the job; `next`: it ends, the next job of its chain continues."""

    kind: Literal["requeue", "next", "end"]
    code: int
    reason: str


def decide(outcome: Outcome, max_idle_restarts: int) -> Decision:
    """Returns the next action of a job after a start has ended."""
    code = outcome.code
    reason = outcome.reason
    if code == EXIT_OK:
        return Decision("end", code, reason)
    if outcome.is_cancelled:
        return Decision("end", code, f"cancelled by the user ({reason})")
    if code in FINAL or (code == EXIT_BUG and not outcome.has_progressed):
        return Decision("end", code, reason)
    if outcome.idle_restarts >= max_idle_restarts:
        return Decision("end", code, _idle_reason(outcome.idle_restarts, reason))
    return Decision("requeue" if outcome.may_requeue else "next", code, reason)


def _idle_reason(count: int, reason: str) -> str:
    if reason.startswith(AT_LIMIT):
        reason += ": the time limit is too short to start; submit it with a longer --time"
    return f"{count} restarts in a row without a new checkpoint: {reason}"


def own_log() -> Path | None:
    """Returns the file that this process and its step print to; None: a pipe or a terminal."""
    path = Path("/proc/self/fd/1").readlink()
    return path if path.is_file() else None


class Driver:
    """One start of a job; `signals` grows with each signal to this process."""

    def __init__(self, spec: LaunchSpec, start: JobStart, signals: list[int]) -> None:
        self._spec = spec
        self._start = start
        self._signals = signals
        self._run = spec.folder
        self._facts = {"chain": spec.chain, "job": start.job, "restart": start.restart}

    def drive(self) -> int:
        """Runs this start to its end; returns the exit code of the job."""
        rows = read_journal(self._run)
        before = self._run.newest_step()
        earlier = last_end(rows, self._spec.chain)
        if earlier and earlier["decision"] == "end" and earlier["job"] != self._start.job:
            say(f"the run ended in job {earlier['job']}: {earlier['reason']}")
            return int(earlier["exit_code"])
        idle = count_idle_restarts(rows, self._spec.chain, before)
        if idle >= self._spec.max_idle_restarts:
            reason = _idle_reason(idle, "their nodes were lost")
            return self._end(Decision("end", EXIT_UNAVAILABLE, reason), before)
        try:
            ending = self._train(before)
        except PretrainError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            ending = StepExit(error.exit_code, str(error), False)
        return self._finish(ending, before)

    def _train(self, before: int) -> StepExit:
        """Starts the ranks, and waits for them. Raises: LaunchError, ConfigError, DiskError."""
        nodes = self._start.nodes
        try:
            nodes = choose_nodes(self._spec, nodes)
        finally:
            world_size = len(nodes) * self._spec.ranks_per_node
            row = {"array": self._start.array, "nodes": nodes, "world_size": world_size, "step": before}
            append_row(self._run, {"event": "start", **self._facts, **row})
        if idle := self._start.nodes[len(nodes) :]:
            cause = f"{plural(len(self._start.nodes), 'node')} do not divide the batch"
            say(f"held, but not used: {', '.join(idle)} ({cause}; launch.elastic uses {len(nodes)})")
        if mark_of_cancel(self._run).exists():
            return StepExit(EXIT_RESUME_ME, "not started", False)
        self._await_owner()
        begun = time.monotonic()
        with contextlib.suppress(DiskError):  # of starts that were killed
            if (self._run.launch / "exits").exists():
                remove_tree(self._run.launch / "exits")
        if self._spec.site.doctor:
            problem = examine_nodes(self._spec, step_command(self._spec, nodes, 1), world_size)
            if problem is not None:
                return problem
        attempt = 0
        while True:
            ending = self._launch(nodes, attempt)
            attempt += 1
            is_last = attempt == LAUNCHES or time.monotonic() - begun > QUICK_S
            if ending.ranks_began or self._signals or is_last:
                return ending
            say(f"{ending.reason}; another port is tried")

    def _await_owner(self) -> None:
        """Waits until no other process owns the run, before anything is started on the other nodes.

        The command that has submitted this job, or a node that was lost, may still own it for a
        while.

        Raises:
            LockedError: One still does after `OWNER_S`, or as this job is asked to stop.
        """
        deadline = time.monotonic() + OWNER_S
        while True:
            try:
                return refuse_if_owned(self._run.lease)
            except LockedError:
                if self._signals or time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)

    def _launch(self, nodes: tuple[str, ...], attempt: int) -> StepExit:
        """Tries a rendezvous, and runs the step."""
        spec = self._spec
        step = [*step_command(spec, nodes, 1), "--overlap"]
        interface = spec.site.interface
        address, port = find_meeting_point(self._start.job, attempt, nodes, interface, step)
        if self._signals:
            reason = f"stopped by {self._asked()} before the first rank"
            return StepExit(EXIT_RESUME_ME, reason, False)
        identity = f"{self._start.job}-{self._start.restart}-{attempt}"
        meeting = Meeting(address, port, nodes, spec.ranks_per_node, identity)
        ranks = plural(meeting.world_size, "rank")
        say(f"{ranks} on {', '.join(nodes)}, rendezvous at {meeting.endpoint}")
        exits = make_dir(self._run.launch / "exits" / identity)
        write_file(exits / "hostfile", hostfile_text(meeting).encode())
        tasks = spec.tasks_per_node
        command = [
            *step_command(spec, nodes, tasks),
            *("--kill-on-bad-exit=1", f"--wait={END_WAIT_S}"),
            *(spec.python, "-m", "pretrain_launch.node"),
            *(str(spec.path), json.dumps(asdict(meeting)), str(exits)),
        ]
        try:
            return read_ending(exits, self._wait(command, exits, meeting.world_size), own_log())
        finally:
            with contextlib.suppress(DiskError):
                remove_tree(exits)

    def _wait(self, command: list[str], exits: Path, num_ranks: int) -> int:
        """Runs the step; passes the first request to stop on, once every rank is there to take it.

        It reaches the processes of that moment alone: sent earlier, it ends a launcher, or is lost.
        """
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except FileNotFoundError:
            raise LaunchError("there is no srun on this node", where=self._start.nodes[0]) from None
        late_at = time.monotonic() + READY_S
        has_been_sent = are_all_there = False
        while process.poll() is None:
            if self._signals and not are_all_there:
                are_all_there = are_ready(exits, num_ranks)
                if are_all_there or time.monotonic() > late_at:
                    late_at = time.monotonic() + RETRY_S
                    if not has_been_sent:
                        say(f"asked to stop by {self._asked()}")
                    has_been_sent = True
                    # srun passes it on to every process of the step; a rank ignores it from the second time on.
                    process.send_signal(signal.SIGUSR1)
            time.sleep(POLL_S)
        return shell_code(process.returncode)

    def _asked(self) -> str:
        return signal.Signals(self._signals[0]).name if self._signals else "a signal"

    def _finish(self, ending: StepExit, before: int) -> int:
        """Decides, and ends or requeues the job."""
        spec = self._spec
        step = self._run.newest_step()
        job = show_job(self._start.handle)
        is_cancelled = mark_of_cancel(self._run).exists() or was_cancelled(job, self._start.restart)
        is_warned = self._signals[:1] == [signal.SIGUSR1] and not is_cancelled
        is_limit = is_warned and is_at_limit(job, spec.signal_s)
        reason = note_attempt(spec, self._start, ending.code, ending.reason, at_limit=is_limit)
        stopped = AT_LIMIT if is_limit else f"stopped by {self._asked()}"
        outcome = Outcome(
            code=ending.code,
            reason=reason or ("done" if ending.code == 0 else stopped),
            has_progressed=step > before,
            idle_restarts=count_idle_restarts(read_journal(self._run), spec.chain, step),
            is_cancelled=is_cancelled,
            may_requeue=spec.site.requeue,
        )
        decision = decide(outcome, spec.max_idle_restarts)
        node = next((one for one in self._start.nodes if one == ending.host.partition(".")[0]), None)
        code = self._end(decision, step, node)
        exclusions = {} if decision.kind == "end" else plan_exclusions(spec, self._start, decision.kind)
        excluded = exclusions.pop(self._start.handle, None)
        for command in exclusions.values():
            exclude(command)
        return self._requeue(step, excluded) if decision.kind == "requeue" else code

    def _end(self, decision: Decision, step: int, failed_node: str | None = None) -> int:
        """Writes the journal's row of the end; returns the job's exit code."""
        say(f"{decision.kind}: {decision.reason} (exit code {decision.code}, step {step})")
        row: dict[str, object] = {"exit_code": decision.code, "reason": decision.reason, "step": step}
        if failed_node:
            row["failed_node"] = failed_node
        try:
            append_row(self._run, {"event": "end", **self._facts, **row, "decision": decision.kind})
        except DiskError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return decision.code

    def _requeue(self, step: int, exclusion: list[str] | None) -> int:
        """Requeues the job, which ends this process; returns if Slurm refuses, or has done so."""
        has_waited = False
        while not mark_of_cancel(self._run).exists():
            if is_requeued(show_job(self._start.handle), self._start.restart):
                return self._rest()
            answer = run_tool(["scontrol", "requeue", self._start.handle])
            if answer.code == 0:
                if exclusion:  # Slurm changes no job that runs, and leaves this process some seconds
                    exclude(exclusion)
                return self._rest()
            if answer.is_killed:
                continue  # Slurm ends this start: it may have accepted the requeue
            if not answer.is_away:
                reason = f"Slurm does not requeue the job: {answer.complaint}"
                return self._end(Decision("next", EXIT_RESUME_ME, reason), step)
            if not has_waited:
                say(f"the controller is away ({answer.complaint}); the requeue is repeated")
            has_waited = True
            time.sleep(RETRY_S)
        return self._end(Decision("end", EXIT_RESUME_ME, "cancelled by the user"), step)

    def _rest(self) -> int:
        """Waits for the end by Slurm."""
        deadline = time.monotonic() + REQUEUE_S
        count = self._signals.count(signal.SIGTERM)
        while time.monotonic() < deadline and self._signals.count(signal.SIGTERM) == count:
            time.sleep(POLL_S)
        return EXIT_RESUME_ME


def main() -> None:
    """Drives the job whose spec the command line names, and exits."""
    guard_streams()
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    try:
        start = read_start(os.environ)
        spec = load_spec(find_spec(Path(sys.argv[1]).absolute(), os.environ))
        os.chdir(spec.cwd)
        nodes = ", ".join(start.nodes)
        say(f"{spec.name}: job {start.handle}, restart {start.restart}, on {nodes}")
        sys.exit(Driver(spec, start, signals).drive())
    except PretrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
