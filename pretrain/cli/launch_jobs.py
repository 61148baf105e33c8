"""`pretrain launch status`, `logs`, `cancel` and `resubmit`: what one does with a run that was launched."""

from pathlib import Path
from typing import Annotated

import typer

from pretrain.cli.options import Json

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]


def status_command(run: RunFolder, as_json: Json = False) -> None:
    """Say how a run is: its state, step, job, and how each of its starts ended.

    Example: pretrain launch status runs/quickstart
    """
    import json

    from launch.runs import read_run

    facts = read_run(_checked(run))
    if as_json:
        print(json.dumps(facts.facts(), indent=2))
    else:
        from rich.console import Console

        from launch.show import show_run

        show_run(facts, Console(highlight=False))


def logs_command(
    run: RunFolder,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines of its end to begin with.")] = 40,
    rank: Annotated[int | None, typer.Option(min=0, help="The log of one rank. Default: the job's output.")] = None,
) -> None:
    """Show what a run prints.

    Example: pretrain launch logs -f runs/quickstart
    """
    from launch import logs
    from launch.runs import read_run
    from pretrain.run.folder import RunDir

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
    grace: Annotated[float, typer.Option(min=0, help="Seconds to save a checkpoint in; 0: end it at once.")] = 120.0,
) -> None:
    """Cancel the Slurm job of a run, for good: it saves a checkpoint, ends, and is not requeued.

    Example: pretrain launch cancel runs/quickstart
    """
    from launch.cancel import cancel
    from pretrain.utils.streams import discard_refused_stdout

    discard_refused_stdout()  # a job is cancelled to the end, also where the terminal has gone
    cancel(_checked(run), grace, typer.echo)


def resubmit_command(run: RunFolder) -> None:
    """Submit the Slurm job of a run again, with the settings that it had.

    Example: pretrain launch resubmit runs/quickstart
    """
    from launch.cancel import resubmit

    typer.echo(f"submitted as job {resubmit(_checked(run))}")


def _checked(run: Path) -> Path:
    """Returns the folder. Raises: ConfigError where no run is there."""
    from launch.runs import is_run
    from pretrain.errors import ConfigError

    if not is_run(run):
        raise ConfigError("no run here (no run.json, no launch/spec.json)", where=str(run), fix="give a run folder")
    return run.absolute()
