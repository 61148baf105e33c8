"""`pretrain config` and `pretrain train`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from pretrain.cli.options import Config, Json, Overrides


def _print_explanation(key: str | None) -> None:
    """Prints what there is to say on a key, and exits."""
    if key is None:
        return
    import difflib

    from pretrain.config.fields import ROOTS, explain, known_keys
    from pretrain.errors import ConfigError

    text = explain(key)
    if not text:
        known = [name for section in ROOTS.values() for name in known_keys(section)]
        near = difflib.get_close_matches(key, known, n=3) or [name for name in known if name.endswith(f".{key}")][:3]
        fix = f"did you mean {' or '.join(near)}?" if near else "see docs/config.md"
        raise ConfigError(f"there is no key {key[:80]!r}", where="--explain", fix=fix)
    typer.echo(text)
    raise typer.Exit


def _print_schema(is_wanted: bool) -> None:
    """Prints the JSON schema, and exits."""
    if is_wanted:
        import json

        from pretrain.config.fields import json_schema

        typer.echo(json.dumps(json_schema(), indent=2))
        raise typer.Exit


def _print_reference(is_wanted: bool) -> None:
    """Prints docs/config.md, and exits."""
    if is_wanted:
        from pretrain.config.fields import write_reference

        typer.echo(write_reference(), nl=False)
        raise typer.Exit


# Eager, as --help is: they need no CONFIG.
Explain = Annotated[
    str | None,
    typer.Option(metavar="KEY", is_eager=True, callback=_print_explanation, help="Print the meaning of a key."),
]
Schema = Annotated[
    bool, typer.Option("--schema", is_eager=True, callback=_print_schema, help="Print a JSON schema for editors.")
]
Reference = Annotated[
    bool, typer.Option("--reference", is_eager=True, callback=_print_reference, help="Print docs/config.md.")
]


def config_command(
    config: Config,
    overrides: Overrides = None,
    explain: Explain = None,
    schema: Schema = False,
    reference: Reference = False,
) -> None:
    """Print the resolved config: every key, every default. Or the meaning of a key, or of all.

    Example: pretrain config configs/run/quickstart.yaml optim.lr=3e-4
    """
    from pretrain.config.load import dump_config, load_config

    sys.stdout.write(dump_config(load_config(config, overrides or [])))


def train_command(config: Config, overrides: Overrides = None) -> None:
    """Train, or continue training, as one rank: alone, or under torchrun, accelerate, deepspeed or `pretrain launch`.

    Example: pretrain train configs/run/quickstart.yaml engine.kind=single engine.zero_stage=0
    """
    from pretrain.run.stop import StopFlag
    from pretrain.utils.process import discard_refused_stdout

    discard_refused_stdout()
    stop = StopFlag()
    stop.install()  # before what takes seconds to import
    from pretrain.config.load import load_config
    from pretrain.dist import read_world
    from pretrain.run.folder import RunDir
    from pretrain.run.lease import refuse_if_owned

    world = read_world()
    loaded = load_config(config, overrides or [])
    if world.is_main:
        refuse_if_owned(RunDir(loaded.folder).lease)
    from pretrain.train.run import run_training

    raise typer.Exit(run_training(loaded, world, stop))


# `pretrain rollback`.


def rollback_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    to: Annotated[int, typer.Option(min=0, help="Step of the checkpoint to continue from.")],
    skip_tokens: Annotated[int | None, typer.Option(min=0, help="Tokens to skip from there on.")] = None,
    skip_samples: Annotated[int | None, typer.Option(min=0, help="Rows of the data to skip.")] = None,
    as_json: Json = False,
) -> None:
    """Go back to a checkpoint of a run, and leave out the samples that came after it, as after a loss spike.

    Newer checkpoints are set aside, not removed. The next start goes on from there.

    Example: pretrain rollback runs/quickstart --to 2000 --skip-tokens 5000000
    """
    import json
    from dataclasses import asdict

    from pretrain.train.rollback import roll_back

    if (skip_tokens is None) == (skip_samples is None):
        raise typer.BadParameter("give one of --skip-tokens and --skip-samples; 0 only goes back")
    rollback, batches = roll_back(run, to, samples=skip_samples, tokens=skip_tokens)
    if as_json:
        print(json.dumps(asdict(rollback) | {"global_batches": batches}, indent=2))
        return
    for name in rollback.set_aside:
        print(f"{run / 'checkpoints' / name}: set aside, as .rolled-back")
    left_out = f"without samples {rollback.first} to {rollback.end - 1}: {batches} whole global batches"
    print(f"{run} goes on from step {to}, {left_out if batches else 'with all samples'}")


# `pretrain runs`.


def runs_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with runs in it.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs below a folder: state, step, loss, speed, last checkpoint, Slurm job, restarts.

    Example: pretrain runs runs
    """
    import json

    from pretrain.errors import ConfigError
    from pretrain_launch.runs import find_runs, read_runs

    if not folder.is_dir():
        raise ConfigError("no such folder", where=str(folder), fix="give a folder with runs in it")
    runs = read_runs(find_runs(folder))
    if as_json:
        print(json.dumps([run.facts() for run in runs], indent=2))
    elif not runs:
        typer.echo(f"no runs in {folder}")
    else:
        from rich.console import Console

        from pretrain_launch.job_table import show_runs

        show_runs(runs, folder, Console(highlight=False))


# `pretrain report`.


def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared.")],
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write a page on one run, or several beside each other: curves, restarts, evaluations, config, texts.

    Example: pretrain report runs/first runs/second --output report.html
    """
    import json

    from pretrain.report.page import write_report
    from pretrain.report.run_data import label_runs, read_run_data
    from pretrain.run.folder import RunDir
    from pretrain.utils.units import size
    from pretrain_launch.journal import read_journal
    from pretrain_launch.runs import merge_starts

    records = [RunDir(folder).read_record() for folder in folders]
    labels = label_runs([str(record["name"]) for record in records], folders)
    runs = [
        read_run_data(folder, label, merge_starts(record["attempts"], read_journal(RunDir(folder))))
        for folder, label, record in zip(folders, labels, records, strict=True)
    ]
    facts = write_report(runs, output)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for run in runs:
        for note in run.notes:
            typer.echo(f"{run.label}: {note}", err=True)
    typer.echo(f"{output}: {size(facts['bytes'])}, open it in a browser")
