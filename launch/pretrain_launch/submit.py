"""From a spec to a job in the queue: the options of sbatch, and the job's number."""

import time
from collections.abc import Callable
from pathlib import Path

from pretrain.errors import LaunchError
from pretrain.run.folder import RunDir
from pretrain.run.lease import refuse_if_owned
from pretrain.utils.io import make_dir, write_file, write_json
from pretrain_launch.journal import append_row, mark_of_cancel
from pretrain_launch.preflight import signal_for
from pretrain_launch.runs import RunFacts, last_save_s, read_run
from pretrain_launch.site import EXPORTED, slurm_folder
from pretrain_launch.slurm_tools import SlurmJob, ask, submit_job
from pretrain_launch.spec import LaunchSpec, load_spec, new_chain, rewrite_spec


def script_path() -> Path:
    """Returns the batch script."""
    return slurm_folder() / "train.sbatch.tmpl"


def format_time(seconds: int) -> str:
    """Returns a limit as Slurm writes it, whole minutes, rounded up: `1-02:30:00`."""
    minutes = -(-seconds // 60)
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"


def sbatch_command(spec: LaunchSpec, target: Path, count: int = 1) -> list[str]:
    """Returns the argument list that submits a job. Pure.

    Args:
        spec: The job; of an array its first element.
        target: The file that the job reads: the spec, or the list of those of an array.
        count: Elements of an array; 1: none.
    """
    site, tasks = spec.site, spec.ranks_per_node if spec.mode == "srun" else 1
    wanted = {
        "job-name": spec.name if count == 1 else _stem(spec.name),
        **_node_options(spec, tasks),
        "time": format_time(spec.time_s),
        "signal": f"B:USR1@{spec.signal_s}",
        "output": _output(spec, count),
        "chdir": spec.cwd,
        "export": ",".join(dict.fromkeys([*EXPORTED, *site.export])),
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "reservation": site.reservation,
        "mem": site.mem,
        "array": f"0-{count - 1}" if count > 1 else None,
        "dependency": "singleton" if spec.singleton else None,
    }
    if spec.gpus_per_node and site.gpus != "none":
        kind = f"{site.gpu_type}:" if site.gpu_type else ""
        name, prefix = ("gres", "gpu:") if site.gpus == "gres" else ("gpus-per-node", "")
        wanted[name] = f"{prefix}{kind}{spec.gpus_per_node}"
    flags = ["--exclusive"] if site.exclusive else []
    flags += ["--requeue" if site.requeue else "--no-requeue"]
    options = [f"--{name}={value}" for name, value in wanted.items() if value is not None]
    return ["sbatch", "--parsable", *options, *flags, *site.sbatch, str(script_path()), str(target), spec.python,
            *site.modules]  # fmt: skip


def _node_options(spec: LaunchSpec, tasks: int) -> dict[str, object]:
    """Nodes and their CPUs. Of a range of nodes Slurm gives the fewest where the tasks of each are given."""
    cpus = spec.site.cpus_per_node
    if spec.elastic and spec.nodes > 1:
        return {"nodes": f"1-{spec.nodes}", "mincpus": cpus or tasks}
    return {"nodes": spec.nodes, "ntasks-per-node": tasks, "cpus-per-task": cpus and max(1, cpus // tasks)}


def _output(spec: LaunchSpec, count: int) -> str:
    """The file that takes what a job prints, as Slurm fills it in; requeued, a job appends to it."""
    if count == 1:
        return str(spec.folder.logs / "slurm-%j.out")
    return str(Path(spec.run).with_name(f"{_stem(spec.name)}-%a") / "logs" / "slurm-%A_%a.out")


def _stem(name: str) -> str:
    """The name of an array, whose elements are NAME-0, NAME-1, ..."""
    return name.rpartition("-")[0] or name


def submit(spec: LaunchSpec) -> str:
    """Submits a run whose spec is written; returns the job's number. An earlier `cancel` is forgotten.

    Raises:
        LaunchError: Slurm refuses it.
        DiskError: The run folder cannot be written to.
    """
    _prepare(spec)
    job = submit_job(sbatch_command(spec, spec.path))
    append_row(spec.folder, {"event": "submit", "chain": spec.chain, "job": job, "array": None})
    return job


def submit_array(specs: list[LaunchSpec]) -> str:
    """Submits runs whose specs are written as one job array; returns its number. Raises: as `submit`."""
    for spec in specs:
        _prepare(spec)
    target = array_path(specs[0].folder)
    write_json(target, {"specs": [str(spec.path) for spec in specs]})
    job = submit_job(sbatch_command(specs[0], target, len(specs)))
    for number, spec in enumerate(specs):
        row = {"event": "submit", "chain": spec.chain, "job": job, "array": f"{job}_{number}"}
        append_row(spec.folder, row)
    return job


def _prepare(spec: LaunchSpec) -> None:
    make_dir(spec.folder.logs)
    mark_of_cancel(spec.folder).unlink(missing_ok=True)


def array_path(first: RunDir) -> Path:
    """Returns the file that lists the specs of an array, in the folder of its first element."""
    return first.launch / "array.json"


# Ends the Slurm job of a run for good, and submits it again.
#
# cancel    RUN/launch/cancelled is written  ->  SIGUSR1 to the driver  ->  the ranks commit and end, the driver sees
#           the mark and does not requeue    ->  scancel, if the job is there still after a while
# resubmit  the run has no owner  ->  a new chain of the same spec, which forgets the mark and idle restarts


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


def _running(facts: RunFacts) -> list[SlurmJob]:
    return [job for job in facts.queue if not job.is_waiting]


def _ask_to_end(running: list[SlurmJob], say: Callable[[str], None]) -> None:
    for job in running:
        say(f"job {job.element}: asked to save and end")
        # To the batch script alone, which tells the ranks. One that ends just now is no failure.
        _scancel([job], "--batch", "--signal=USR1", is_sure=False)


def _wait(run: Path, grace_s: float) -> list[SlurmJob]:
    """Waits until no job of the run is running; returns those that are after `grace_s`."""
    deadline = time.monotonic() + grace_s
    while running := _running(read_run(run)):
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return running


def _scancel(jobs: list[SlurmJob], *options: str, is_sure: bool = True) -> None:
    """Raises: LaunchError where Slurm refuses."""
    command = ["scancel", *options, *(job.element for job in jobs)]
    answer = ask(command)
    if answer.code and is_sure:
        raise LaunchError(answer.complaint, where=" ".join(command), fix="try again")
