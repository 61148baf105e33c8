"""`pretrain recipes` and `presets`: lists of what is built in, to begin with."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from pretrain.cli.completion import complete_recipe
from pretrain.cli.options import CommandGroup, Json, console, count_from, print_json

recipes_app = CommandGroup(
    "List the built-in configs, with size and time of each; or copy one.\n\n"
    "Example: pretrain recipes cp quickstart mine.yaml"
)


@recipes_app.callback(invoke_without_command=True, no_args_is_help=False)
def recipes_command(context: typer.Context, as_json: Json = False) -> None:
    """List the built-in configs: subject, size and time of each. Or copy one.

    Example: pretrain recipes
    """
    if context.invoked_subcommand is not None:
        return
    from pretrain.config.recipes import PARTS, PREPARE, RUNS, list_recipes

    if as_json:
        recipes = list_recipes((*RUNS, *PREPARE, *PARTS))
        print_json([{"name": one.name, "summary": one.summary, "path": str(one.path)} for one in recipes])
        return
    from rich.table import Table

    titles = {
        "run": "pretrain train NAME, or pretrain launch local NAME --ranks 2",
        "finetune": "the same, with init.from=MODEL",
        "prepare": "pretrain prepare NAME inputs.0.path=FILES",
    }
    for folder in (*RUNS, *PREPARE, *PARTS):
        title = titles.get(folder, f"a part, for `include: configs/{folder}/NAME.yaml`")
        table = Table(
            box=None, pad_edge=False, title=title, title_justify="left", title_style="bold", show_header=False
        )
        table.add_column(no_wrap=True, min_width=20)
        table.add_column()
        for recipe in list_recipes((folder,)):
            table.add_row(recipe.short, recipe.summary)
        console().print(table)
        print()


@recipes_app.command("cp")
def copy_command(
    name: Annotated[
        str,
        Argument(metavar="NAME", help="One of `pretrain recipes`.", show_default=False, autocompletion=complete_recipe),
    ],
    file: Annotated[Path | None, Argument(metavar="[FILE]", help="File to write. Default: NAME.yaml.")] = None,
) -> None:
    """Copy a built-in config, with its comments, to change it.

    Example: pretrain recipes cp quickstart mine.yaml
    """
    from pretrain.config.recipes import PREPARE, copy_recipe

    recipe, target = copy_recipe(name, file)
    use = "prepare" if recipe.name.startswith(PREPARE) else "train"
    command = f"pretrain {use} {shlex.quote(str(target))}"
    print(f"{target}: {recipe.summary}")
    print(f"{command}; `pretrain config --explain KEY` says what a key means")


USUAL_VOCABULARY = 32000


def published_vocabulary(name: str) -> int:
    """Returns the vocabulary of the published size of a preset; one without has the usual one."""
    from pretrain.families import SIZES

    size = SIZES.get(name)
    return USUAL_VOCABULARY if size is None or size.of is None else size.of[0] or USUAL_VOCABULARY


def presets_command(
    vocab_size: Annotated[
        int | None,
        Option(parser=count_from(1), help="Vocabulary V of the counts. Default: that of the published model."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the values of model.preset: stacks, layers, width, heads, context and parameters.

    Example: pretrain presets --vocab-size 128256
    """
    from pretrain.config.model import ModelConfig
    from pretrain.config.presets import PRESETS, expand_preset
    from pretrain.plan.params import count_parameters
    from pretrain.plan.task import known_model
    from pretrain.utils.units import count

    rows: list[dict[str, Any]] = []
    for name in PRESETS:
        vocabulary = vocab_size or published_vocabulary(name)
        model = ModelConfig.model_validate(expand_preset({"preset": name}))
        stack = model.last_stack
        size = {"layers": stack.layers, "width": stack.width, "heads": stack.heads, "context": model.max_seq_len}
        model_facts = known_model(model, vocabulary)
        counted = {"V": model_facts.vocab_size, "parameters": count_parameters(model_facts)}
        rows.append({"preset": name, "stacks": model.shape, **size, **counted})
    if as_json:
        print_json(rows)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")  # within 80 columns
    for column in rows[0]:
        title = "size" if column == "parameters" else column
        table.add_column(title, no_wrap=True, justify="left" if column in ("preset", "stacks") else "right")
    for row in rows:
        *cells, vocabulary, parameters = row.values()
        table.add_row(*map(str, cells), "" if vocabulary is None else f"{vocabulary:,}", count(parameters))
    console().print(table)
    print("size in parameters at a vocabulary of V; layers, width and heads of each stack")
