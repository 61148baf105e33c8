"""The command line: `commands.py` has the table; each other file a command or a group of them."""

from pretrain.cli.commands import app, main, run

__all__ = ["app", "main", "run"]
