"""A process that does not outlive the one that has started it, however that ends. On Linux; elsewhere it may."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when `parent`, which has started it, is gone; that may be so already.

    For the time between fork and exec, where the parent cannot do more for its child.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the kernel sends the signal at its end, and that has been
        os.kill(os.getpid(), signal.SIGKILL)
