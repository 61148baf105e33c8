"""The command `pretrain drill`."""

from pathlib import Path
from typing import Annotated

import typer

from pretrain.cli.options import Config, Json, Overrides


def drill_command(
    config: Config,
    overrides: Overrides = None,
    kills: Annotated[int, typer.Option(min=0, help="SIGKILLs in all.")] = 20,
    ranks: Annotated[int, typer.Option(min=1, help="Processes of a run.")] = 1,
    seed: Annotated[int, typer.Option(help="Of what is killed and when.")] = 0,
    target: Annotated[str, typer.Option(help="What a kill hits: rank, launcher, all (ranks at once) or any.")] = "rank",
    steps: Annotated[int | None, typer.Option(min=1, help="Of the run. Default: as many as the kills need.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 5,
    at_most: Annotated[
        int | None, typer.Option(min=0, help="Kills of this call; the same command does the next ones, or exits 75.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for all of it. Default: the run's, with -drill.")] = None,
    as_json: Json = False,
) -> None:
    """Kill a short run of a config again and again, and see that it ends as one that nobody interrupted.

    Both runs are in a folder of their own; ledger, weights and moments must be equal in bits, and nothing be left. The
    exit code is 0 where they are, 1 where they are not.

    Example: pretrain drill configs/run/quickstart.yaml --kills 20 --ranks 2
    """
    import json
    from typing import cast, get_args

    from pretrain.config.data import plan_batch
    from pretrain.config.load import load_config
    from pretrain.drill.drill import Drill, plan_steps
    from pretrain.drill.plan import Target
    from pretrain.drill.progress import show_progress
    from pretrain.errors import EXIT_RESUME_ME
    from pretrain.shards.dataset import check_local

    if target not in get_args(Target):
        raise typer.BadParameter(f"--target {target}: choose from {', '.join(get_args(Target))}")
    loaded = load_config(config, overrides or [])
    plan_batch(loaded.batch, ranks)
    check_local(loaded.data)
    folder = output or Path(loaded.run.dir) / f"{loaded.run.name}-drill"
    last_step = min(steps, loaded.train.last_step) if steps else plan_steps(loaded, kills, every)
    drill = Drill(loaded, folder, ranks, seed, cast(Target, target), last_step, every)
    with show_progress() as progress:
        verdict = drill.run(kills, at_most, progress)
    if verdict is None:
        facts = {"kills": drill.num_done, "of": kills}
        print(json.dumps(facts) if as_json else f"{drill.num_done} of {kills} kills are done; the same command goes on")
        raise typer.Exit(EXIT_RESUME_ME)
    print(json.dumps(verdict.facts(), indent=2) if as_json else "\n".join(verdict.lines()))
    raise typer.Exit(0 if verdict.passed else 1)
