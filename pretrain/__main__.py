"""`pretrain` and `python -m pretrain`: the command line, and stop signals before it is loaded.

Importing takes from a fifth of a second to a minute (a file system that is cold or busy). A run
that is asked to stop in this time has nothing to save, and says so: exit code 75, no traceback.
Ctrl-C ends every other command with 130 and one line, then too.
"""

import os
import signal
import sys
from types import FrameType

from pretrain.errors import EXIT_RESUME_ME
from pretrain.utils.process import guard_streams

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_RESUME_ME)


def main() -> None:
    """Runs the command line and exits."""
    guard_streams(stdout_is_result=True)
    if "GOMP_SPINCOUNT" not in os.environ:
        # Before torch is loaded. Threads that spin while they wait take the cores of those that they
        # wait for, where another program runs too.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Else a fifth of a GPU's memory may be lost between blocks of other sizes.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if "train" in sys.argv[1:3] or {"launch", "local"} <= set(sys.argv[1:4]):  # take over when they can do better
        # Held back until there is a handler for each: who sees one may send any.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        for number in _STOP_SIGNALS:
            signal.signal(number, _leave)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        from pretrain.cli import main as run_command
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    run_command()


if __name__ == "__main__":
    main()
