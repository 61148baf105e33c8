"""`pretrain config`, `train`, `rollback`, `runs` and `report`."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from pretrain.cli.completion import complete_config, complete_key, complete_run
from pretrain.cli.options import (
    Config,
    Json,
    Overrides,
    RunFolder,
    UsageError,
    complete_line,
    console,
    count_from,
    print_json,
)
from pretrain.errors import ConfigError, DiskError


def config_command(
    context: typer.Context,
    config: Annotated[
        str | None,
        Argument(
            metavar="CONFIG", help="A YAML file, or a name of `pretrain recipes`.", autocompletion=complete_config
        ),
    ] = None,
    overrides: Overrides = None,
    explain: Annotated[
        str | None, Option(metavar="KEY", help="Print the meaning of a key.", autocompletion=complete_key)
    ] = None,
    changed: Annotated[bool, Option("--changed", help="Print what is not a default.")] = False,
    schema: Annotated[bool, Option("--schema", help="Print a JSON schema for editors.")] = False,
    reference: Annotated[bool, Option("--reference", help="Print docs/config.md.")] = False,
) -> None:
    """Print the resolved config: every key, every default. Or the meaning of a key, or of all.

    Example: pretrain config configs/run/quickstart.yaml optim.lr=3e-4
    """
    from pretrain.config.fields import explain_key, json_schema, write_reference
    from pretrain.config.load import dump_config, load_config

    if explain is not None:
        typer.echo(explain_key(explain))
    elif schema:
        print_json(json_schema())
    elif reference:
        typer.echo(write_reference(), nl=False)
    elif config is None:
        raise UsageError("Missing argument 'CONFIG'", context)
    else:
        loaded = load_config(config, overrides or [], extensions="require")
        sys.stdout.write(dump_config(loaded, changed=changed))
        if cut := loaded.shortened():
            typer.echo(f"warning: {'; '.join(cut)}", err=True)


def train_command(config: Config, overrides: Overrides = None) -> None:
    """Train, or continue training, as one rank: alone, or under `launch`, torchrun, accelerate, deepspeed.

    Example: pretrain train configs/run/quickstart.yaml engine.kind=single engine.zero_stage=0
    """
    from pretrain.run.stop import StopFlag
    from pretrain.utils.process import discard_refused_stdout

    discard_refused_stdout()
    stop = StopFlag()
    stop.install()  # before what takes seconds to import
    from pretrain.config.load import load_config
    from pretrain.config.resumption import check_start
    from pretrain.dist import read_world
    from pretrain.run.folder import RunDir
    from pretrain.run.lease import refuse_if_owned
    from pretrain.shards.dataset import check_local
    from pretrain.utils.log import setup_logging
    from pretrain.utils.status_line import show_phase
    from pretrain_launch.runs import queued_line

    has_launcher = "RANK" in os.environ  # which has warned already, or is a job itself
    world = read_world()
    loaded = load_config(config, overrides or [])
    # Before torch is imported, which takes seconds.
    if world.is_main:
        refuse_if_owned(RunDir(loaded.folder).lease)
    if complete := complete_line(loaded):
        if world.is_main:
            typer.echo(complete)
        raise typer.Exit()
    if world.is_main:
        check_local(loaded.data)
        check_start(loaded, has_saved=RunDir(loaded.folder).has_saved())
    if not has_launcher and (warning := queued_line(loaded.folder)):
        typer.echo(warning, err=True)
    setup_logging(world.rank, world.size)
    show_phase("importing torch")
    from pretrain.training.run import run_training

    raise typer.Exit(run_training(loaded, world, stop))


def rollback_command(
    run: RunFolder,
    to: Annotated[int, Option(min=0, help="Step of the checkpoint to continue from.")],
    skip_tokens: Annotated[int | None, Option(parser=count_from(0), help="Tokens to skip from there on.")] = None,
    skip_samples: Annotated[int | None, Option(parser=count_from(0), help="Rows of the data to skip.")] = None,
    as_json: Json = False,
) -> None:
    """Go back to a checkpoint, and leave out samples after it, if asked to, as after a loss spike.

    Newer checkpoints are set aside, not removed. The next start continues from there.

    Example: pretrain rollback runs/quickstart --to 2000 --skip-tokens 5000000
    """
    from pretrain.training.rollback import roll_back
    from pretrain.utils.units import plural

    if skip_tokens is not None and skip_samples is not None:
        raise typer.BadParameter("give one of --skip-tokens and --skip-samples, or neither")
    rollback, batches = roll_back(run, to, samples=skip_samples, tokens=skip_tokens)
    if as_json:
        print_json(asdict(rollback) | {"global_batches": batches})
        return
    for name in rollback.set_aside:
        print(f"{run / 'checkpoints' / name}: set aside, as .rolled-back")
    samples = f"samples {rollback.first} to {rollback.end - 1}"
    left_out = f"without {samples}: {plural(batches, 'whole global batch')}"
    print(f"{run} continues from step {to}, {left_out if batches else 'with all samples'}")


def runs_command(
    folder: Annotated[Path, Argument(metavar="DIR", help="A folder of runs.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs below a folder: state, step, loss, speed, last checkpoint, Slurm job, restarts.

    Example: pretrain runs runs
    """
    from pretrain_launch.runs import find_runs, read_runs

    if not folder.is_dir() and folder != Path("runs"):  # that of the first run comes with it
        raise ConfigError("no such folder", where=str(folder), fix="give a folder with runs in it")
    runs = read_runs(find_runs(folder))
    if as_json:
        print_json([run.facts() for run in runs])
    elif not runs:
        typer.echo(f"no runs in {folder}")
    else:
        from pretrain_launch.job_table import show_runs

        show_runs(runs, folder, console())


def report_command(
    folders: Annotated[
        list[Path], Argument(metavar="RUN...", help="Runs to compare, or one.", autocompletion=complete_run)
    ],
    output: Annotated[Path, Option(help="The page to write.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write a page on one run or several: curves, restarts, evaluations, config, texts.

    Example: pretrain report runs/first runs/second --output report.html
    """
    from pretrain.report.page import write_report
    from pretrain.report.run_data import label_runs, read_records, read_run_data
    from pretrain.utils.log import printable
    from pretrain.utils.units import size
    from pretrain_launch.runs import read_runs

    records, left_out = read_records(folders)
    labels = label_runs([str(record["name"]) for record in records.values()], list(records))
    states = read_runs(list(records))  # a process that works on a run is known by its lease
    runs = [read_run_data(one.path, label, one.starts, one.state) for label, one in zip(labels, states, strict=True)]
    try:
        facts = write_report(runs, output, left_out)
    except DiskError as error:
        raise DiskError(error.what, where=str(output), fix=f"{error.fix}, or give another --output") from None
    if as_json:
        print_json(facts)
        return
    for note in [*left_out, *(f"{run.label}: {note}" for run in runs for note in run.notes)]:
        typer.echo(printable(note), err=True)
    typer.echo(f"{output}: {size(facts['bytes'])}, open it in a browser")
