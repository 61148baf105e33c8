"""Commands of `pretrain launch`: local, slurm, status, logs, cancel, resubmit."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pretrain.cli.options import Config, Json, Overrides

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig
    from pretrain.plan.search import Problem
    from pretrain_launch.preflight import LaunchRequest
    from pretrain_launch.site import SiteConfig
    from pretrain_launch.spec import LaunchSpec


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]


def status_command(run: RunFolder, as_json: Json = False) -> None:
    """Say how a run is: its state, step, job, and how each of its starts ended.

    Example: pretrain launch status runs/quickstart
    """
    import json

    from pretrain_launch.runs import read_run

    facts = read_run(_checked(run))
    if as_json:
        print(json.dumps(facts.facts(), indent=2))
    else:
        from rich.console import Console

        from pretrain_launch.job_table import show_run

        show_run(facts, Console(highlight=False))


def logs_command(
    run: RunFolder,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the output until the run ends.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines to show from the end.")] = 40,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Show the log of this rank. Default: the job's output.")
    ] = None,
) -> None:
    """Show what a run prints.

    Example: pretrain launch logs -f runs/quickstart
    """
    from pretrain.run.folder import RunDir
    from pretrain_launch import logs
    from pretrain_launch.runs import read_run

    folder = RunDir(_checked(run))
    path = logs.find_log(folder, rank)
    text, offset = logs.last_lines(path, lines)
    typer.echo(text, nl=False)
    if follow:
        is_over = logs.seldom(lambda: read_run(folder.path).is_over)
        for piece in logs.follow(lambda: logs.find_log(folder, rank), path, offset, is_over):
            typer.echo(piece, nl=False)
        typer.echo(f"launch: the run is {read_run(folder.path).state}", err=True)


def cancel_command(
    run: RunFolder,
    grace: Annotated[float, typer.Option(min=0, help="Seconds to wait for a checkpoint; 0: end at once.")] = 120.0,
) -> None:
    """Cancel the Slurm job of a run, for good: it saves a checkpoint, ends, and is not requeued.

    Example: pretrain launch cancel runs/quickstart
    """
    from pretrain.utils.process import discard_refused_stdout
    from pretrain_launch.submit import cancel

    discard_refused_stdout()  # a job is cancelled to the end, also where the terminal has gone
    cancel(_checked(run), grace, typer.echo)


def resubmit_command(run: RunFolder) -> None:
    """Submit the Slurm job of a run again, with the settings that it had.

    Example: pretrain launch resubmit runs/quickstart
    """
    from pretrain_launch.submit import resubmit

    typer.echo(f"submitted as job {resubmit(_checked(run))}")


def _checked(run: Path) -> Path:
    """Returns the folder. Raises: ConfigError where no run is there."""
    from pretrain.errors import ConfigError
    from pretrain_launch.runs import is_run

    if not is_run(run):
        raise ConfigError("no run here (no run.json, no launch/spec.json)", where=str(run), fix="give a run folder")
    return run.absolute()


# `pretrain launch slurm`.


def launch_slurm_command(
    config: Config,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes; with launch.elastic the maximum.")] = 1,
    time: Annotated[
        str, typer.Option(help="Time limit of a job: 2-00:00:00, 3d, 12h. A requeued run continues.")
    ] = "1d",
    gpus_per_node: Annotated[int | None, typer.Option(min=0, help="GPUs per node. Default: one per rank.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks per node. Default: one per GPU.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Cluster: a YAML file, or a name (slurm/README.md).")] = None,
    partition: Annotated[str | None, typer.Option(help="Override of the cluster's setting.")] = None,
    mode: Annotated[str, typer.Option(help="Launcher: torchrun, srun, accelerate or deepspeed.")] = "torchrun",
    vary: Annotated[
        str | None, typer.Option(metavar="KEY=A,B,..", help="Submit a job array with one run per value.")
    ] = None,
    singleton: Annotated[bool, typer.Option("--singleton", help="Wait for other jobs of the same name.")] = False,
    jobs: Annotated[int, typer.Option(min=1, max=1000, help="Submit a chain of N jobs.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job without submitting it.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Submit even if it is predicted not to fit.")] = False,
) -> None:
    """Submit a run to Slurm; it saves before its time limit, comes back, and goes on until it is done.

    Example: pretrain launch slurm configs/run/quickstart.yaml --nodes 2 --time 1d --dry-run
    """
    from pretrain.config.load import load_config
    from pretrain.errors import ConfigError
    from pretrain.utils.log import setup_logging
    from pretrain_launch.preflight import MODES, LaunchRequest, parse_vary
    from pretrain_launch.site import load_site

    setup_logging(rank=0, world_size=1)
    if mode not in MODES:
        raise ConfigError(f"unknown mode {mode[:40]!r}", where="--mode", fix=f"use {' or '.join(MODES)}")
    if vary is not None and jobs > 1:
        raise ConfigError("is not for arrays", where="--jobs", fix="leave out one of --jobs and --vary")
    site = load_site(cluster)
    if partition is not None:
        site = with_partition(site, partition)
    request = LaunchRequest(nodes, time, gpus_per_node, ranks_per_node, mode, singleton or jobs > 1)  # type: ignore[arg-type]
    given = overrides or []
    loaded = [load_config(config, given)]
    if vary is not None:
        name = loaded[0].run.name
        elements = enumerate(parse_vary(vary))
        loaded = [load_config(config, [*given, item, f"run.name={name}-{number}"]) for number, item in elements]
    planned = [plan(one, request, site) for one in loaded]
    for spec, problems in planned:
        weigh(spec.name, problems, force)
    if dry_run:
        show(planned[0][0], len(planned))
        return
    submit_all(loaded, [spec for spec, _ in planned], jobs)


def with_partition(site: "SiteConfig", partition: str) -> "SiteConfig":
    """Returns a site with another partition. Raises: ConfigError, where it is no name of one."""
    import pydantic

    from pretrain.errors import ConfigError
    from pretrain_launch.site import SiteConfig

    try:
        return SiteConfig.model_validate({**site.model_dump(), "partition": partition})
    except pydantic.ValidationError:
        raise ConfigError(
            f"{partition[:40]!r} is no name of a partition", where="--partition", fix="see `sinfo`"
        ) from None


def plan(config: "RunConfig", request: "LaunchRequest", site: "SiteConfig") -> "tuple[LaunchSpec, list[Problem]]":
    """Returns the job of a run, and what is wrong with it. Raises: ConfigError."""
    import sys

    import pydantic

    from pretrain.errors import ConfigError
    from pretrain_launch.preflight import check_site, plan_job

    run = config.folder.absolute()
    try:
        spec, problems = plan_job(config, request, site, str(run), str(Path.cwd()), sys.executable)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place, value = ".".join(str(part) for part in first["loc"]), str(first["input"])
        raise ConfigError(
            f"{value[:200]!r} cannot be passed to Slurm",
            where=place,
            fix="no control characters, % or backslash in paths",
        ) from None
    check_site(config, spec)
    return spec, problems


def weigh(name: str, problems: "list[Problem]", force: bool) -> None:
    """Refuses what cannot work, and warns of what may not. Raises: ConfigError."""
    for problem in problems:
        if problem.refuses and not force:
            raise problem.error()
        typer.echo(f"warning: {name}: {problem.what}; {problem.fix}", err=True)


def show(spec: "LaunchSpec", count: int) -> None:
    """Prints the script, the command line and the spec."""
    import json
    import shlex

    from pretrain_launch.submit import array_path, sbatch_command, script_path

    target = spec.path if count == 1 else array_path(spec.folder)
    typer.echo(script_path().read_text(encoding="utf-8"))
    typer.echo(f"$ {shlex.join(sbatch_command(spec, target, count))}\n")
    typer.echo(f"{spec.path}:\n{json.dumps(spec.model_dump(mode='json'), indent=2)}")


def submit_all(configs: "list[RunConfig]", specs: "list[LaunchSpec]", jobs: int) -> None:
    """Writes specs and submits them: as they are, as an array, or one several times."""
    from pretrain.config.load import dump_config
    from pretrain_launch.spec import write_spec
    from pretrain_launch.submit import submit, submit_array

    for config, spec in zip(configs, specs, strict=True):
        write_spec(spec, dump_config(config))
    if len(specs) > 1:
        typer.echo(f"submitted {len(specs)} runs as job array {submit_array(specs)}")
        return
    for _ in range(jobs):
        typer.echo(f"submitted as job {submit(specs[0])}: {specs[0].run}")


# The commands of `pretrain launch`.


launch_app = typer.Typer(
    help="Start the ranks of a run.\n\nExample: pretrain launch local configs/run/quickstart.yaml --ranks 2",
    no_args_is_help=True,
)


@launch_app.command("local")
def launch_local_command(
    config: Config,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes to start; on GPUs, one per GPU.")] = 1,
    port: Annotated[int | None, typer.Option(help="Rendezvous port. Default: a free port.")] = None,
) -> None:
    """Train on this machine with several ranks.

    Example: pretrain launch local configs/run/quickstart.yaml --ranks 2
    """
    from pretrain.config.data import plan_batch
    from pretrain.config.load import load_config
    from pretrain.run.folder import RunDir
    from pretrain.run.lease import refuse_if_owned
    from pretrain.shards.dataset import check_local
    from pretrain.utils.process import discard_refused_stdout
    from pretrain_launch.local import launch_local

    discard_refused_stdout()
    loaded = load_config(config, overrides or [])
    plan_batch(loaded.batch, ranks)
    check_local(loaded.data)
    run = RunDir(loaded.folder)
    refuse_if_owned(run.lease)
    raise typer.Exit(launch_local(config, overrides or [], ranks, port, run.logs))


launch_app.command("slurm")(launch_slurm_command)
