"""Commands of `pretrain launch`: local, slurm, status, logs, cancel, resubmit."""

import glob
import json
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer import Option

from pretrain.cli.nodes import launch_local_command, launch_manifest_command
from pretrain.cli.options import (
    CommandGroup,
    Config,
    Json,
    Overrides,
    RunFolder,
    complete_line,
    console,
    print_json,
)
from pretrain.errors import ConfigError

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig
    from pretrain_launch.preflight import LaunchRequest
    from pretrain_launch.site import SiteConfig
    from pretrain_launch.spec import LaunchSpec, Mode

MAX_SWEEP = 8  # runs of a sweep that an error names

launch_app = CommandGroup(
    "Start the ranks of a run, here or by Slurm.\n\n"
    "Example: pretrain launch local configs/run/quickstart.yaml --ranks 2"
)
launch_app.command("local")(launch_local_command)


@launch_app.command("slurm")
def launch_slurm_command(
    config: Config,
    overrides: Overrides = None,
    nodes: Annotated[int, Option(min=1, help="Nodes; with launch.elastic the maximum.")] = 1,
    time: Annotated[str, Option(help="Time limit of a job: 2-00:00:00, 3d, 12h.")] = "1d",
    gpus_per_node: Annotated[int | None, Option(min=0, help="Default: one per rank.")] = None,
    ranks_per_node: Annotated[int | None, Option(min=1, help="Default: one per GPU.")] = None,
    cluster: Annotated[str | None, Option(help="A YAML file, or a name (slurm/README.md).")] = None,
    partition: Annotated[str | None, Option(help="Override of the cluster's setting.")] = None,
    mode: Annotated[str, Option(help="torchrun, srun, accelerate or deepspeed.")] = "torchrun",
    vary: Annotated[
        list[str] | None, Option(metavar="KEY=A,B,..", help="Submit a run per value; twice: per pair of values.")
    ] = None,
    singleton: Annotated[bool, Option("--singleton", help="Wait for jobs of this name.")] = False,
    jobs: Annotated[int, Option(min=1, max=1000, help="Submit a chain of N jobs.")] = 1,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the job instead.")] = False,
    force: Annotated[bool, Option("--force", help="Submit although it may not fit.")] = False,
) -> None:
    """Submit a run to Slurm; it saves before its time limit, and is requeued until it is done.

    Several configs, or values of --vary, are a job array: runs NAME-0, NAME-1, ..., by run.name of the first config.

    Example: pretrain launch slurm configs/run/quickstart.yaml --nodes 2 --time 1d --dry-run
    """
    from pretrain.config.load import load_config
    from pretrain.utils.log import setup_logging
    from pretrain_launch.preflight import MODES, LaunchRequest, parse_vary

    setup_logging(rank=0, world_size=1)
    if mode not in MODES:
        raise ConfigError(
            f"unknown mode {mode[:40]!r}",
            where="--mode",
            fix=f"use {' or '.join(MODES)}",
        )
    site = chosen_site(cluster, partition)
    # The jobs of a chain run one after another.
    waits = singleton or jobs > 1
    request = LaunchRequest(nodes, time, gpus_per_node, ranks_per_node, cast("Mode", mode), waits)
    words = [config, *(overrides or [])]
    settings = [word for word in words[1:] if "=" in word]
    configs = [words[0], *(word for word in words[1:] if "=" not in word)]
    load = partial(load_config, extensions="ask" if dry_run else "import")
    loaded = [load(config, settings)]
    is_array = bool(vary) or len(configs) > 1
    if is_array:
        if jobs > 1:
            raise ConfigError(
                "is not for arrays",
                where="--jobs",
                fix="leave it out, or submit one run: one config, without --vary",
            )
        first = loaded[0]
        name = first.run.name
        shared = [*settings, f"tracking.group={json.dumps(first.tracking.group or name)}"]
        elements = enumerate(product(configs, parse_vary(vary or [])))
        loaded = [load(one, [*shared, *items, f"run.name={name}-{number}"]) for number, (one, items) in elements]
    submit_runs(loaded, request, site, jobs=jobs, dry_run=dry_run, force=force)


def submit_runs(
    configs: "list[RunConfig]",
    request: "LaunchRequest",
    site: "SiteConfig",
    *,
    jobs: int = 1,
    dry_run: bool = False,
    force: bool = False,
    left_out: Mapping[str, str] | None = None,
) -> None:
    """Submits a run, or of several, named NAME-0, NAME-1, ..., those without a job as an array.

    Runs that have all their steps are left out too. `left_out` are names of further runs that are
    not submitted, with the reason.

    Raises:
        PretrainError: What cannot work, or may not unless `force` is given; what Slurm refuses.
    """
    from pretrain_launch.preflight import align_array, check_partition
    from pretrain_launch.submit import check_queue

    lines = [(left_out or {}).get(one.run.name, "") or complete_line(one) for one in configs]
    if len(configs) > 1 and not request.singleton:
        lines = [line or queued for line, queued in zip(lines, _queued_lines(configs), strict=True)]
    for line in filter(None, lines):
        typer.echo(line)
    specs = {
        number: _planned(one, request, site, force)
        for number, (one, line) in enumerate(zip(configs, lines, strict=True))
        if not line
    }
    if not specs:
        return
    specs = align_array(specs)
    first = next(iter(specs.values()))
    partition = "the partition is not checked" if force else check_partition(first)
    if not dry_run:
        _submit(configs, specs, jobs)
        return
    queue = check_queue([configs[number] for number in specs], list(specs.values()))
    place = f"{partition}; {queue}; {_show(first, configs, list(specs))}"
    typer.echo(f"not submitted; config, data and run folder are checked; {place}", err=True)


def _queued_lines(configs: "list[RunConfig]") -> list[str]:
    """Returns for each run the sentence that a job of it is in the queue; empty without one."""
    from pretrain_launch.runs import read_runs

    lines = []
    for facts in read_runs([config.folder.absolute() for config in configs]):
        jobs = [f"job {job.element} is {job.state}" for job in facts.queue]
        lines.append(f"{facts.path} is left out: {jobs[0]}" if jobs else "")
    return lines


launch_app.command("manifest")(launch_manifest_command)


@launch_app.command("status")
def status_command(run: RunFolder, as_json: Json = False) -> None:
    """Say how a run is: its state, step, job, and how each of its starts ended.

    Example: pretrain launch status runs/quickstart
    """
    from pretrain_launch.runs import read_run

    facts = read_run(_checked(run))
    if as_json:
        print_json(facts.facts())
    else:
        from pretrain_launch.job_table import show_run

        show_run(facts, console())


@launch_app.command("logs")
def logs_command(
    run: RunFolder,
    follow: Annotated[bool, Option("--follow", "-f", help="Follow until the run ends.")] = False,
    lines: Annotated[int, Option("--lines", "-n", min=0, help="Lines to show from the end.")] = 40,
    rank: Annotated[int | None, Option(min=0, help="Log of a rank. Default: the job's.")] = None,
) -> None:
    """Show what a run prints.

    Example: pretrain launch logs -f runs/quickstart
    """
    from pretrain.run.folder import RunDir
    from pretrain.utils.log import printable
    from pretrain_launch import logs
    from pretrain_launch.runs import log_line, read_run

    folder = RunDir(_checked(run))
    if follow and rank is None:  # a rank that is not there may never be
        logs.await_log(folder, lambda: read_run(folder.path).is_over)
    path = logs.find_log(folder, rank, lambda: log_line(folder.path))
    text, offset = logs.last_lines(path, lines)
    typer.echo(printable(text, keep="\n\t"), nl=False)
    if follow:
        is_over = logs.seldom(lambda: read_run(folder.path).is_over)
        for piece in logs.follow(lambda: logs.find_log(folder, rank), path, offset, is_over):
            typer.echo(printable(piece, keep="\n\t"), nl=False)
        typer.echo(f"launch: the run is {read_run(folder.path).state}", err=True)


@launch_app.command("cancel")
def cancel_command(
    run: RunFolder,
    grace: Annotated[float, Option(min=0, help="Seconds for a save; 0: end at once.")] = 120.0,
) -> None:
    """Cancel the Slurm job of a run, for good: it saves a checkpoint, ends, and is not requeued.

    The folder of a ladder, or the name of a sweep, cancels all of its runs.

    Example: pretrain launch cancel runs/quickstart
    """
    from pretrain.utils.process import discard_refused_stdout
    from pretrain_launch.submit import cancel

    discard_refused_stdout()  # a job is cancelled to the end, also where the terminal has gone
    cancel(_runs_of(run), grace, typer.echo)


@launch_app.command("resubmit")
def resubmit_command(run: RunFolder) -> None:
    """Submit the Slurm job of a run again, with the settings that it had.

    Example: pretrain launch resubmit runs/quickstart
    """
    from pretrain.config.load import load_config
    from pretrain.run.folder import RunDir
    from pretrain_launch.submit import resubmit

    config = RunDir(_checked(run)).launch / "config.yaml"
    if config.is_file() and (complete := complete_line(load_config(config, extensions="ignore"))):
        typer.echo(complete)
    else:
        typer.echo(f"submitted as job {resubmit(run.absolute(), typer.echo)}")


def _runs_of(folder: Path) -> list[Path]:
    """Returns the run in a folder, or all runs of the ladder there, or of the sweep of its name.

    Raises:
        ConfigError: There is none.
    """
    from pretrain_launch.runs import is_run

    runs: list[Path] = []
    if (folder / "ladder.yaml").is_file():
        from pretrain.scale.ladder import load_ladder, run_path

        runs = [run_path(folder, run.name) for run in load_ladder(folder).runs]
    elif not is_run(folder):
        runs = _elements(folder)
    return [run.absolute() for run in runs if is_run(run)] or [_checked(folder)]


def _elements(sweep: Path) -> list[Path]:
    """Returns the runs of the sweep of a name."""
    from pretrain_launch.runs import is_run

    named = (run for run in sweep.parent.glob(f"{glob.escape(sweep.name)}-[0-9]*") if is_run(run))
    return sorted(named, key=lambda run: (len(run.name), run.name))


def _checked(run: Path) -> Path:
    """Returns the folder. Raises: ConfigError where no run is there."""
    from pretrain_launch.runs import is_run

    if not is_run(run):
        text = "no run here (no run.json, no launch/spec.json)"
        of_sweep = _elements(run)[:MAX_SWEEP]
        fix = f"give one of its sweep: {', '.join(map(str, of_sweep))}" if of_sweep else "give a run folder"
        if (run / "logs").is_dir():  # the first start ended before the run was recorded
            text, fix = "no run has begun here: its start has failed", f"see {run / 'logs'}"
        raise ConfigError(text, where=str(run), fix=fix)
    return run.absolute()


def chosen_site(cluster: str | None, partition: str | None) -> "SiteConfig":
    """Returns the settings of a cluster, with the partition if one is given. Raises: ConfigError."""
    import pydantic

    from pretrain_launch.site import SiteConfig, load_site

    site = load_site(cluster)
    if partition is None:
        return site
    try:
        return SiteConfig.model_validate({**site.model_dump(), "partition": partition})
    except pydantic.ValidationError:
        raise ConfigError(
            f"{partition[:40]!r} is no name of a partition",
            where="--partition",
            fix="see `sinfo`",
        ) from None


def _planned(config: "RunConfig", request: "LaunchRequest", site: "SiteConfig", force: bool) -> "LaunchSpec":
    """Returns the job of a run; refuses what cannot work, and warns of what may not."""
    import sys

    import pydantic

    from pretrain_launch.preflight import check_site, plan_job

    run = str(config.folder.absolute())
    try:
        spec, problems = plan_job(config, request, site, run, str(Path.cwd()), sys.executable)
    except pydantic.ValidationError as error:
        # The spec refuses what a shell or Slurm would read in another way.
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{str(first['input'])[:200]!r} cannot be passed to Slurm",
            where=place,
            fix="no control characters, % or backslash in paths",
        ) from None
    check_site(config, spec)
    for problem in problems:
        if problem.refuses and not force:
            raise problem.error()
        typer.echo(f"warning: {spec.name}: {problem.what}; {problem.fix}", err=True)
    return spec


def _spec_paths(configs: "list[RunConfig]") -> list[Path]:
    from pretrain.run.folder import RunDir

    return [RunDir(config.folder.absolute()).launch / "spec.json" for config in configs]


def _show(spec: "LaunchSpec", configs: "list[RunConfig]", numbers: list[int]) -> str:
    """Prints script, command and spec; returns what Slurm says of the job. Raises: ConfigError."""
    import shlex

    from pretrain_launch.slurm_tools import try_job
    from pretrain_launch.submit import array_path, sbatch_command, script_path, without_gpus

    is_array = len(configs) > 1
    target = array_path(_spec_paths(configs)[0]) if is_array else spec.path
    typer.echo(script_path().read_text(encoding="utf-8"))
    command = sbatch_command(spec, target, numbers if is_array else ())
    typer.echo(f"$ {shlex.join(command)}\n")
    typer.echo(f"{spec.path}:\n{json.dumps(spec.model_dump(mode='json'), indent=2)}")
    return try_job(command, without_gpus(spec))


def _submit(configs: "list[RunConfig]", specs: "dict[int, LaunchSpec]", jobs: int) -> None:
    """Writes the specs of some of the runs and submits them: as an array, or one several times."""
    from pretrain.config.load import dump_config
    from pretrain.utils.units import plural
    from pretrain_launch.spec import write_spec
    from pretrain_launch.submit import claimed, queued_specs, submit, submit_array

    chosen = [configs[number] for number in specs]
    # Under --singleton a job waits for those of the run, whose settings stay.
    is_singleton = any(spec.singleton for spec in specs.values())
    queued = queued_specs(chosen, list(specs.values())) if is_singleton else {}
    with claimed([spec.folder for spec in specs.values() if spec.run not in queued]):
        for config, spec in zip(chosen, specs.values(), strict=True):
            if spec.run not in queued:
                write_spec(spec, dump_config(config))
        specs = {number: queued.get(spec.run, spec) for number, spec in specs.items()}
        if len(configs) > 1:
            job = submit_array(specs, _spec_paths(configs))
            typer.echo(f"submitted {plural(len(specs), 'run')} as job array {job}:")
            typer.echo("\n".join(spec.run for spec in specs.values()))
            return
        for _ in range(jobs):
            typer.echo(f"submitted as job {submit(specs[0])}: {specs[0].run}")
