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
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", self._module],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **self._environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.communicate()

    def ask(self, request: dict[str, Any]) -> Any:
        """Sends a request to the process, which is started if need be, and returns its answer."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())
        except BaseException:  # by a timeout too: its answer would be taken for that of the next request
            self._process = None
            process.kill()
            process.communicate()
            raise
