"""Processes of a drill are found by their mark, whoever their parent is, and ranks apart from what they have forked."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.drill import attempt
from pretrain.drill.attempt import GONE_WITHIN_S, MARK, check_platform, find_ranks, kill, marked, wait_until_gone
from pretrain.errors import LaunchError
from tests.helpers.clock import FakeClock
from tests.helpers.waiting import LIMIT_S, wait_until

# A launcher with two ranks, each of which forks a worker.
LAUNCHER = """
import os, signal, subprocess, sys
rank = "import os, signal; os.fork(); signal.pause()"
for number in "01":
    subprocess.Popen([sys.executable, "-c", rank], env={**os.environ, "RANK": number})
signal.pause()
"""


def wait_for(mark: str, number: int) -> None:
    """Waits until so many processes carry a mark."""
    wait_until(lambda: len(marked(mark)) == number, f"{number} processes")


@pytest.fixture
def job():
    """A running job: its launcher and its mark. All of it is gone afterwards."""
    mark = secrets.token_hex(8)
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], env={**os.environ, MARK: mark})
    wait_for(mark, 5)
    yield launcher, mark
    kill(list(marked(mark)))
    launcher.wait()


def test_ranks_are_told_from_what_they_have_forked(job):
    launcher, mark = job
    ranks = find_ranks(launcher.pid, mark)
    assert sorted(ranks) == [0, 1]
    assert len({*ranks.values(), launcher.pid}) == 3
    assert {*ranks.values(), launcher.pid} < marked(mark).keys()


def test_a_thread_that_ends_while_its_process_is_looked_at_hides_no_rank(job, monkeypatch):
    launcher, mark = job
    iterdir = Path.iterdir
    monkeypatch.setattr(
        Path, "iterdir", lambda self: iter([*([self / "0"] if self.name == "task" else []), *iterdir(self)])
    )
    assert sorted(find_ranks(launcher.pid, mark)) == [0, 1]


def test_orphans_are_found(job, monkeypatch):
    launcher, mark = job
    kill([launcher.pid, *find_ranks(launcher.pid, mark).values()])
    launcher.wait()
    wait_for(mark, 2)  # those that were killed take a moment to go
    with monkeypatch.context() as patch:
        patch.setattr(attempt, "time", FakeClock())
        left = wait_until_gone(mark, GONE_WITHIN_S)
    assert len(left) == 2
    assert all("os.fork()" in command for command in left.values())
    kill(list(left))
    assert wait_until_gone(mark, LIMIT_S) == {}


def test_processes_of_others_are_not_ours(job):
    assert marked(secrets.token_hex(8)) == {}


def test_a_system_without_proc_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LaunchError, match="only Linux has; run it on Linux"):
        check_platform()
