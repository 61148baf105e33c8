"""A process that has imported what is slow, and forks for each request: a line of JSON in, a line of JSON out."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]


class ForkServer:
    """The client's side.

    Args:
        module: What the process runs.
        environment: Laid over this process's.
    """

    def __init__(self, module: str, **environment: str) -> None:
        self._module, self._environment = module, environment

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **self._environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def ask(self, request: dict[str, Any]) -> Any:
        """Sends a request to the process, and returns its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())
