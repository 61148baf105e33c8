"""From a spec to a job in the queue: the options of sbatch, and the job's number."""

from pathlib import Path

from launch.journal import append_row, mark_of_cancel
from launch.site import EXPORTED, slurm_folder
from launch.slurm_tools import submit_job
from launch.spec import LaunchSpec
from pretrain.run.folder import RunDir
from pretrain.utils.io import make_dir, write_json

"""File in the launch folder that keeps a job from coming back."""


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
    """Nodes and their CPUs. Of a range of nodes Slurm gives the fewest where it is told the tasks of each."""
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
