"""`pretrain finetune`: a model and a file, to a fine-tuned model.

    columns of the file  ->  task  ->  prepare, train, evaluate, as commands  ->  next:

The recipe of the task says all else. Nothing here depends on a name of a task: its record has the
layout, the recipes and the template (kinds/tasks.py).
"""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from pretrain.cli.options import ModelPath, Overrides
from pretrain.cli.wish_commands.command_steps import Wish, fulfil, name_of_file
from pretrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pretrain.config.model import AnyModelConfig
    from pretrain.kinds.tasks import Task

VALIDATION = {True: "tail:0.1", False: "hash:0.1"}
"""Split of a file that comes alone: the end of each running text, which may be the only one, or some records."""


def finetune_command(
    model: ModelPath,
    file: Annotated[str, Argument(metavar="FILE", help="Records: .jsonl, .csv, .parquet ...; or texts.")],
    overrides: Overrides = None,
    task: Annotated[str | None, Option(help="Task, if the columns fit several.")] = None,
    validation: Annotated[str | None, Option(metavar="FILE", help="Held-out records. Default: a tenth.")] = None,
    name: Annotated[str | None, Option(help="Name of data and run. Default: of task and file.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the commands alone.")] = False,
) -> None:
    """Fine-tune a model on a file: its columns tell the task; prepare, train, evaluate.

    The same command continues what was interrupted. Overrides are of the recipe of the training.

    Example: pretrain finetune models/base reviews.csv train.steps=200
    """
    chosen, columns, fields = find_task(file, task)
    typer.echo(f"task: {chosen}, by the columns {', '.join(columns)} of {file}; --task chooses another")
    fulfil(plan_finetune(model, [file, validation], chosen, fields, name, overrides or []), dry_run)


def find_task(file: str, asked: str | None) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """Returns the task whose columns the records of a file have, these columns, and options of the input.

    Raises:
        ConfigError: No such task.
        DataError: No records; columns of no task, or of several; records of different tasks.
    """
    from pretrain.kinds.tasks import TASKS
    from pretrain.preparation.readers.columns import read_columns

    if asked is not None and asked not in TASKS:
        raise ConfigError(f"no such task: {asked}", where="--task", fix=f"use {', '.join(TASKS)}")
    chosen = ""
    for record in read_columns(file):
        if not chosen:
            chosen = asked or _choose(record.names, record.file)
            first = record.names
            columns, fields = _needed(TASKS[chosen], first)
        if missing := [name for name in columns if name not in record.names]:
            shown = ", ".join(record.names[:10]) or "none"
            raise DataError(
                f"task {chosen} needs the column {missing[0]}; there are {shown}",
                where=f"{record.file}, record {record.number}",
                fix=f"give all records the columns {', '.join(columns)}, or rename it",
            )
    if not chosen:
        raise DataError("there are no records", where=file, fix="give a file with a record a line")
    return chosen, columns, fields


def _needed(task: "Task", known: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns the columns that a task needs of records with these, and the options of the input."""
    from pretrain.config.prepare import InputConfig
    from pretrain.preparation.readers.columns import field_names

    fields: dict[str, str] = {}
    if task.conversations:
        fields["messages_field"] = next((one for one in task.conversations if one in known), task.conversations[0])
    return field_names(InputConfig.model_validate(fields), task.data, known), fields


def _choose(known: tuple[str, ...], file: str) -> str:
    """Returns the task of which most columns are there. Raises: DataError: None, or several."""
    from pretrain.kinds.tasks import TASKS

    needed = {name: _needed(task, known)[0] for name, task in TASKS.items()}
    sizes = {name: len(columns) for name, columns in needed.items() if set(columns) <= set(known)}
    fitting = [name for name, size in sizes.items() if size == max(sizes.values())]
    if not fitting:
        tasks = "; ".join(f"{name}: {', '.join(_needed(task, ())[0])}" for name, task in TASKS.items())
        raise DataError(
            f"the columns {', '.join(known[:10]) or '(none)'} are of no task",
            where=file,
            fix=f"rename them as a task has them ({tasks}), or prepare them by a config with their names",
        )
    if len(fitting) > 1:
        raise DataError(
            f"the columns {', '.join(known[:10])} are those of several tasks",
            where=file,
            fix=f"choose one: --task {' or --task '.join(fitting)}",
        )
    return fitting[0]


def plan_finetune(
    model: Path, files: list[str | None], chosen: str, fields: dict[str, str], name: str | None, overrides: list[str]
) -> Wish:
    """Plans the commands of a task, and says the template. `files`: the records, and held-out ones or None.

    Raises:
        ConfigError: No such model, or one that the task is not for; an override that does not fit.
        DataError: The tokenizer of the model cannot be read.
    """
    from pretrain.config.base import expand_home
    from pretrain.config.load import load_config, read_located, read_start
    from pretrain.config.model import parse_model
    from pretrain.kinds.layouts import LAYOUTS
    from pretrain.kinds.tasks import TASKS

    task = TASKS[chosen]
    recipe = f"finetune/{task.recipe}"
    start = Path(expand_home(str(model)))
    values = read_located(recipe, []).values
    base = parse_model(read_start(start))
    _check_model(base, chosen, values["objective"]["kind"], model)
    name = name or name_of_file(chosen, str(files[0]))
    inputs = [
        {"path": file, **fields, **split}
        for file, split in zip(files, ({}, {"split": "validation"}), strict=True)
        if file
    ]
    if template := _template(task, chosen, start):
        inputs = [one | {"template": template} for one in inputs]
    data = Path("data") / name
    prepare = [
        *("prepare", task.prepare, f"kind={task.data}", f"inputs={json.dumps(inputs)}"),
        f"split={'hash:0' if len(inputs) > 1 else VALIDATION[LAYOUTS[task.data].running_text]}",
        f"tokenizer={json.dumps({'kind': 'given', 'path': str(model)})}",
        f"output={data}",
    ]
    changes = [f"init.from={model}", f"run.name={name}", *_fit_rows(base, values)]
    changes += ["data.mixture=[]"] if values["data"].get("mixture") else []
    changes += [f"data.path={data}", *overrides]
    return Wish(prepare, ["train", recipe, *changes], data, load_config(recipe, changes))


def _check_model(model: "AnyModelConfig", chosen: str, objective: str, path: Path) -> None:
    """Refuses a model of other stacks, or of images, than the task is for. Raises: ConfigError."""
    from pretrain.kinds.objectives import OBJECTIVES

    record = OBJECTIVES[objective]
    inputs = getattr(model, "reads", record.reads)  # a recurrent one reads tokens
    if model.shape not in record.shapes or inputs != record.reads:
        needed = f"{' or '.join(record.shapes)} of {record.reads}"
        raise ConfigError(
            f"task {chosen} is for a model with {needed}, and this is {model.shape} of {inputs}",
            where=str(path),
            fix="give a model of that kind, or choose another --task",
        )


def _fit_rows(model: "AnyModelConfig", values: dict[str, Any]) -> list[str]:
    """Returns the overrides of a recipe for a model of shorter rows, and for one of a stack without a pooler."""
    batch = values["batch"]
    most = model.max_seq_len
    changes = [f"batch.{key}={most}" for key in ("seq_len", "source_len") if batch.get(key, 0) > (most or batch[key])]
    if values.get("model", {}).get("pooler") and model.encoder is None:
        changes.append("model.pooler=false")
    return changes


def _template(task: "Task", chosen: str, model: Path) -> str:
    """Returns the template of the records of a task, and says it; empty: they have none. Raises: ConfigError."""
    from pretrain.kinds.layouts import LAYOUTS
    from pretrain.tokenizer.file import own_template

    if not LAYOUTS[task.data].loss_mask:
        return ""
    if own_template(str(model)) is not None:
        typer.echo(f"template: that of {model}")
        return "auto"
    if task.answers_already:
        raise ConfigError(
            f"task {chosen} is for a model that answers already, and this one has no template of conversations",
            where=str(model),
            fix=f"train it on answers first: pretrain finetune {shlex.quote(str(model))} FILE --task instruction",
        )
    typer.echo(f"template: {task.template or 'chatml'}, as {model} has none")
    return task.template or "auto"
