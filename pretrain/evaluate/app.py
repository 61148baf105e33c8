"""The commands `pretrain average` and `pretrain evaluate`. Heavy imports live inside the function that needs them."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print facts as JSON.")]


def average_command(
    whats: Annotated[list[Path], typer.Argument(metavar="RUN|CHECKPOINT...", help="A run, or several checkpoints.")],
    output: Annotated[Path, typer.Option(help="Model folder to write.")],
    last: Annotated[int | None, typer.Option(min=1, help="So many of the run's newest checkpoints.")] = None,
    as_json: Json = False,
) -> None:
    """Make a model folder of the mean weights of several checkpoints, to evaluate, export, or train on from.

    Example: pretrain average runs/multi30k --last 10 --output models/multi30k
    """
    import json
    from dataclasses import asdict

    from pretrain.artifact.average import average_checkpoints

    averaged = average_checkpoints(whats, last, output)
    if as_json:
        print(json.dumps({"kind": "model", "path": str(output), **asdict(averaged)}, indent=2))
        return
    for checkpoint in averaged.checkpoints:
        print(checkpoint)
    print(f"{output}: the mean of these {len(averaged.checkpoints)}, {averaged.arithmetic}")
