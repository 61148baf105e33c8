"""A run whose terminal or pipe goes away goes on to its end, and its process ends with 0: else a launcher takes what is
done for a failure."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from pretrain.tracking.audit import read_audit
from pretrain.utils.jsonl import read_rows
from tests.helpers.broken_streams import bare_environment, broken
from tests.helpers.runs import ROOT, RunMaker
from tests.helpers.waiting import finish, wait_until

SPEAKING = """
import os

from pretrain.run.heartbeat import Progress

ENTER = Progress.enter


def enter(self, phase, step=None):
    ENTER(self, phase, step)
    print("in", phase, flush=True)
    if phase == "save" and self.now.step == 4:
        open(os.environ["GATE"]).close()  # until the test has seen to the streams


Progress.enter = enter
"""
"""What a user's module does: it prints."""


@pytest.fixture
def start(make_run: RunMaker, tmp_path):
    """Starts a run of twelve steps that waits at the fourth; returns its process, and what lets it go on."""
    (tmp_path / "speaking.py").write_text(SPEAKING)
    os.mkfifo(tmp_path / "gate")
    options = ["extend=[speaking]", "engine.kind=single", "engine.zero_stage=0", "train.steps=12",
               "checkpoint.every_steps=100", "tracking.log_every_steps=1"]  # fmt: skip
    processes = []

    def start(command: list[str], stdout: int, stderr: int) -> tuple[subprocess.Popen, Callable[[], None]]:
        environment = bare_environment(GATE=str(tmp_path / "gate"))
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
        command = [sys.executable, "-m", "pretrain", *command, str(make_run.config()), *options]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
        )
        processes.append(process)

        def open_gate() -> bool:
            try:
                os.close(os.open(tmp_path / "gate", os.O_WRONLY | os.O_NONBLOCK))
            except OSError:  # nobody waits there yet
                return False
            return True

        return process, lambda: wait_until(open_gate, "the run waits at its fourth step", process) and None

    yield start
    for process in processes:
        process.kill()
        process.wait()


def assert_done(process: subprocess.Popen, make_run: RunMaker) -> None:
    """The run has come to its end, it is known that it has, and no row is missing where rows are kept."""
    finish(process)
    folder = make_run.folder()
    assert process.returncode == 0, (folder.logs / "rank-00000.log").read_text()
    assert [row.step for row in read_audit(folder.audit)] == list(range(1, 13))
    (attempt,) = folder.read_record()["attempts"]
    assert (attempt["exit_code"], attempt["reason"]) == (0, "done")
    assert [row["step"] for row in read_rows(folder.metrics) if "loss" in row] == list(range(1, 13))


@pytest.mark.long
def test_a_launched_run_whose_readers_go_away_ends_as_if_they_had_stayed(start, make_run):
    (outputs, stdout), (errors, stderr) = os.pipe(), os.pipe()
    process, go_on = start(["launch", "local"], stdout, stderr)
    os.close(stdout)
    os.close(stderr)
    with os.fdopen(errors) as lines:
        assert any("step  3/12" in line for line in lines)
    os.close(outputs)
    go_on()
    assert_done(process, make_run)


@pytest.mark.long
def test_a_run_whose_terminal_hangs_up_ends_as_if_it_had_stayed(start, make_run):
    master, slave = os.openpty()
    process, go_on = start(["train"], slave, slave)
    os.close(slave)
    shown = b""
    while b"3/12" not in shown:
        shown += os.read(master, 100_000)
    os.close(master)
    go_on()
    assert_done(process, make_run)


@pytest.mark.long
def test_a_run_whose_output_goes_to_a_full_disk_and_into_a_pipe_that_nobody_reads_ends_well(start, make_run):
    with broken("full") as full, broken("unread") as unread:
        process, go_on = start(["train"], full, unread)
    go_on()
    assert_done(process, make_run)
