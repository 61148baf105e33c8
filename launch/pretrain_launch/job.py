"""Decision to requeue or end a job after its ranks have ended, and the driver of a job.

The decision is a pure function:

0                                     end: the run is done
cancelled by the user                 end
64 65 66 69 73 74 77 126 127          end: a restart cannot help
70 and no new checkpoint              end: the bug would be met again
else (75, 76, a signal, a lost node)  again, unless restart after restart brings no new checkpoint
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
    PretrainError,
)
from pretrain.utils.io import make_dir, remove_tree, write_file
from pretrain.utils.process import guard_streams
from pretrain_launch.exits import StepExit, are_ready, read_ending
from pretrain_launch.job_start import (
    JobStart,
    choose_nodes,
    examine_nodes,
    find_spec,
    is_requeued,
    note_attempt,
    read_start,
    step_command,
    was_cancelled,
)
from pretrain_launch.journal import append_row, count_idle_restarts, last_end, mark_of_cancel, newest_step, read_journal
from pretrain_launch.modes import Meeting, hostfile_text
from pretrain_launch.rendezvous import find_meeting_point
from pretrain_launch.slurm_tools import run_tool, show_job
from pretrain_launch.spec import LaunchSpec, load_spec

FINAL = {EXIT_USAGE, EXIT_DATA, EXIT_CHECKPOINT, EXIT_UNAVAILABLE, EXIT_LOCKED, EXIT_DISK, EXIT_DIVERGED, 126, 127}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a start.

    Attributes:
        code: Exit code of the ranks.
        reason: Cause in one line.
        has_progressed: Whether a newer checkpoint than at its beginning exists.
        idle_restarts: Restarts in a row without a new checkpoint, this one included.
        is_cancelled: Whether the user has cancelled the job.
        may_requeue: Whether the site lets a job requeue itself.
    """

    code: int
    reason: str
    has_progressed: bool
    idle_restarts: int
    is_cancelled: bool = False
    may_requeue: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """Next action of the job: `requeue`, `next` (it ends, the next job of its chain continues), or `end`."""

    kind: Literal["requeue", "next", "end"]
    code: int
    reason: str


def decide(outcome: Outcome, max_idle_restarts: int) -> Decision:
    """Returns what to do after a start has ended.

    Args:
        outcome: Outcome of the start.
        max_idle_restarts: Restarts in a row without a new checkpoint that end the job.
    """
    code, reason = outcome.code, outcome.reason
    if code == EXIT_OK:
        return Decision("end", code, reason)
    if outcome.is_cancelled:
        return Decision("end", code, f"cancelled by the user ({reason})")
    if code in FINAL or (code == EXIT_BUG and not outcome.has_progressed):
        return Decision("end", code, reason)
    if outcome.idle_restarts >= max_idle_restarts:
        return Decision("end", code, f"{outcome.idle_restarts} restarts in a row without a new checkpoint: {reason}")
    return Decision("requeue" if outcome.may_requeue else "next", code, reason)


# The driver of a job, on its first node: `python -m pretrain_launch.job SPEC`, what the batch script
# becomes.
#
#     journal: a start  ->  breaker  ->  doctor  ->  rendezvous
#     ->  srun pretrain_launch.node on every node  ->  how it ended  ->  decide
#     ->  journal: an end  ->  scontrol requeue, or exit with the code of the ranks
#
#     SIGUSR1 (the time limit comes, or a preemption)  ->  the step, once; ranks commit and exit 75
#     SIGTERM (Slurm ends the job)                     ->  Slurm sends it to the ranks itself
#
# A requeue ends the job at once, so it comes last, when all is committed. While the controller is
# away it is repeated. Not here: what a rank does about a signal (pretrain/run/stop.py).


POLL_S = 0.1

READY_S = 120.0

"""A task that has not announced by then that it accepts stops failed to: its disk refused."""

LAUNCHES = 3

"""Attempts at a rendezvous: another program may take the port before we do."""

QUICK_S = 120.0

RETRY_S = 5.0

REQUEUE_S = 90.0

END_WAIT_S = 150

"""From the end of the first node to that of all: the tracker of rank 0 may still be sending."""


def say(text: str) -> None:
    """Prints a line into the output of the job."""
    print(f"launch: {text}", flush=True)


class Driver:
    """One start of a job.

    Args:
        spec: The job.
        start: This start of it.
        signals: Those that we got, the first first; grows.
    """

    def __init__(self, spec: LaunchSpec, start: JobStart, signals: list[int]) -> None:
        self._spec, self._start, self._signals = spec, start, signals
        self._run = spec.folder
        self._facts = {"chain": spec.chain, "job": start.job, "restart": start.restart}

    def drive(self) -> int:
        """Runs this start to its end; returns the exit code of the job."""
        rows, before = read_journal(self._run), newest_step(self._run)
        earlier = last_end(rows, self._spec.chain)
        if earlier and earlier["decision"] == "end" and earlier["job"] != self._start.job:
            say(f"the run ended in job {earlier['job']}: {earlier['reason']}")
            return int(earlier["exit_code"])
        idle = count_idle_restarts(rows, self._spec.chain, before)
        if idle >= self._spec.max_idle_restarts:
            reason = f"{idle} restarts in a row without a new checkpoint: their nodes were lost"
            return self._end(Decision("end", EXIT_UNAVAILABLE, reason), before)
        try:
            ending = self._train(before)
        except PretrainError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            ending = StepExit(error.exit_code, str(error), False)
        return self._finish(ending, before)

    def _train(self, before: int) -> StepExit:
        """Starts the ranks, and waits for them. Raises: LaunchError, ConfigError, DiskError."""
        nodes: tuple[str, ...] = self._start.nodes
        try:
            nodes = choose_nodes(self._spec, nodes)
        finally:
            world_size = len(nodes) * self._spec.ranks_per_node
            row = {"array": self._start.array, "nodes": nodes, "world_size": world_size, "step": before}
            append_row(self._run, {"event": "start", **self._facts, **row})
        if mark_of_cancel(self._run).exists():
            return StepExit(EXIT_RESUME_ME, "not started", False)
        begun, attempt = time.monotonic(), 0
        with contextlib.suppress(DiskError):  # of starts that were killed
            if (self._run.launch / "exits").exists():
                remove_tree(self._run.launch / "exits")
        if self._spec.site.doctor:
            found = examine_nodes(self._spec, step_command(self._spec, nodes, 1), world_size)
            if found is not None:
                return StepExit(found.code, found.reason, False)
        while True:
            ending = self._launch(nodes, attempt)
            attempt += 1
            if ending.ranks_began or self._signals or attempt == LAUNCHES or time.monotonic() - begun > QUICK_S:
                return ending
            say(f"{ending.reason}; another port is tried")

    def _launch(self, nodes: tuple[str, ...], attempt: int) -> StepExit:
        spec, once = self._spec, step_command(self._spec, nodes, 1)
        interface = spec.site.interface
        address, port = find_meeting_point(self._start.job, attempt, nodes[0], nodes, interface, [*once, "--overlap"])
        if self._signals:
            return StepExit(EXIT_RESUME_ME, f"stopped by {self._asked()} before the first rank", False)
        identity = f"{self._start.job}-{self._start.restart}-{attempt}"
        meeting = Meeting(address, port, nodes, spec.ranks_per_node, identity)
        say(f"{meeting.world_size} ranks on {', '.join(nodes)} meet at {meeting.endpoint}")
        exits = make_dir(self._run.launch / "exits" / identity)
        write_file(exits / "hostfile", hostfile_text(meeting).encode())
        tasks = spec.ranks_per_node if spec.mode == "srun" else 1
        command = [
            *step_command(spec, nodes, tasks),
            *("--unbuffered", "--kill-on-bad-exit=1", f"--wait={END_WAIT_S}"),
            *(spec.python, "-m", "pretrain_launch.node", str(spec.path)),
            *("--meeting", json.dumps(asdict(meeting)), "--exits", str(exits)),
        ]
        try:
            return read_ending(exits, self._wait(command, exits, len(nodes) * tasks))
        finally:
            with contextlib.suppress(DiskError):
                remove_tree(exits)

    def _wait(self, command: list[str], exits: Path, num_tasks: int) -> int:
        """Runs the step; passes the first request to stop on to it, once no task would die of it."""
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except FileNotFoundError:
            raise LaunchError("there is no srun on this node", where=self._start.nodes[0]) from None
        begun, is_told = time.monotonic(), False
        while process.poll() is None:
            is_old = time.monotonic() - begun > READY_S
            if self._signals and not is_told and (is_old or are_ready(exits, num_tasks)):
                is_told = True
                say(f"asked to stop by {self._asked()}")
                # srun passes it on to every task, without the controller; where Slurm has asked them, it is harmless.
                process.send_signal(signal.SIGUSR1)
            time.sleep(POLL_S)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def _asked(self) -> str:
        return signal.Signals(self._signals[0]).name

    def _finish(self, ending: StepExit, before: int) -> int:
        spec, step = self._spec, newest_step(self._run)
        job = show_job(self._start.handle)
        cancelled = mark_of_cancel(self._run).exists() or was_cancelled(job, self._start.restart)
        reason = note_attempt(spec, self._start, ending.code, ending.reason)
        if not reason:
            reason = "done" if ending.code == 0 else f"stopped by {self._asked() if self._signals else 'a signal'}"
        outcome = Outcome(
            code=ending.code,
            reason=reason,
            has_progressed=step > before,
            idle_restarts=count_idle_restarts(read_journal(self._run), spec.chain, step),
            is_cancelled=cancelled,
            may_requeue=spec.site.requeue,
        )
        decision = decide(outcome, spec.max_idle_restarts)
        code = self._end(decision, step)
        return self._requeue(step) if decision.kind == "requeue" else code

    def _end(self, decision: Decision, step: int) -> int:
        """Writes the journal's row of the end; returns the job's exit code."""
        say(f"{decision.kind}: {decision.reason} (exit code {decision.code}, step {step})")
        row = {"exit_code": decision.code, "reason": decision.reason, "step": step, "decision": decision.kind}
        try:
            append_row(self._run, {"event": "end", **self._facts, **row})
        except DiskError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return decision.code

    def _requeue(self, step: int) -> int:
        """Puts the job back into the queue, which ends this process; returns where that cannot be, or is done."""
        waited = False
        while not mark_of_cancel(self._run).exists():
            if is_requeued(show_job(self._start.handle), self._start.restart):
                self._rest(REQUEUE_S)
                return EXIT_RESUME_ME
            answer = run_tool(["scontrol", "requeue", self._start.handle])
            if answer.code == 0:
                self._rest(REQUEUE_S)
                return EXIT_RESUME_ME
            if answer.is_killed:
                continue  # Slurm ends this start: it may have taken the requeue, whose answer was on its way
            if not answer.is_away:
                reason = f"Slurm does not requeue the job: {answer.complaint}"
                return self._end(Decision("next", EXIT_RESUME_ME, reason), step)
            if not waited:
                say(f"the controller is away ({answer.complaint}); the requeue is tried until it is back")
            waited = True
            time.sleep(RETRY_S)
        return self._end(Decision("end", EXIT_RESUME_ME, "cancelled by the user"), step)

    def _rest(self, seconds: float) -> None:
        """Waits to be ended."""
        deadline, count = time.monotonic() + seconds, self._signals.count(signal.SIGTERM)
        while time.monotonic() < deadline and self._signals.count(signal.SIGTERM) == count:
            time.sleep(POLL_S)


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
        say(f"{spec.name}: job {start.handle}, restart {start.restart}, on {', '.join(start.nodes)}")
        sys.exit(Driver(spec, start, signals).drive())
    except PretrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
