"""The command line: `commands.py` is the table, the other files are a command or a group of them each."""

from pretrain.cli.commands import app
from pretrain.cli.entry import main, run

__all__ = ["app", "main", "run"]
