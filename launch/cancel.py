"""Ends the Slurm job of a run for good, and submits it again.

cancel    RUN/launch/cancelled is written  ->  SIGUSR1 to the driver  ->  the ranks commit and end, the driver sees
          the mark and does not requeue    ->  scancel, if the job is there still after a while
resubmit  nobody works on the run  ->  a new chain of the same spec, which forgets the mark and idle restarts
"""

import time
from collections.abc import Callable
from pathlib import Path

from launch.journal import mark_of_cancel
from launch.preflight import signal_for
from launch.queue import Job
from launch.runs import RunFacts, last_save_s, read_run
from launch.slurm_tools import ask
from launch.spec import load_spec, new_chain, rewrite_spec
from launch.submit import submit
from pretrain.errors import LaunchError
from pretrain.run.folder import RunDir
from pretrain.run.lease import refuse_if_owned
from pretrain.utils.io import write_file

POLL_S = 1.0


def cancel(run: Path, grace_s: float, say: Callable[[str], None]) -> None:
    """Cancels every job of a run.

    Args:
        run: The run folder.
        grace_s: How long a running job may take to commit and end; 0: none is asked to.
        say: Takes a line for the user.

    Raises:
        LaunchError: The run has no Slurm job, or Slurm does not answer; in the latter case it is marked nevertheless,
            so that its job will not come back.
    """
    facts = read_run(run)
    if facts.job is None:
        raise _no_job(facts)
    write_file(mark_of_cancel(RunDir(run)), b"by pretrain launch cancel; pretrain launch resubmit removes this file\n")
    _check_answers(facts)
    if waiting := [job for job in facts.queue if job.is_waiting]:
        _scancel(waiting)
    if running := _running(facts):
        if grace_s:
            _ask_to_end(running, say)
            running = _wait(run, grace_s)
            for job in running:
                say(f"job {job.element}: has not ended in {grace_s:g} s: Slurm ends it")
        if running:
            _scancel(running)
    say(f"{facts.name}: cancelled" if facts.queue else f"{facts.name}: job {facts.job} had ended already")


def resubmit(run: Path) -> str:
    """Submits the job of a run again, as it was submitted the last time; returns its id.

    Raises:
        LaunchError: It has no Slurm job, or one that waits or runs, or Slurm does not answer.
        LockedError: A process works on the run.
    """
    facts = read_run(run)
    spec_path = RunDir(run).launch / "spec.json"
    if not spec_path.is_file():
        raise _no_job(facts)
    _check_answers(facts)
    if facts.queue:
        job = facts.queue[0]
        raise LaunchError(
            f"job {job.element} is {job.state}", where=str(run), fix="wait, or cancel it: pretrain launch cancel"
        )
    refuse_if_owned(RunDir(run).lease)
    spec = load_spec(spec_path)
    signal_s, save_s = spec.signal_s, last_save_s(RunDir(run))
    if spec.site.signal_s is None and save_s is not None:  # now it is known how long a save takes
        signal_s = max(signal_s, min(signal_for(save_s), spec.time_s // 2))
    spec = spec.model_copy(update={"chain": new_chain(), "signal_s": signal_s})
    rewrite_spec(spec)
    return submit(spec)


def _no_job(facts: RunFacts) -> LaunchError:
    fix = "start it with pretrain launch slurm"
    if facts.owner:
        fix = f"it is run by {facts.owner}: press Ctrl-C there, or send SIGTERM to its launcher"
    return LaunchError("the run has no Slurm job", where=str(facts.path), fix=fix)


def _check_answers(facts: RunFacts) -> None:
    if not facts.slurm_answers:
        raise LaunchError(
            f"Slurm does not answer about job {facts.job}", where="squeue", fix="try again where squeue works"
        )


def _running(facts: RunFacts) -> list[Job]:
    return [job for job in facts.queue if not job.is_waiting]


def _ask_to_end(running: list[Job], say: Callable[[str], None]) -> None:
    for job in running:
        say(f"job {job.element}: asked to save and end")
        # To the batch script alone, which tells the ranks. One that ends just now is no failure.
        _scancel([job], "--batch", "--signal=USR1", is_sure=False)


def _wait(run: Path, grace_s: float) -> list[Job]:
    """Waits until no job of the run is running; returns those that are after `grace_s`."""
    deadline = time.monotonic() + grace_s
    while running := _running(read_run(run)):
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return running


def _scancel(jobs: list[Job], *options: str, is_sure: bool = True) -> None:
    """Raises: LaunchError where Slurm refuses."""
    command = ["scancel", *options, *(job.element for job in jobs)]
    answer = ask(command)
    if answer.code and is_sure:
        raise LaunchError(answer.complaint, where=" ".join(command), fix="try again")
