"""Runs a program in a fork of the warm server: what is not about its start, and would import torch for a second.

run_python("import sys; print(sys.argv[1])", "a")    -> Result(0, "a\\n", "")
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.cli import Result
from tests.helpers.fork_server import SHARED


def run_python(code: str, *arguments: str, anew: Sequence[str] = (), **environment: str) -> Result:
    """Runs a program.

    Args:
        code: The program.
        arguments: Its `sys.argv[1:]`.
        anew: Packages that the program imports itself, as they read the environment then.
        environment: Laid over the environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, errors = (Path(folder) / name for name in ("output", "errors"))
        for path in (output, errors):
            path.touch()
        call = {"code": code, "arguments": arguments, "anew": anew, "environment": environment}
        [ended] = SHARED.wait(SHARED.start("tests.helpers.warm_python:run", [call], [(output, errors)]))
        return Result(ended, output.read_text(), errors.read_text())


def run(code: str, arguments: list[str], anew: list[str], environment: dict[str, str]) -> int:
    """Is the program, in its fork."""
    os.environ.update(environment)
    for name in [name for name in sys.modules if name.partition(".")[0] in anew]:
        del sys.modules[name]
    sys.argv[1:] = arguments
    exec(code, {"__name__": "__main__"})
    return 0
