"""`pretrain config` and `pretrain train`."""

import sys
from pathlib import Path

import typer

from pretrain.cli.options import Config, Overrides


def config_command(config: Config, overrides: Overrides = None) -> None:
    """Print the resolved config: every key, every default.

    Example: pretrain config configs/run/quickstart.yaml optim.lr=3e-4
    """
    from pretrain.config.load import dump_config, load_config

    sys.stdout.write(dump_config(load_config(config, overrides or [])))


def train_command(config: Config, overrides: Overrides = None) -> None:
    """Train, or continue training, as one rank: alone, or under torchrun, accelerate, deepspeed or `pretrain launch`.

    Example: pretrain train configs/run/quickstart.yaml engine.kind=single engine.zero_stage=0
    """
    from pretrain.run.stop import StopFlag
    from pretrain.utils.streams import discard_refused_stdout

    discard_refused_stdout()
    stop = StopFlag()
    stop.install()  # before what takes seconds to import
    from pretrain.config.load import load_config
    from pretrain.dist import read_world
    from pretrain.run.folder import RunDir
    from pretrain.run.lease import refuse_if_owned

    world = read_world()
    loaded = load_config(config, overrides or [])
    if world.is_main:
        refuse_if_owned(RunDir(Path(loaded.run.dir) / loaded.run.name).lease)
    from pretrain.train.run import run_training

    raise typer.Exit(run_training(loaded, world, stop))
