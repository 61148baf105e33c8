"""Arguments and options that several commands have, and their output as JSON."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Option

if TYPE_CHECKING:
    from rich.console import Console

# The common base of every complaint about a command line. Typer exports no name for it, and it comes
# from click or from a copy inside typer, by the version.
UsageError: type[Exception] = BadParameter.__bases__[0]

Config = Annotated[str, Argument(metavar="CONFIG", help="A YAML file, or a built-in one: configs/run/....yaml")]
Overrides = Annotated[list[str] | None, Argument(metavar="[A.B=C]...", help="Overrides of it.")]
ModelPath = Annotated[Path, Argument(metavar="MODEL", help="A run, a checkpoint, a model or Hugging Face folder.")]
RunFolder = Annotated[Path, Argument(metavar="RUN", help="A run folder.", show_default=False)]
Device = Annotated[str, Option(help="auto, cpu or cuda.")]
Json = Annotated[bool, Option("--json", help="Print facts as JSON.")]


def console() -> "Console":
    """Returns a console that prints tables as they are."""
    from rich.console import Console

    return Console(highlight=False)


def print_json(facts: Any) -> None:
    """Prints facts as indented JSON."""
    print(json.dumps(facts, indent=2))
