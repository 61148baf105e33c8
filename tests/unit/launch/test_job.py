"""The driver of a job: what it writes down and asks of Slurm once its ranks have ended. `scontrol` is a script."""

import itertools
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pretrain.run.folder import begin_attempt, end_attempt
from pretrain.run.lease import Lease
from pretrain_launch import job as driver
from pretrain_launch import rank
from pretrain_launch.exits import StepExit, are_ready
from pretrain_launch.job_start import JobStart
from pretrain_launch.journal import append_row, mark_of_cancel, read_journal
from tests.helpers.waiting import poll_pause
from tests.unit.launch.test_submit import spec

SCONTROL = """#!/bin/sh
echo "$@" >> {folder}/asked
[ -e {folder}/away ] && rm {folder}/away && echo "slurm_requeue error: Unable to contact slurm controller" >&2 && exit 1
[ -e {folder}/dies-$1 ] && rm {folder}/dies-$1 && echo "$((restarts + 1))" > {folder}/restarts && kill -TERM $$
case "$1" in
    -o) echo "JobId=7 JobState=$(cat {folder}/state) Reason=None" "Restarts=$(cat {folder}/restarts)" \\
        "$(cat {folder}/times)";;
    requeue) [ ! -e {folder}/refuses ] || {{ echo "Requested operation is presently disabled" >&2; exit 1; }};;
esac
"""


class Desk:
    """A job, and the Slurm that its driver believes to speak to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = spec(run=str(folder / "run"), nodes=2, node_counts=[2], site={"doctor": False})
        self.set("state", "RUNNING")
        self.set("restarts", "0")
        self.set("times", "RunTime=00:10:00 TimeLimit=1-00:00:00")

    def set(self, name: str, text: str = "") -> None:
        """Sets what the script says."""
        (self.folder / name).write_text(text)

    def drive(
        self, monkeypatch, *endings: StepExit, restart: int = 0, number: str = "7", signals=(), nodes=("n1", "n2")
    ) -> int:
        """Runs one start, whose launches end so."""
        left = list(endings)
        monkeypatch.setattr(driver.Driver, "_launch", lambda self, nodes, attempt: left.pop(0))
        start = JobStart(number, None, restart, nodes)
        code = driver.Driver(self.spec, start, [*signals]).drive()
        assert not left
        return code

    def save(self, step: int) -> None:
        """Makes a checkpoint."""
        folder = self.spec.folder.checkpoints / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()

    @property
    def requeues(self) -> int:
        """How often Slurm was asked to requeue."""
        path = self.folder / "asked"
        return path.read_text().splitlines().count("requeue 7") if path.exists() else 0

    def last(self) -> dict:
        """The last row of the journal, without what differs each time."""
        row = read_journal(self.spec.folder)[-1]
        return {key: row[key] for key in ("event", "exit_code", "decision", "reason", "step")}


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A job with two nodes."""
    script = tmp_path / "bin" / "scontrol"
    script.parent.mkdir()
    script.write_text(SCONTROL.format(folder=tmp_path))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(driver, "REQUEUE_S", 0.0)
    monkeypatch.setattr(driver, "RETRY_S", 0.01)
    return Desk(tmp_path)


def test_a_run_that_is_done_ends_its_job(desk, monkeypatch):
    assert desk.drive(monkeypatch, StepExit(0, "", True)) == 0
    assert desk.last() == {"event": "end", "exit_code": 0, "decision": "end", "reason": "done", "step": 0}
    first = read_journal(desk.spec.folder)[0]
    assert (first["nodes"], first["world_size"], first["step"], first["job"]) == (["n1", "n2"], 16, 0, "7")
    assert desk.requeues == 0


def test_a_run_that_was_stopped_is_requeued_once_all_is_written_down(desk, monkeypatch):
    assert desk.drive(monkeypatch, StepExit(75, "", True), signals=[signal.SIGUSR1]) == 75
    assert desk.last()["reason"] == "stopped by SIGUSR1"
    assert (desk.last()["decision"], desk.requeues) == ("requeue", 1)


NEAR = "RunTime=23:57:10 TimeLimit=1-00:00:00"


@pytest.mark.parametrize(
    ("told", "number", "times", "reason"),
    [
        ("stopped by SIGUSR1", signal.SIGUSR1, NEAR, "stopped at the time limit"),
        ("stopped by a signal to another rank", signal.SIGUSR1, NEAR, "stopped at the time limit"),
        ("stopped by SIGUSR1", signal.SIGUSR1, "RunTime=00:10:00 TimeLimit=1-00:00:00", "stopped by SIGUSR1"),
        ("stopped by SIGTERM", signal.SIGTERM, NEAR, "stopped by SIGTERM"),
    ],
)
def test_a_stop_at_the_time_limit_is_recorded_as_one_and_not_that_of_a_preemption(
    desk, monkeypatch, told, number, times, reason
):
    run = desk.spec.folder
    run.path.mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    begin_attempt(run, "night", {})
    end_attempt(run, {"exit_code": 75, "reason": told})  # as rank 0 does
    desk.set("times", times)
    desk.drive(monkeypatch, StepExit(75, "", True), signals=[number])
    assert (desk.last()["reason"], desk.last()["decision"]) == (reason, "requeue")
    assert run.read_record()["attempts"][-1]["reason"] == reason


def test_a_stop_at_the_time_limit_before_the_first_rank_is_recorded_as_one(desk, monkeypatch):
    desk.set("times", NEAR)
    before = StepExit(75, "stopped by SIGUSR1 before the first rank", False)
    desk.drive(monkeypatch, before, signals=[signal.SIGUSR1])
    assert desk.last()["reason"] == "stopped at the time limit before the first rank"
    desk.spec.folder.launch.joinpath("cancelled").touch()
    desk.drive(monkeypatch, signals=[signal.SIGUSR1])
    assert desk.last()["reason"] == "cancelled by the user (not started)"


def test_nodes_that_an_elastic_job_holds_and_does_not_use_are_named(desk, monkeypatch, capsys):
    desk.spec = desk.spec.model_copy(update={"elastic": True, "nodes": 4, "node_counts": [1, 2, 4]})
    assert desk.drive(monkeypatch, StepExit(0, "", True), nodes=("n1", "n2", "n3")) == 0
    said = "launch: held, but not used: n3 (3 nodes do not divide the batch; launch.elastic uses 2)\n"
    assert said in capsys.readouterr().out


def test_a_requeue_is_tried_until_the_controller_is_back(desk, monkeypatch):
    def ask_first(*arguments, **options):
        desk.set("away")
        monkeypatch.setattr(driver, "run_tool", real)
        return real(*arguments, **options)

    real = driver.run_tool
    monkeypatch.setattr(driver, "run_tool", ask_first)
    desk.drive(monkeypatch, StepExit(76, "a rank hung", True))
    assert desk.requeues == 2


def test_a_job_that_slurm_does_not_requeue_leaves_the_run_to_the_next(desk, monkeypatch):
    desk.set("refuses")
    assert desk.drive(monkeypatch, StepExit(75, "stopped", True)) == 75
    assert desk.last()["decision"] == "next"
    assert desk.last()["reason"] == "Slurm does not requeue the job: Requested operation is presently disabled"


def test_a_job_that_slurm_requeues_by_itself_is_not_requeued_again(desk, monkeypatch):
    desk.set("state", "COMPLETING")
    desk.set("restarts", "1")
    desk.drive(monkeypatch, StepExit(75, "stopped", True))
    assert (desk.last()["decision"], desk.requeues) == ("requeue", 0)


def test_a_requeue_whose_answer_was_cut_off_by_its_own_effect_is_one(desk, monkeypatch):
    """Slurm has taken it, and ends every process of the job, scontrol too."""
    desk.set("dies-requeue")
    assert desk.drive(monkeypatch, StepExit(75, "stopped", True)) == 75
    assert (desk.last()["decision"], desk.requeues) == ("requeue", 1)


def test_a_job_that_slurm_ends_while_it_asks_asks_again(desk, monkeypatch):
    desk.set("dies--o")
    desk.drive(monkeypatch, StepExit(75, "stopped", True))
    assert (desk.last()["decision"], desk.requeues) == ("requeue", 0)


def test_a_job_that_was_cancelled_is_not_requeued(desk, monkeypatch):
    desk.set("state", "COMPLETING")
    desk.drive(monkeypatch, StepExit(75, "stopped by SIGTERM", True))
    assert (desk.last()["reason"], desk.requeues) == ("cancelled by the user (stopped by SIGTERM)", 0)


def test_a_mark_in_the_run_folder_keeps_a_job_from_starting(desk, monkeypatch):
    desk.spec.folder.launch.mkdir(parents=True)
    mark_of_cancel(desk.spec.folder).touch()
    assert desk.drive(monkeypatch) == 75
    assert (desk.last()["decision"], desk.requeues) == ("end", 0)


def test_three_restarts_without_a_checkpoint_end_a_job_with_the_last_reason(desk, monkeypatch):
    desk.save(20)
    for restart in range(4):
        desk.set("restarts", str(restart))
        code = desk.drive(monkeypatch, StepExit(137, f"killed, {restart}", True), restart=restart)
    assert (code, desk.requeues) == (137, 3)
    assert desk.last()["reason"] == "3 restarts in a row without a new checkpoint: killed, 3"
    desk.set("restarts", "4")
    desk.save(40)  # with a new one there is hope again
    desk.drive(monkeypatch, StepExit(137, "killed", True), restart=4)
    assert desk.last()["decision"] == "requeue"


def test_nodes_that_are_lost_again_and_again_end_a_job_before_its_ranks_start(desk, monkeypatch):
    for restart in range(4):
        row = {"event": "start", "chain": desk.spec.chain, "job": "7", "restart": restart, "step": 0}
        append_row(desk.spec.folder, row)
    assert desk.drive(monkeypatch, restart=4) == 69
    assert desk.last()["reason"] == "3 restarts in a row without a new checkpoint: their nodes were lost"


def test_the_next_job_of_a_chain_does_not_run_what_has_ended(desk, monkeypatch):
    assert desk.drive(monkeypatch, StepExit(65, "a shard is damaged", True)) == 65
    assert desk.drive(monkeypatch, number="8") == 65
    assert len(read_journal(desk.spec.folder)) == 2


def test_another_port_is_tried_where_no_rank_began(desk, monkeypatch):
    bad = StepExit(69, "on n1: torchrun ended with exit code 1 before its ranks", False)
    assert desk.drive(monkeypatch, bad, bad, StepExit(0, "", True)) == 0
    assert desk.drive(monkeypatch, bad, bad, bad) == 69


def test_a_job_whose_run_another_process_owns_ends_before_its_nodes_start(desk, monkeypatch):
    now = itertools.count(0, 20)
    monkeypatch.setattr(driver, "time", SimpleNamespace(sleep=lambda _: poll_pause(), monotonic=lambda: next(now)))
    lease = Lease(desk.spec.folder.lease)
    assert desk.drive(monkeypatch) == 73
    assert desk.last()["decision"] == "end"
    assert f"in use by process {os.getpid()} on " in desk.last()["reason"]
    assert [row["event"] for row in read_journal(desk.spec.folder)] == ["start", "end"]
    monkeypatch.setattr(driver, "time", SimpleNamespace(sleep=lambda _: lease.release(), monotonic=lambda: 0.0))
    desk.spec = desk.spec.model_copy(update={"chain": "b" * 12})
    assert desk.drive(monkeypatch, StepExit(0, "", True), number="8") == 0


STEP = """
import signal, sys
from pathlib import Path
from pretrain_launch.exits import note_exit
from tests.helpers.waiting import hang, wait_until
def stop(number, frame):
    print("stopped", flush=True)
    sys.exit(75)
wait_until(Path(sys.argv[1], "looked").exists, "looks of the driver")  # a signal would have ended it so far
signal.signal(signal.SIGUSR1, stop)
for rank in range(int(sys.argv[2])):
    note_exit(Path(sys.argv[1]), "ready", rank)
hang()
"""


@pytest.mark.parametrize("num_noted", [2, 1])
def test_a_request_to_stop_is_passed_on_when_every_rank_is_there_or_long_after(desk, monkeypatch, num_noted):
    first = desk.folder / "ready-00000.json"
    looks = itertools.count()

    def sleep(seconds):
        poll_pause()
        if next(looks) == 5:
            (desk.folder / "looked").touch()

    late = SimpleNamespace(sleep=sleep, monotonic=lambda: 1000.0 * first.exists())
    monkeypatch.setattr(driver, "time", late)
    monkeypatch.setattr(driver, "READY_S", 900 if num_noted == 1 else 10**6)
    step = [sys.executable, "-c", STEP, str(desk.folder), str(num_noted)]
    one = driver.Driver(desk.spec, JobStart("7", None, 0, ("n1", "n2")), [signal.SIGUSR1])
    assert one._wait(step, desk.folder, 2) == 75


LATE_RANK = """
import os, signal, sys
from pathlib import Path
from pretrain_launch.exits import note_exit
from tests.helpers.waiting import hang, wait_until
folder, asked = Path(sys.argv[1]), []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
(folder / "begun").touch()
wait_until(lambda: asked, "a signal that no rank was there to take")
signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))
note_exit(folder, "ready", 0)
hang()
"""


class AskedOnceBegun(list):
    """The signals to a driver: one, as soon as the step has begun."""

    def __init__(self, begun: Path) -> None:
        super().__init__([signal.SIGUSR1])
        self.begun = begun

    def __bool__(self) -> bool:
        return self.begun.exists()


def test_a_request_that_came_before_the_ranks_is_repeated(desk, monkeypatch):
    """A launcher imports torch for seconds, or minutes, before it starts a rank."""
    now = itertools.count()
    monkeypatch.setattr(driver, "time", SimpleNamespace(sleep=lambda _: poll_pause(), monotonic=lambda: next(now)))
    monkeypatch.setattr(driver, "READY_S", 3)
    monkeypatch.setattr(driver, "RETRY_S", 3)
    signals = AskedOnceBegun(desk.folder / "begun")
    one = driver.Driver(desk.spec, JobStart("7", None, 0, ("n1",)), signals)
    assert one._wait([sys.executable, "-c", LATE_RANK, str(desk.folder)], desk.folder, 1) == 75


def test_a_rank_is_ready_when_its_process_keeps_signals(desk, monkeypatch):
    """Not before: a signal of Slurm goes to the processes that there are."""
    child = "import signal, sys; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    started, popen = [], rank.subprocess.Popen

    def start(command, **options):
        started.append(are_ready(desk.folder, 1))
        return popen([sys.executable, "-c", child], **options | {"stdout": (desk.folder / "mask").open("w")})

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(rank.subprocess, "Popen", start)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        assert rank.run_rank("a.yaml", desk.folder, desk.folder) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (started, are_ready(desk.folder, 1)) == ([False], True)
    assert "SIGUSR1" in (desk.folder / "mask").read_text()


def test_the_record_of_the_run_tells_the_end_that_rank_0_could_not(desk, monkeypatch):
    run = desk.spec.folder
    run.path.mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    begin_attempt(run, "night", {})
    desk.drive(monkeypatch, StepExit(137, "rank 0 on n1 was killed by SIGKILL", True))
    attempt = json.loads(run.record.read_text())["attempts"][-1]
    assert (attempt["exit_code"], attempt["reason"]) == (137, "rank 0 on n1 was killed by SIGKILL")
    desk.set("restarts", "1")
    desk.drive(
        monkeypatch, StepExit(65, "bad data", True), restart=1
    )  # died before it had an attempt: not that of before
    assert json.loads(run.record.read_text())["attempts"][-1] == attempt
