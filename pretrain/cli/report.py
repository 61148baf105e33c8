"""`pretrain report`."""

from pathlib import Path
from typing import Annotated

import typer

from pretrain.cli.options import Json


def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared.")],
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write a page on one run, or several beside each other: curves, restarts, evaluations, config, texts.

    Example: pretrain report runs/first runs/second --output report.html
    """
    import json

    from launch.journal import read_journal
    from launch.starts import merge_starts
    from pretrain.report.page import write_report
    from pretrain.report.read import label_runs, read_run_data
    from pretrain.run.folder import RunDir
    from pretrain.utils.units import size

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
