"""Arguments and options that several commands have, and their output as JSON."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Option

if TYPE_CHECKING:
    from rich.console import Console

    from pretrain.config.run import RunConfig

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


def complete_line(config: "RunConfig") -> str:
    """Returns the sentence about a run that has all the steps of `config`; empty where steps are left.

    Raises:
        ConfigError: The run was started with a config that this one cannot continue, or its record is damaged.
    """
    from pretrain.config.load import load_config
    from pretrain.config.resumption import check_config, fill_from
    from pretrain.run.folder import RunDir

    run, train = RunDir(config.folder), config.train
    if not run.is_complete(train.last_step):
        return ""
    stored = load_config(run.config, import_extensions=False)
    check_config(stored, fill_from(stored, config))
    key = "train.steps" if train.last_step == train.steps else "train.stop_after"
    return f"{run.path} is complete: {run.newest_step()} steps; raise {key} to go on"


def print_json(facts: Any) -> None:
    """Prints facts as indented JSON."""
    print(json.dumps(facts, indent=2))
