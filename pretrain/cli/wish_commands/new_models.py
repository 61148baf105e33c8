"""`pretrain pretrain` and `pretrain translate`: texts to a new model, by the recipes that exist."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pretrain.cli.options import Overrides, count_from
from pretrain.cli.wish_commands.command_steps import Wish, fulfil, name_of_file
from pretrain.errors import ConfigError, DataError

Minutes = Annotated[float | None, Option(min=0.1, help="Minutes of training. Default: the recipe's steps.")]
Name = Annotated[str | None, Option(help="Name of data and run. Default: of the file.")]
DryRun = Annotated[bool, Option("--dry-run", help="Print the commands alone.")]


def pretrain_command(
    text: Annotated[str, Argument(metavar="TEXT", help="Files, a folder, a glob or an address.")],
    overrides: Overrides = None,
    minutes: Minutes = None,
    recipe: Annotated[str, Option(help="One of `pretrain recipes`, of texts.")] = "quickstart",
    vocab_size: Annotated[int, Option(parser=count_from(2), help="Of the tokenizer.")] = 2048,
    name: Name = None,
    dry_run: DryRun = False,
) -> None:
    """Pretrain a new model on texts: prepare, train, evaluate. The same command continues.

    Example: pretrain pretrain corpus --minutes 10
    """
    name = name or name_of_file("pretrain", text)
    prepare = ["prepare", "--input", text, "--vocab-size", str(vocab_size), "--split", "tail:0.02"]
    prepare += ["--output", f"data/{name}"]
    fulfil(_plan(prepare, recipe, name, minutes, overrides or []), dry_run)


def translate_command(
    source: Annotated[Path, Argument(metavar="SOURCE", help="A sentence a line.")],
    target: Annotated[Path, Argument(metavar="TARGET", help="Its translation, line by line.")],
    overrides: Overrides = None,
    minutes: Minutes = None,
    vocab_size: Annotated[int, Option(parser=count_from(2), help="Of both languages.")] = 8000,
    name: Name = None,
    dry_run: DryRun = False,
) -> None:
    """Train a new translator on two files of sentences: prepare, train, evaluate. The same command continues.

    Example: pretrain translate mine.en mine.de --minutes 20
    """
    for path in (source, target):
        if not path.is_file():
            raise DataError("no such file", where=str(path), fix="correct the path")
        if path.stat().st_size == 0:
            raise DataError("an empty file", where=str(path), fix="give one with a sentence a line")
    name = name or name_of_file("translate", str(source))
    prepare = ["prepare", "translator", f"inputs.0.path={source}", f"inputs.0.paired_path={target}"]
    prepare += [f"tokenizer.vocab_size={vocab_size}", f"output=data/{name}"]
    fulfil(_plan(prepare, "translator", name, minutes, overrides or []), dry_run)


def _plan(prepare: list[str], recipe: str, name: str, minutes: float | None, overrides: list[str]) -> Wish:
    """Plans the commands of a recipe of runs. Raises: ConfigError: Overrides or the recipe do not fit."""
    from pretrain.config.load import load_config

    if minutes is not None and any(one.startswith("train.steps=") for one in overrides):
        raise ConfigError("--minutes says the number of steps, and train.steps too", fix="leave one out")
    data = Path("data") / name
    changes = [f"run.name={name}", f"data.path={data}"]
    if load_config(recipe, overrides).engine.zero_stage:  # one process has nothing to shard
        changes += ["engine.kind=single", "engine.zero_stage=0"]
    changes += overrides
    wish = Wish(prepare, ["train", recipe, *changes], data, load_config(recipe, changes))
    return replace(wish, minutes=minutes)
