"""`pretrain runs`."""

from pathlib import Path
from typing import Annotated

import typer

from pretrain.cli.options import Json


def runs_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with runs in it.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs below a folder: state, step, loss, speed, last checkpoint, Slurm job, restarts.

    Example: pretrain runs runs
    """
    import json

    from launch.runs import find_runs, read_runs
    from pretrain.errors import ConfigError

    if not folder.is_dir():
        raise ConfigError("no such folder", where=str(folder), fix="give a folder with runs in it")
    runs = read_runs(find_runs(folder))
    if as_json:
        print(json.dumps([run.facts() for run in runs], indent=2))
    elif not runs:
        typer.echo(f"no runs in {folder}")
    else:
        from rich.console import Console

        from launch.show import show_runs

        show_runs(runs, folder, Console(highlight=False))
