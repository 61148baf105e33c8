"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

# The common base of every complaint about a command line. Typer exports no name for it, and where it comes from
# (click, or a copy inside typer) depends on the version.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a built-in one: configs/run/....yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[A.B=C]...", help="Overrides of the file.")]
ModelPath = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A run, a checkpoint, a model or Hugging Face folder.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="Print facts as JSON.")]
