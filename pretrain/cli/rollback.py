"""`pretrain rollback`."""

from pathlib import Path
from typing import Annotated

import typer

from pretrain.cli.options import Json


def rollback_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    to: Annotated[int, typer.Option(min=0, help="Step of the checkpoint to go on from.")],
    skip_tokens: Annotated[int | None, typer.Option(min=0, help="Tokens to leave out from there on.")] = None,
    skip_samples: Annotated[int | None, typer.Option(min=0, help="The same in rows of the data.")] = None,
    as_json: Json = False,
) -> None:
    """Go back to a checkpoint of a run, and leave out the samples that came after it, as after a loss spike.

    Newer checkpoints are set aside, not removed. The next start goes on from there.

    Example: pretrain rollback runs/quickstart --to 2000 --skip-tokens 5000000
    """
    import json
    from dataclasses import asdict

    from pretrain.train.rollback import roll_back

    if (skip_tokens is None) == (skip_samples is None):
        raise typer.BadParameter("give one of --skip-tokens and --skip-samples; 0 only goes back")
    rollback, batches = roll_back(run, to, samples=skip_samples, tokens=skip_tokens)
    if as_json:
        print(json.dumps(asdict(rollback) | {"global_batches": batches}, indent=2))
        return
    for name in rollback.set_aside:
        print(f"{run / 'checkpoints' / name}: set aside, as .rolled-back")
    left_out = f"without samples {rollback.first} to {rollback.end - 1}: {batches} whole global batches"
    print(f"{run} goes on from step {to}, {left_out if batches else 'with all samples'}")
