"""`pretrain inspect`."""

from pathlib import Path
from typing import Annotated

import typer

from pretrain.cli.options import Json


def inspect_command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A shard folder, a run, a checkpoint or a model.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and compare it with its CRC32.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the parameters.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="List them with the norm of their values.")] = False,
    as_json: Json = False,
) -> None:
    """Describe, verify or list a run, a checkpoint, a model folder, a Hugging Face folder, or a shard folder.

    Example: pretrain inspect runs/quickstart --verify
    """
    from pretrain.inspect.inspect import Asked, inspect

    inspect(path, Asked(verify, tensors, stats, as_json))
