"""Runs the program of `pretrain/tokenizer/release_probe.py` in forks of the warm server.

Its import of transformers takes longer than all probes of a test. The program itself is started in
`tests/unit/tokenizer/test_release_probe.py`.
"""

import runpy
import sys
import tempfile
from pathlib import Path

from tests.helpers.fork_server import SHARED


class WarmProbe:
    """The part of `subprocess.Popen` that a probe uses."""

    returncode: int

    def __init__(self, file: str) -> None:
        self._file = file

    def communicate(self, request: bytes) -> tuple[bytes, None]:
        """Gives the program its request; returns what it wrote."""
        with tempfile.TemporaryDirectory() as name:
            asked, answer, errors = (Path(name) / file for file in ("asked", "answer", "errors"))
            asked.write_bytes(request)
            arguments = {"file": self._file, "asked": str(asked)}
            pids = SHARED.start("tests.helpers.warm_probes:run", [arguments], [(answer, errors)])
            [self.returncode] = SHARED.wait(pids)
            return answer.read_bytes(), None


def run(file: str, asked: str) -> int:
    """Is the program, in its fork."""
    with Path(asked).open() as sys.stdin:
        runpy.run_path(file, run_name="__main__")
    return 0
