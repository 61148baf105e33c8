"""From a spec to a job in the queue, and its end: submission, cancellation, resubmission.

submit    no job of the run is in the queue  ->  the run's lease, so that of two commands one submits
          ->  sbatch  ->  journal: a submission
          under --singleton a job of it may be, with the same config and layout: its chain gets another job
cancel    RUN/launch/cancelled is written  ->  SIGUSR1 to the driver  ->  the ranks commit and end
          ->  the driver finds the file and does not requeue; else scancel, after a while
resubmit  a new chain of the same spec, without that file
"""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path

from pretrain.config.load import load_config
from pretrain.config.resumption import changed_keys
from pretrain.config.run import RunConfig
from pretrain.config.yaml_nodes import short
from pretrain.errors import ConfigError, LaunchError, LockedError, PretrainError
from pretrain.run.folder import RunDir
from pretrain.run.lease import Lease, refuse_if_owned
from pretrain.utils.io import make_dir, write_file, write_json
from pretrain.utils.safe_read import read_json
from pretrain.utils.units import plural
from pretrain_launch.journal import append_row, find_failing_nodes, mark_of_cancel, read_journal
from pretrain_launch.preflight import signal_for
from pretrain_launch.runs import RunFacts, last_save_s, read_run, read_runs
from pretrain_launch.site import EXPORTED, SiteConfig, slurm_folder
from pretrain_launch.slurm_tools import SlurmJob, ask, choose_excluded, submit_job
from pretrain_launch.spec import LaunchSpec, load_spec, write_spec

POLL_S = 1.0
ENDING = "it is ending: try again in a moment"
_OF_MODULES = re.compile(r"BASH_ENV|MODULEPATH|(LMOD_|MODULES)[A-Za-z0-9_]*")


def script_path() -> Path:
    """Returns the batch script."""
    return slurm_folder() / "train.sbatch.tmpl"


def format_time(seconds: int) -> str:
    """Returns a limit as Slurm writes it, whole minutes, rounded up: `1-02:30:00`."""
    minutes = -(-seconds // 60)
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"


def sbatch_command(spec: LaunchSpec, target: Path, elements: Sequence[int] = ()) -> list[str]:
    """Returns the argument list that submits a job, or an array of jobs like it with these numbers.

    `target` is the file that the job reads: the spec, or the list of those of an array.
    """
    site = spec.site
    name = spec.name
    output = spec.folder.logs / "slurm-%j.out"
    if elements:  # NAME-0, NAME-1, ...
        name = spec.name.rpartition("-")[0] or spec.name
        output = Path(spec.run).with_name(f"{name}-%a") / "logs" / "slurm-%A_%a.out"
    wanted = {
        "job-name": name,
        **_node_options(spec),
        "time": format_time(spec.time_s),
        "signal": f"B:USR1@{spec.signal_s}",
        "output": str(output),
        "chdir": spec.cwd,
        "export": ",".join(dict.fromkeys([*EXPORTED, *_module_variables(site), *site.export])),
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "reservation": site.reservation,
        "mem": site.mem,
        "array": _ranges(elements) or None,
        "dependency": "singleton" if spec.singleton else None,
    }
    if spec.gpus_per_node and site.gpus != "none":
        kind = ["gpu"] if site.gpus == "gres" else []
        wanted[site.gpus] = ":".join(filter(None, [*kind, site.gpu_type, str(spec.gpus_per_node)]))
    flags = ["--exclusive"] if site.exclusive else []
    flags.append("--requeue" if site.requeue else "--no-requeue")
    further = [*site.sbatch]
    if spec.exclude:  # of two such options sbatch takes the last
        nodes = [option.removeprefix("--exclude=") for option in further if option.startswith("--exclude=")]
        further.append(f"--exclude={','.join([*nodes, *spec.exclude])}")
    options = [f"--{name}={value}" for name, value in wanted.items() if value is not None]
    script = [str(script_path()), str(target), spec.python, *site.modules]
    return ["sbatch", "--parsable", *options, *flags, *further, *script]


def _node_options(spec: LaunchSpec) -> dict[str, object]:
    """Returns the options of sbatch for nodes, tasks and CPUs; None for none."""
    tasks = spec.tasks_per_node
    cpus = spec.site.cpus_per_node
    # Slurm's default of a CPU a task would be one for all ranks of a launcher.
    if not cpus and not spec.site.exclusive:
        cpus = spec.ranks_per_node
    if spec.elastic and spec.nodes > 1:
        # Of a range of nodes Slurm gives the fewest if the tasks of each are given.
        return {"nodes": f"1-{spec.nodes}", "mincpus": cpus or tasks}
    return {"nodes": spec.nodes, "ntasks-per-node": tasks, "cpus-per-task": cpus and max(1, cpus // tasks)}


def _ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as Slurm writes them: `0-2,5`."""
    # Consecutive numbers have one difference to their place.
    runs = groupby(enumerate(numbers), lambda item: item[1] - item[0])
    spans = [[number for _, number in members] for _, members in runs]
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


def _module_variables(site: SiteConfig) -> list[str]:
    """Returns the variables of this environment by which `module` finds its files, if the site loads any."""
    return sorted(name for name in os.environ if _OF_MODULES.fullmatch(name)) if site.modules else []


@contextmanager
def claimed(folders: Sequence[RunDir]) -> Iterator[None]:
    """Owns run folders while they are submitted; a job that begins meanwhile waits for the release.

    Raises:
        LaunchError: Slurm does not answer.
        LockedError: A process works on one of the runs, or submits it, or a job of one waits or runs already.
    """
    _refuse_if_queued(folders)
    with ExitStack() as leases:
        for folder in folders:
            leases.callback(Lease(folder.lease).release)
        # Another command may have submitted one before the leases were ours.
        _refuse_if_queued(folders)
        yield


def _refuse_if_queued(folders: Sequence[RunDir]) -> None:
    for facts in read_runs([folder.path for folder in folders]):
        _check_answers(facts)
        if facts.queue:
            raise _locked(facts, "", f"wait for it, or cancel it: pretrain launch cancel {facts.path}")


def _locked(facts: RunFacts, why: str, fix: str) -> LockedError:
    job = facts.queue[0]
    if job.state == "COMPLETING":
        fix = ENDING
    return LockedError(f"job {job.element} of this run is {job.state}{why}", where=str(facts.path), fix=fix)


def check_queue(configs: Sequence[RunConfig], specs: Sequence[LaunchSpec]) -> str:
    """Checks whether runs could be submitted beside the queue; returns what was found.

    Raises:
        LockedError: A job in the queue does not go with the submission, or a process owns a run.
    """
    queued: dict[str, LaunchSpec] = {}
    state = "no job is in the queue"
    try:
        queued = queued_specs(configs, specs) if specs[0].singleton else {}
        _refuse_if_queued([spec.folder for spec in specs if spec.run not in queued])
    except LaunchError:
        state = "the queue is not checked, as Slurm does not answer"
    for spec in specs:
        if spec.run not in queued:
            refuse_if_owned(spec.folder.lease)
    return f"{plural(len(queued), 'run')} would join jobs in the queue" if queued else state


def queued_specs(configs: Sequence[RunConfig], specs: Sequence[LaunchSpec]) -> dict[str, LaunchSpec]:
    """Returns the stored specs of those runs that have a job in the queue, by run folder, for another job of each.

    The jobs in the queue read config and spec at their next start: both stay as they are.

    Raises:
        LaunchError: Slurm does not answer.
        LockedError: A job in the queue was submitted with another config or layout, or is ending.
    """
    queued = {}
    for config, spec, facts in zip(configs, specs, read_runs([spec.folder.path for spec in specs]), strict=True):
        _check_answers(facts)
        if not facts.queue:
            continue
        stored = load_spec(spec.path)
        if changes := _changes(stored, spec, config):
            raise _locked(
                facts,
                f", submitted with other settings ({', '.join(changes)})",
                f"submit without these changes, or after pretrain launch cancel {facts.path}",
            )
        if facts.queue[0].state == "COMPLETING" or mark_of_cancel(spec.folder).exists():
            raise _locked(facts, "", ENDING)
        queued[spec.run] = stored.model_copy(update={"singleton": True})
    return queued


def _changes(stored: LaunchSpec, spec: LaunchSpec, config: RunConfig) -> list[str]:
    """Returns what differs from the stored spec and config of a run: `nodes: 1 -> 2`."""
    # Of each submission, or computed from the others.
    apart = {"version", "chain", "signal_s", "singleton", "node_counts", "exclude", "site"}
    pairs = {key: (getattr(stored, key), getattr(spec, key)) for key in LaunchSpec.model_fields if key not in apart}
    pairs |= {f"site.{key}": (value, getattr(spec.site, key)) for key, value in stored.site}
    pairs |= changed_keys(load_config(stored.config, extensions="ignore"), config)
    return [f"{key}: {short(old)} -> {short(new)}" for key, (old, new) in pairs.items() if old != new]


def submit(spec: LaunchSpec) -> str:
    """Submits a run whose spec is written; returns the job's number. Undoes an earlier `cancel`.

    Raises:
        ConfigError: Slurm refuses it.
        LaunchError: Slurm does not answer.
        DiskError: The run folder cannot be written to.
    """
    return _submit([spec], spec.path, ())


def submit_array(specs: Mapping[int, LaunchSpec], paths: Sequence[Path]) -> str:
    """Submits runs, by their numbers, whose specs are written as one job array; returns its number.

    `paths` are the specs of all runs, those too that are not submitted now: jobs of an earlier
    array look for theirs in the same list at each start.
    """
    target = array_path(paths[0])
    listed = [str(path) for path in paths]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        listed += read_json(target)["specs"][len(paths) :]
    make_dir(target.parent)
    write_json(target, {"specs": listed})
    return _submit(list(specs.values()), target, list(specs))


def _submit(specs: list[LaunchSpec], target: Path, elements: Sequence[int]) -> str:
    for spec in specs:
        make_dir(spec.folder.logs)
        mark_of_cancel(spec.folder).unlink(missing_ok=True)
    fix = "; ".join(filter(None, ["see `--dry-run`", without_gpus(specs[0])]))
    try:
        job = submit_job(sbatch_command(specs[0], target, elements), fix)
    except PretrainError:
        for spec in specs:
            if not (read_journal(spec.folder) or spec.folder.exists()):  # it was no run before
                spec.path.unlink()
                spec.config.unlink()
        raise
    arrays = [f"{job}_{number}" for number in elements] if elements else [None]
    for spec, array in zip(specs, arrays, strict=True):
        append_row(spec.folder, {"event": "submit", "chain": spec.chain, "job": job, "array": array})
    return job


def without_gpus(spec: LaunchSpec) -> str:
    """Returns the remedy for a job whose GPUs Slurm refuses; empty where it requests none."""
    gpus = spec.gpus_per_node if spec.site.gpus != "none" else 0
    none = "none with --gpus-per-node 0, or with `gpus: none` in the cluster's file"
    return f"it requests GPUs ({gpus} a node): {none}" if gpus else ""


def array_path(first: Path) -> Path:
    """Returns the file that lists the specs of an array, beside the spec of its first element."""
    return first.with_name("array.json")


def cancel(runs: Sequence[Path], grace_s: float, say: Callable[[str], None]) -> None:
    """Cancels every job of some runs; running ones have `grace_s` to commit and end.

    Raises:
        LaunchError: A single run has no Slurm job, or Slurm does not answer; no job comes back
            even so.
    """
    records = read_runs(list(runs))
    ended = [facts for facts in records if facts.slurm_answers and not facts.queue]
    for facts in ended:
        if len(records) == 1 and (facts.job is None or facts.owner):
            raise _no_job(facts)
        say(f"{facts.name}: {_why_not_cancelled(facts)}")
    live = [facts for facts in records if facts not in ended]
    text = b"by pretrain launch cancel; pretrain launch resubmit removes this file\n"
    for facts in live:
        write_file(mark_of_cancel(RunDir(facts.path)), text)
    for facts in live:
        _check_answers(facts)
    _end_jobs(live, grace_s, say)
    for facts in live:
        say(f"{facts.name}: cancelled")


def _end_jobs(runs: Sequence[RunFacts], grace_s: float, say: Callable[[str], None]) -> None:
    jobs = [job for facts in runs for job in facts.queue]
    _scancel([job for job in jobs if job.is_waiting])
    running = [job for job in jobs if not job.is_waiting]
    if running and grace_s:
        running = _ask_to_end([facts.path for facts in runs], running, grace_s, say)
    _scancel(running)


def _why_not_cancelled(facts: RunFacts) -> str:
    if facts.owner:
        return f"run by {facts.owner}"
    if facts.job is None:
        return "has no Slurm job"
    return f"job {facts.job} had ended already: {facts.state}"


def resubmit(run: Path, say: Callable[[str], None]) -> str:
    """Submits the job of a run again with its last settings; returns its id.

    Nodes on which its last chain has failed, or an earlier one since `launch slurm`, are excluded, and named by `say`.

    Raises:
        LaunchError: It has no Slurm job, or Slurm does not answer.
        LockedError: A process works on the run, or a job of it waits or runs.
        ConfigError: The folder is a copy of the run's.
    """
    spec_path = RunDir(run).launch / "spec.json"
    if not spec_path.is_file():
        raise _no_job(read_run(run))
    with claimed([RunDir(run)]):
        spec = load_spec(spec_path)
        if Path(spec.run).resolve() != run.resolve():
            raise ConfigError(
                f"a copy, or moved: its job is that of {spec.run}",
                where=str(run),
                fix="give that folder, or submit this one with pretrain launch slurm",
            )
        signal_s = spec.signal_s
        save_s = last_save_s(RunDir(run))
        # The duration of a save is known by now.
        if spec.site.signal_s is None and save_s is not None:
            signal_s = max(signal_s, min(signal_for(save_s), spec.time_s // 2))
        failing = sorted({*spec.exclude, *find_failing_nodes(read_journal(RunDir(run)), spec.chain)})
        partition = spec.site.partition or ""
        excluded = choose_excluded(failing, partition, min(spec.node_counts), "this job", say)
        changes = {"chain": secrets.token_hex(6), "signal_s": signal_s, "exclude": excluded}
        spec = spec.model_copy(update=changes)
        write_spec(spec, None)
        return submit(spec)


def _no_job(facts: RunFacts) -> LaunchError:
    fix = "start it with pretrain launch slurm"
    if facts.owner:
        fix = f"it is run by {facts.owner}: press Ctrl-C there, or send SIGTERM to its launcher"
    return LaunchError("the run has no Slurm job", where=str(facts.path), fix=fix)


def _check_answers(facts: RunFacts) -> None:
    if not facts.slurm_answers:
        raise LaunchError(
            f"Slurm does not answer about job {facts.job}",
            where="squeue",
            fix="try again where squeue works",
        )


def _ask_to_end(
    runs: list[Path], running: list[SlurmJob], grace_s: float, say: Callable[[str], None]
) -> list[SlurmJob]:
    """Asks running jobs to save and end; returns those that have not after `grace_s`."""
    for job in running:
        say(f"job {job.element}: asked to save and end")
        # To the batch script alone, which signals the ranks. The job may have just ended.
        ask(["scancel", "--batch", "--signal=USR1", job.element])
    deadline = time.monotonic() + grace_s
    while running := [job for facts in read_runs(runs) for job in facts.queue if not job.is_waiting]:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    for job in running:
        say(f"job {job.element}: has not ended in {grace_s:g} s: Slurm ends it")
    return running


def _scancel(jobs: list[SlurmJob]) -> None:
    """Ends jobs, if there are any. Raises: LaunchError if Slurm refuses."""
    if not jobs:
        return
    command = ["scancel", *(job.element for job in jobs)]
    answer = ask(command)
    if answer.code:
        raise LaunchError(answer.complaint, where=" ".join(command), fix="try again")
