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


_VOCABULARIES = {
    "llama-5m": 8192, "modded-2m": 2048, "gpt2": 50257, "llama3": 128256, "llama-1b": 128256, "qwen2": 151936,
    "qwen2-7b": 152064, "qwen2-72b": 152064, "qwen3": 151936, "starcoder2": 49152, "bert": 30522, "modernbert": 50368,
    "roberta": 50265, "xlm-roberta": 250002, "distilbert": 30522, "electra": 30522,
    "mt5": 250112, "umt5": 256384, "byt5": 384, "bart": 50265, "mbart": 250027, "plbart": 50005, "olmo-": 50304,
    "marian": 80035, "transformer": 37000, "t5": 32128, "olmo2": 100352, "olmoe": 50304, "gpt_oss": 201088,
    "deepseek_v3": 129280, "vit_gpt2": 50257, "olmo3": 100278, "smollm3": 128256, "granite3": 49155, "phi3": 32064,
    "gemma": 256000, "gemma3": 262144, "pythia": 50304, "pythia-6.9b": 50432, "pythia-12b": 50688, "phi-": 51200,
    "stablelm": 50304, "stablelm2": 100352, "falcon": 65024, "cohere": 256000,
}  # fmt: skip
"""Vocabulary at which a preset has its published size, by the beginning of its name; else `USUAL_VOCABULARY`."""
USUAL_VOCABULARY = 32000


def published_vocabulary(name: str) -> int:
    """Returns the vocabulary of the published size of a preset; a tiny one has the usual one."""
    if name.endswith("-tiny") and name != "bert-tiny":
        return USUAL_VOCABULARY
    found = [beginning for beginning in _VOCABULARIES if name.startswith(beginning)]
    return _VOCABULARIES[max(found, key=len)] if found else USUAL_VOCABULARY


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
        known = known_model(model, vocabulary)
        counted = {"V": known.vocab_size, "parameters": count_parameters(known)}
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
