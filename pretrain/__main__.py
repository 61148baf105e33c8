"""`pretrain` and `python -m pretrain`: the command line, and what a stop signal does before it is there.

Importing takes from a fifth of a second to a minute (a file system that is cold or busy). A run that is asked to stop
in this time has nothing to save, and says so: exit code 75, no traceback.
"""

import os
import signal
import sys
from types import FrameType

from pretrain.errors import EXIT_RESUME_ME


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_RESUME_ME)


def main() -> None:
    """Runs the command line and exits."""
    if {"train", "launch"} & set(sys.argv[1:3]):  # they take over when they can do better
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, _leave)
    from pretrain.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()
