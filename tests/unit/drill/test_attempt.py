"""How an attempt of a drill ended, where the drill stands still between two looks."""

import subprocess
import sys

import pytest

from pretrain.drill.attempt import Attempts
from pretrain.drill.folder import DrillFolder


@pytest.mark.parametrize(("program", "is_killed"), [("", False), ("import signal; signal.pause()", True)])
def test_a_kill_that_comes_when_the_run_has_ended_well_was_none(monkeypatch, tmp_path, program, is_killed):
    def launch(self: Attempts, name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", program])

    def kill(process: subprocess.Popen[bytes], watch: object) -> bool:
        if not program:
            process.wait()
        process.kill()
        return True

    monkeypatch.setattr(Attempts, "_launch", launch)
    assert Attempts(DrillFolder(tmp_path), "mark", 1)._run("killed", kill).is_killed == is_killed
