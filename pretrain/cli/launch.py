"""The commands of `pretrain launch`."""

from pathlib import Path
from typing import Annotated

import typer

from pretrain.cli.launch_slurm import launch_slurm_command
from pretrain.cli.options import Config, Overrides

launch_app = typer.Typer(
    help="Start the ranks of a run.\n\nExample: pretrain launch local configs/run/quickstart.yaml --ranks 2",
    no_args_is_help=True,
)


@launch_app.command("local")
def launch_local_command(
    config: Config,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes to start; with GPUs, one for each.")] = 1,
    port: Annotated[int | None, typer.Option(help="Rendezvous port. None: a free one.")] = None,
) -> None:
    """Train on this machine with several ranks.

    Example: pretrain launch local configs/run/quickstart.yaml --ranks 2
    """
    from launch.local import launch_local
    from pretrain.config.data import plan_batch
    from pretrain.config.load import load_config
    from pretrain.run.folder import RunDir
    from pretrain.run.lease import refuse_if_owned
    from pretrain.shards.dataset import check_local
    from pretrain.utils.streams import discard_refused_stdout

    discard_refused_stdout()
    loaded = load_config(config, overrides or [])
    plan_batch(loaded.batch, ranks)
    check_local(loaded.data)
    run = RunDir(Path(loaded.run.dir) / loaded.run.name)
    refuse_if_owned(run.lease)
    raise typer.Exit(launch_local(config, overrides or [], ranks, port, run.logs))


launch_app.command("slurm")(launch_slurm_command)
