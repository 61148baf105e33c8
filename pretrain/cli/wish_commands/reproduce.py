"""`pretrain reproduce`: published results, each by one command, and what was last measured."""

import difflib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from pretrain.cli.options import Json, print_json
from pretrain.cli.wish_commands.command_steps import CommandSteps
from pretrain.errors import ConfigError, DataError, LaunchError

if TYPE_CHECKING:
    from pretrain.config.reproduction import Reproduction


def reproduce_command(
    name: Annotated[str | None, Argument(help="One of --list.", show_default=False)] = None,
    paths: Annotated[list[str] | None, Argument(metavar="[KEY=PATH]...", help="Its needs.")] = None,
    show_list: Annotated[bool, Option("--list", help="List all, and what was measured.")] = False,
    markdown: Annotated[bool, Option("--markdown", help="--list as a table.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the commands alone.")] = False,
    as_json: Json = False,
) -> None:
    """Reproduce a published result: prepare, train, measure; the figure, its interval, the verdict.

    The exit code is 1 where the figure is outside. The same command continues; runs/reproduce-NAME.done
    has the finished steps: delete it and what they wrote to begin anew.

    Example: pretrain reproduce digits
    """
    from pretrain.config.reproduction import load_reproductions

    records = load_reproductions()
    if show_list or name is None:
        lines = [line for one, record in records.items() for line in _lines(one, record)]
        if as_json:
            print_json({one: record.model_dump(mode="json") for one, record in records.items()})
        else:
            print("\n".join(_table(records) if markdown else lines))
        return
    if name not in records:
        near = difflib.get_close_matches(name, records, n=1)
        fix = f"did you mean {near[0]}?" if near else "see pretrain reproduce --list"
        raise ConfigError(f"no such result: {name}", where="reproduce", fix=fix)
    record = records[name]
    if dry_run:
        print("\n".join(f"$ {step}" for step in record.steps))
        return
    commands = plan_commands(name, record, paths or [])
    _run(commands, Path("runs") / f"reproduce-{name}.done")
    value = record.figure.read()
    low, high = record.expected
    figure = f"{record.figure.name} {value:.6g}, expected {low:g} to {high:g}"
    print(f"\n{name}: {figure}: {record.verdict(value)}")
    print(f"published: {record.published}")
    raise typer.Exit(0 if record.verdict(value) == "reproduced" else 1)


def _run(commands: list[list[str]], done: Path) -> None:
    """Runs the commands that `done` does not list, and lists them there. Raises: Exit."""
    from pretrain.utils.io import append_line, make_dir

    lines = done.read_text(encoding="utf-8").splitlines() if done.is_file() else []
    make_dir(done.parent)
    steps = CommandSteps()
    for command in commands:
        line = shlex.join(command)
        if line in lines:
            print(f"-- done before, by {done}: {line}", flush=True)
            continue
        steps.check(command if command[0] == "python" else command[1:])
        append_line(done, line.encode())


def plan_commands(name: str, record: "Reproduction", paths: list[str]) -> list[list[str]]:
    """Returns the commands of a result, with the paths in place.

    Raises:
        ConfigError: No steps lead there; a path is not asked for.
        DataError: A path is missing.
        LaunchError: It needs a GPU, or a clone of the repository.
    """
    if record.lacking:
        raise ConfigError(f"no steps lead there yet: {record.lacking}", where=name)
    places = _places(name, record, paths)
    if record.needs_clone and not Path("benchmarks/common.py").is_file():
        text = "a step is a script of the repository, which is not in this folder"
        raise LaunchError(text, where=name, fix="run it in the folder of a clone")
    if record.machine == "gpu":
        import torch

        if not torch.cuda.is_available():
            text = "needs a GPU, and torch sees none"
            raise LaunchError(text, where=name, fix="run it where there is one")
    return [[_filled(word, places) for word in shlex.split(step)] for step in record.steps]


def _places(name: str, record: "Reproduction", paths: list[str]) -> dict[str, str]:
    """Returns the path of each need. Raises: ConfigError, DataError."""
    places = {}
    for item in paths:
        need, is_given, path = item.partition("=")
        if need not in record.needs or not is_given:
            needs = ", ".join(f"{need}=PATH" for need in record.needs) or "nothing"
            raise ConfigError(f"{item} is not asked for", where=name, fix=f"it needs {needs}")
        places[need] = path
    for need, source in record.needs.items():
        if not Path(places.get(need, "")).exists() or need not in places:
            missing = f"is not at {places[need]}" if need in places else "is missing"
            command = f"pretrain reproduce {name} {need}=PATH"
            raise DataError(f"{need} {missing}: {source}", where=name, fix=f"then {command}")
    return places


def _filled(word: str, paths: dict[str, str]) -> str:
    for need, path in paths.items():
        word = word.replace("{" + need + "}", path)
    return word


def _lines(name: str, record: "Reproduction") -> list[str]:
    """Returns what is shown of a result: verdict and last row, source, cost and needs."""
    state, figure = record.state()
    needs = f", needs {', '.join(record.needs)}" if record.needs else ""
    return [
        f"{name}: {state}; {figure}",
        f"    {record.title}",
        f"    published: {record.published}",
        f"    cost: {record.cost}{needs}",
    ]


def _table(records: "dict[str, Reproduction]") -> list[str]:
    """Returns the table of `benchmarks/results.md`."""
    rows = ["| name | result | published | cost | last measured | |", "|---|---|---|---|---|---|"]
    for name, record in records.items():
        state, figure = record.state()
        about = f"`{name}` | {record.title} | {record.published} | {record.cost}"
        rows.append(f"| {about} | {figure} | {state} |")
    return rows
