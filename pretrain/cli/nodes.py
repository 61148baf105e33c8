"""`pretrain launch local` and `manifest`: ranks of a machine, and jobs that start it on many."""

import contextlib
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from pretrain.cli.options import Config, Overrides, complete_line
from pretrain.errors import EXIT_OK, ConfigError

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig
    from pretrain.run.worlds import Worlds
    from pretrain_launch.local import NodePlace


def launch_local_command(
    config: Config,
    overrides: Overrides = None,
    ranks: Annotated[int, Option(min=1, help="Processes to start; on GPUs, one per GPU.")] = 1,
    port: Annotated[int | None, Option(help="Rendezvous port. Default: a free port.")] = None,
    nodes: Annotated[int, Option(min=1, help="Machines that run this command.")] = 1,
    node_rank: Annotated[int, Option(min=0, help="Number of this machine.")] = 0,
    address: Annotated[str | None, Option(help="Address of machine 0, for the others.")] = None,
) -> None:
    """Train on this machine with several ranks; with --nodes as one of several machines.

    Example: pretrain launch local configs/run/quickstart.yaml --ranks 2
    """
    from pretrain.utils.process import discard_refused_stdout
    from pretrain_launch.local import ALONE, NodePlace

    discard_refused_stdout()
    place = ALONE
    if nodes > 1:
        if address is None or port is None or node_rank >= nodes:
            raise ConfigError(
                "several machines have to meet",
                where="--nodes",
                fix=f"give --address and --port of machine 0, and a --node-rank from 0 to {nodes - 1}",
            )
        place = NodePlace(nodes, node_rank, address)
    raise typer.Exit(train_local(config, overrides or [], ranks, port, place))


def train_local(
    config: str, overrides: list[str], ranks: int, port: int | None = None, place: "NodePlace | None" = None
) -> int:
    """Checks a config and trains it here, unless its run is complete; returns the exit code.

    `place` is that of this machine among several. Raises: PretrainError: What a user can fix,
    before a rank is started.
    """
    from pretrain.config.load import load_config
    from pretrain.config.resumption import check_start
    from pretrain.run.folder import RunDir
    from pretrain.run.lease import refuse_if_owned
    from pretrain.shards.dataset import check_local
    from pretrain.utils.units import plural
    from pretrain_launch.local import ALONE, launch_local
    from pretrain_launch.runs import queued_line

    place = place or ALONE
    loaded = load_config(config, overrides)
    if complete := complete_line(loaded):
        typer.echo(complete)
        return EXIT_OK
    # Here an error is one line; in the ranks it would be one of each.
    loaded.plan_ranks(ranks * place.nodes)
    check_local(loaded.data)
    run = RunDir(loaded.folder)
    check_start(loaded, has_saved=run.has_saved())
    if place.rank == 0:  # which may own the run already
        refuse_if_owned(run.lease)
    if warning := queued_line(run.path):
        typer.echo(warning, err=True)
    here = f", machine {place.rank} of {place.nodes}" if place.nodes > 1 else ""
    typer.echo(f"launch: starting {plural(ranks, 'rank')} of {run.path}{here}", err=True)
    main = None
    if loaded.engine.fork_ranks:
        _import_rank(loaded, ranks, ranks * place.nodes)
        main = partial(resolve_name("pretrain.cli.commands:run"), ["train", config, *overrides])
    worlds = _worlds(loaded, place.nodes)
    return launch_local(config, overrides, ranks, port, run.logs, place, main, worlds)


def _worlds(config: "RunConfig", nodes: int) -> "Worlds | None":
    """Returns the decisions that `run.recover` asks for; None: a lost rank ends the job."""
    from pretrain.run.folder import RunDir
    from pretrain.run.worlds import Worlds

    mode = config.run.recover
    if mode == "off" or nodes > 1:
        return None

    def fits(ranks: int) -> bool:
        with contextlib.suppress(ConfigError):
            config.plan_ranks(ranks)
            return True
        return False

    return Worlds(RunDir(config.folder), mode, fits, copies=config.run.recover_every_steps > 0)


def _import_rank(config: "RunConfig", ranks: int, world_size: int) -> None:
    """Imports what a rank needs into this process, whose forks are the ranks."""
    from pretrain_launch.local import importing

    with importing(ranks):
        from pretrain.training.rank_imports import import_for_ranks

        import_for_ranks(config, world_size)


def launch_manifest_command(
    config: Config,
    overrides: Overrides = None,
    to: Annotated[str, Option(help="jobset, pytorchjob, skypilot or torchx.")] = "jobset",
    image: Annotated[str, Option(help="Container image with pretrain in it.")] = "pretrain:latest",
    nodes: Annotated[int, Option(min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int | None, Option(min=0, help="Default: one per rank.")] = None,
    ranks_per_node: Annotated[int | None, Option(min=1, help="Default: one per GPU.")] = None,
    volume: Annotated[str | None, Option(metavar="CLAIM:/FOLDER", help="Shared volume of data and runs.")] = None,
    secret: Annotated[str | None, Option(help="Secret whose keys become variables.")] = None,
    gpu_type: Annotated[str | None, Option(help="Kind of GPU, for skypilot: H100.")] = None,
    python: Annotated[str, Option(help="Interpreter in the image.")] = "python",
) -> None:
    """Print the job of a run for Kubernetes, SkyPilot or torchx, complete with its config.

    It restarts until the run is done; what a restart cannot help ends it.

    Example: pretrain launch manifest quickstart --nodes 2 --volume training:/mnt | kubectl apply -f -
    """
    from pretrain.config.load import dump_config, load_config
    from pretrain_launch.manifests import (
        KINDS,
        ClusterJob,
        check_job,
        parse_volume,
        write_job,
    )
    from pretrain_launch.preflight import LaunchRequest, plan_job
    from pretrain_launch.site import SiteConfig

    if to not in KINDS:
        raise ConfigError(
            f"unknown scheduler {to[:40]!r}",
            where="--to",
            fix=f"use {', '.join(KINDS[:-1])} or {KINDS[-1]}",
        )
    loaded = load_config(config, overrides or [], extensions="ask")
    request = LaunchRequest(nodes, "30d", gpus_per_node, ranks_per_node)
    run = str(loaded.folder.absolute())
    spec, problems = plan_job(loaded, request, SiteConfig(), run, str(Path.cwd()), "/usr/bin/python3")
    for problem in problems:
        if problem.refuses:
            raise problem.error()
        typer.echo(f"warning: {spec.name}: {problem.what}; {problem.fix}", err=True)
    mount = None if volume is None else parse_volume(volume)
    text = dump_config(loaded)
    job = ClusterJob(spec, text, image, python, mount, secret, gpu_type)
    has_upload = loaded.checkpoint.upload is not None
    check_job(to, job, has_upload=has_upload, data=loaded.data.paths)
    typer.echo(write_job(to, job), nl=False)
