"""Parts that several commands have: arguments and options, their help, and output as JSON."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Exit, Option, Typer
from typer.core import TyperCommand, TyperGroup

from pretrain.cli.completion import complete_config, complete_override, complete_run

if TYPE_CHECKING:
    from rich.console import Console

    from pretrain.config.run import RunConfig


def count_from(least: int) -> Callable[[str], int]:
    """Returns the parser of a count of tokens, bytes or rows: `5000000`, `5_000_000` or `5e6`."""

    def count(text: str) -> int:
        from pretrain.config.yaml_nodes import parse_scalar

        number = parse_scalar(str(text))  # a default is a number already
        if type(number) is not int or number < least:
            raise BadParameter(f"{text} is no whole number from {least}, such as 5000000 or 5e6")
        return number

    return count


# The common base of every complaint about a command line. Typer exports no name for it, and it comes
# from click or from a copy inside typer, by the version.
UsageError: type[Exception] = BadParameter.__bases__[0]

Config = Annotated[
    str,
    Argument(metavar="CONFIG", help="A YAML file, or a name of `pretrain recipes`.", autocompletion=complete_config),
]
Overrides = Annotated[
    list[str] | None, Argument(metavar="[A.B=C]...", help="Overrides of it.", autocompletion=complete_override)
]
ModelPath = Annotated[
    Path,
    Argument(metavar="MODEL", help="A run, a checkpoint, a model or Hugging Face folder.", autocompletion=complete_run),
]
RunFolder = Annotated[
    Path, Argument(metavar="RUN", help="A run folder.", show_default=False, autocompletion=complete_run)
]
Device = Annotated[str, Option(help="auto, cpu or cuda.")]
Json = Annotated[bool, Option("--json", help="Print facts as JSON.")]


class _FlagsWithoutType:
    """Commands whose help shows no `<bool>` behind a flag: it takes no value."""

    def get_params(self, context: Any) -> list[Any]:
        """Returns the parameters, --help too."""
        params: list[Any] = super().get_params(context)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Command(_FlagsWithoutType, TyperCommand):
    pass


class _Group(_FlagsWithoutType, TyperGroup):
    """A group in which an interrupt is one line: its own text, or a word."""

    def invoke(self, context: Any) -> Any:
        """Runs a command. Raises: Exit, with 130, where it is interrupted."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt as interrupt:  # some versions of typer end a command without a word
            print(str(interrupt) or "interrupted", file=sys.stderr)
            raise Exit(128 + signal.SIGINT) from None


class CommandGroup(Typer):
    """A group of commands, which prints its help where none is given."""

    def __init__(self, help: str, **settings: Any) -> None:
        super().__init__(help=help, cls=_Group, no_args_is_help=True, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Any:
        """Returns the decorator that adds a command."""
        return super().command(name, cls=_Command, **settings)


def console() -> "Console":
    """Returns a console that prints tables as they are."""
    from rich.console import Console

    return Console(highlight=False)


def complete_line(config: "RunConfig") -> str:
    """Returns the sentence about a run that has all the steps of `config`; empty where steps are left.

    Empty too where the config names other data or another start than the run had: a start compares
    their content with the run's.

    Raises:
        ConfigError: The run was started with a config that this one cannot continue, or its record is damaged.
        CheckpointError: The checkpoints of the run are gone.
    """
    from pretrain.config.load import load_config
    from pretrain.config.resumption import changed_keys, fill_from, refuse_changes
    from pretrain.run.folder import RunDir, check_new
    from pretrain.utils.units import plural

    run, train = RunDir(config.folder), config.train
    if not run.has_saved():
        check_new(run)  # in a moment; the ranks, or a job in the queue, would find out later
    if not run.is_complete(train.last_step):
        return ""
    stored = load_config(run.config, extensions="ignore")
    filled = fill_from(stored, config)
    if any(key.startswith(("data.", "init.")) for key in changed_keys(stored, filled)):
        return ""
    refuse_changes(stored, filled)
    key = "train.steps" if train.last_step == train.steps else "train.stop_after"
    return f"{run.path} is complete: {plural(run.newest_step(), 'step')}; raise {key} to go on"


def print_json(facts: Any) -> None:
    """Prints facts as indented JSON."""
    print(json.dumps(facts, indent=2))
