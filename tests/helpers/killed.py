"""Processes that kill themselves at a chosen durable write: the drill of everything that must survive a kill.

    num_writes = count_writes(BODY, folder, "whole")
    run_killed(BODY, folder, "out", kill_at=17)      # then the same again, without a kill, gives the same bytes

BODY is Python that finds its arguments, as strings, in `arguments`.
"""

import os
import signal
import subprocess
import sys
from textwrap import indent

NEVER = 10**9
TIMEOUT_S = 600

_CHILD = """
import os, signal, sys
from pretrain.io import set_fault_hook

num_writes = 0

def kill(operation, path):
    global num_writes
    num_writes += 1
    if num_writes == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)

def main(arguments):
{body}

set_fault_hook(kill)
main(sys.argv[2:])
print(num_writes)
"""


def start_child(body: str, *arguments: object, kill_at: int = NEVER) -> subprocess.Popen[str]:
    """Starts a process that dies at its `kill_at`-th write; one that does not prints how many it has done, last."""
    code = _CHILD.format(body=indent(body.strip(), "    "))
    command = [sys.executable, "-c", code, str(kill_at), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def count_writes(body: str, *arguments: object) -> int:
    """Runs such a process to its end; returns how many durable writes it has done."""
    child = start_child(body, *arguments)
    output, errors = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 0, errors
    return int(output.splitlines()[-1])


def run_killed(body: str, *arguments: object, kill_at: int) -> None:
    """Runs such a process until it has killed itself, which it must."""
    child = start_child(body, *arguments, kill_at=kill_at)
    _, errors = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == -signal.SIGKILL, errors
