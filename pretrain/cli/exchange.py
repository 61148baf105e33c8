"""`pretrain import` and `pretrain export`: released models in and out."""

from pathlib import Path
from typing import Annotated

import typer

from pretrain.cli.options import Json


def import_command(
    source: Annotated[str, typer.Argument(metavar="HF", help="A Hugging Face folder, or a name on its hub.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Model folder to write.")],
    as_json: Json = False,
) -> None:
    """Make a model folder of a released model, to generate with, fine-tune, or export again.

    Example: pretrain import Helsinki-NLP/opus-mt-en-it models/en-it
    """
    from dataclasses import asdict

    from pretrain.artifact.transfer import import_model
    from pretrain.inspect.describe import print_facts

    imported = import_model(source, out)
    print_facts({"kind": "model", "path": str(out), **asdict(imported)}, as_json)


def export_command(
    what: Annotated[Path, typer.Argument(metavar="WHAT", help="A run, a checkpoint or a model folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Hugging Face folder to write.")],
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    family: Annotated[str | None, typer.Option(help="model_type to write. Default: the first that is exact.")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a LoRA run: the adapters alone, as peft reads them.")
    ] = False,
    check: Annotated[bool, typer.Option(help="Refuse it where transformers gives other scores for it.")] = True,
    as_json: Json = False,
) -> None:
    """Write a Hugging Face folder: safetensors, config, tokenizer, model card. Needs no GPU, whatever trained it.

    Example: pretrain export runs/quickstart released/quickstart --dtype bf16
    """
    from dataclasses import asdict

    from pretrain.artifact.peft_folder import export_adapter
    from pretrain.artifact.transfer import export_model
    from pretrain.inspect.describe import print_facts

    if adapter:
        exported = export_adapter(what, out, family=family)
        print_facts({"kind": "adapter", "path": str(out), **asdict(exported)}, as_json)
        return
    written = export_model(what, out, dtype=dtype, family=family, check=check)
    print_facts({"kind": "release", "path": str(out), **asdict(written)}, as_json)
