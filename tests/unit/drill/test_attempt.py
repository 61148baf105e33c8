"""How an attempt of a drill ended, where the drill stands still between two looks or is interrupted in a launch."""

import subprocess
import sys

import pytest

from pretrain.drill.attempt import DrillAttempts
from pretrain.drill.drill_folder import DrillFolder
from tests.helpers.fork_server import ROOT
from tests.helpers.waiting import LIMIT_S


@pytest.mark.parametrize(("program", "is_killed"), [("", False), ("import signal; signal.pause()", True)])
def test_a_kill_that_comes_when_the_run_has_ended_well_was_none(monkeypatch, tmp_path, program, is_killed):
    def launch(self: DrillAttempts, name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", program])

    def kill(process: subprocess.Popen[bytes], watch: object) -> bool:
        if not program:
            process.wait()
        process.kill()
        return True

    monkeypatch.setattr(DrillAttempts, "_launch", launch)
    assert DrillAttempts(DrillFolder(tmp_path), "mark", 1)._run("killed", kill).is_killed == is_killed


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from pretrain.drill.attempt import DrillAttempts
from pretrain.drill.drill_folder import DrillFolder

parent = os.getpid()
os.register_at_fork(after_in_parent=lambda: os.kill(parent, signal.SIGINT))
try:
    DrillAttempts(DrillFolder(Path(sys.argv[1])), "mark", 1)._launch("killed")
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_ctrl_c_that_comes_in_the_callbacks_of_a_fork_is_not_lost(tmp_path):
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr
