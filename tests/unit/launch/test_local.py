"""The launcher's supervision, with small programs as ranks: who dies takes the others along, and is named."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.local import STOP_SIGNALS
from tests.helpers.processes import is_running

ROOT = Path(__file__).parents[3]
LAUNCH = """
import json, os, sys, time
from pathlib import Path
from launch import local
local.rank_command = lambda config, overrides: [sys.executable, "-c", config, *overrides]
vars(local).update(json.loads(os.environ["WAITS"]))
exec(os.environ["PREPARE"])
sys.exit(local.launch_local(sys.argv[1], sys.argv[3:], 3, None, Path(sys.argv[2])))
"""
SHORT = {"SETTLE_S": 0.2, "FAILURE_GRACE_S": 0.5, "HANG_SETTLE_S": 0.5, "STOPPED_GRACE_S": 0.5}
LONG_S = 1000.0
"""For what ends by itself, however busy the machine is."""
GIVE_UP_S = 120
RANK = """
import os, signal, subprocess, sys, time
rank, folder = int(os.environ["RANK"]), sys.argv[1]
def note(what):
    with open(f"{folder}/{what}.{rank}", "a") as file:
        file.write(f"{os.getpid()}\\n")
def has_noted(path):
    return os.path.exists(path) and os.path.getsize(path) > 0
def wait_for(*names):
    while not all(has_noted(f"{folder}/{name}") for name in names):
        time.sleep(0.01)
"""
"""A note is there once something is in it: a rank may stand still, or be killed, before it has written its number."""
ANSWERS = f"signal.pthread_sigmask(signal.SIG_UNBLOCK, {list(map(int, STOP_SIGNALS))}); "
"""A rank that can answer stop signals takes those that were held back."""


class Job:
    """A launcher of three ranks that run `program`."""

    def __init__(self, folder: Path, program: str, prepare: str = "", **waits: float) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, RANK + program, str(folder / "logs"), str(folder)],
            cwd=ROOT,
            env={**os.environ, "PREPARE": prepare, "WAITS": json.dumps(SHORT | waits)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, what: str, number: int = 3) -> None:
        """Waits until every rank, or so many processes, have noted `what`."""
        deadline = time.monotonic() + GIVE_UP_S
        while sum(path.stat().st_size > 0 for path in self.folder.glob(f"{what}.*")) < number:
            assert time.monotonic() < deadline, f"none came to {what!r}"
            time.sleep(0.01)

    def noted(self, what: str) -> dict[int, list[int]]:
        """The process ids that noted `what`, by rank."""
        files = self.folder.glob(f"{what}.*")
        return {int(path.suffix[1:]): [int(line) for line in path.read_text().split()] for path in files}

    def end(self) -> tuple[int, str]:
        """Waits for the launcher; returns its exit code and what it printed to stderr."""
        _, errors = self.process.communicate(timeout=GIVE_UP_S)
        return self.process.returncode, errors


def wait_until_dead(pids: list[int], within_s: float = GIVE_UP_S) -> None:
    """Waits until none of the processes runs, which must be so in time."""
    deadline = time.monotonic() + within_s
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path):
    """Starts a job, with other waits of the launcher if any are given, and ends what is left of it."""
    jobs: list[Job] = []

    def start(program: str, prepare: str = "", **waits: float) -> Job:
        jobs.append(Job(tmp_path, program, prepare, **waits))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.kill()
        job.process.communicate()


def test_ranks_that_end_well_end_the_job_well(start):
    assert start("note('ran')").end() == (0, "")


def test_each_rank_knows_its_place(start):
    job = start("import json; print(json.dumps({k: os.environ[k] for k in ('RANK', 'WORLD_SIZE', 'MASTER_PORT')}))")
    output, _ = job.process.communicate(timeout=GIVE_UP_S)
    rows = [json.loads(output), *(json.loads((job.folder / f"logs/rank-0000{n}.out").read_text()) for n in (1, 2))]
    assert [row["RANK"] for row in rows] == ["0", "1", "2"]
    assert {row["WORLD_SIZE"] for row in rows} == {"3"}
    assert len({row["MASTER_PORT"] for row in rows}) == 1


def test_ranks_that_were_stopped_end_the_job_with_the_resume_code(start):
    assert start("sys.exit(75)").end() == (75, "")
    assert start("sys.exit(75 if rank == 1 else 0)").end()[0] == 75


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_killed_rank_takes_the_others_along_and_is_named(start, culprit):
    job = start(f"note('started'); time.sleep(0.2)\nif rank == {culprit}: os.kill(os.getpid(), 9)\ntime.sleep(600)")
    code, errors = job.end()
    assert code == 128 + signal.SIGKILL
    assert errors == (
        f"launch: rank {culprit} on {socket.gethostname()} was killed by SIGKILL (exit code 137): the kernel's "
        "out-of-memory killer does that (see dmesg), or somebody's kill -9\n"
    )
    assert not any(is_running(pid) for pids in job.noted("started").values() for pid in pids)


def test_a_rank_that_fails_is_quoted_and_its_code_returned(start):
    job = start(
        "print('first'); print('error: rank 2: bad shard', file=sys.stderr); note('said')\n"
        "if rank == 2: wait_for('said.0'); sys.exit(65)\ntime.sleep(600)"
    )
    code, errors = job.end()
    assert code == 65
    lines = errors.splitlines()
    assert lines[0] == "error: rank 2: bad shard"  # rank 0's own, which shares the terminal
    assert lines[1] == f"launch: rank 2 on {socket.gethostname()} failed with exit code 65"
    assert lines[2] == f"launch: the end of {job.folder}/logs/rank-00002.out:"
    assert set(lines[3:]) == {"  first", "  error: rank 2: bad shard"}


def test_what_fails_on_every_rank_is_said_once(start):
    job = start(
        "if rank < 2: wait_for(f'failed.{rank + 1}')\n"
        "print('error: bad data', file=sys.stderr); note('failed'); sys.exit(65)",
        SETTLE_S=LONG_S,
    )
    assert job.end() == (65, "error: bad data\n")


LATE = """
class Late:
    sleep = time.sleep
    def monotonic():
        notes = [Path(f"{sys.argv[3]}/asked.{rank}") for rank in (0, 2)]
        return time.monotonic() + 2000 * all(note.exists() and note.stat().st_size for note in notes)
local.time = Late
"""
"""The launcher's clock: once two ranks have been asked to end, and have not, it is long after."""


def test_ranks_that_ignore_the_request_to_end_are_killed(start):
    job = start(
        f"signal.signal(15, lambda *_: note('asked')); {ANSWERS}note('started')\n"
        "if rank == 1: wait_for('started.0', 'started.2'); sys.exit(70)\nwhile True: time.sleep(1)",
        LATE,
        FAILURE_GRACE_S=LONG_S,
    )
    assert job.end()[0] == 70
    assert job.noted("asked").keys() == {0, 2}
    assert all(len(pids) == 1 for pids in job.noted("asked").values())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stop_signal_reaches_every_rank_once(start, number):
    job = start(
        f"signal.signal({int(number)}, lambda *_: note('asked')); {ANSWERS}note('started')\n"
        f"while not os.path.exists(f'{{folder}}/asked.{{rank}}'): time.sleep(0.01)\n"
        f"time.sleep(0.3); sys.exit(75)",
        STOPPED_GRACE_S=LONG_S,
    )
    job.wait_for("started")
    job.process.send_signal(number)
    assert job.end() == (75, "")
    assert {rank: len(pids) for rank, pids in job.noted("asked").items()} == {0: 1, 1: 1, 2: 1}


def test_a_signal_that_comes_before_a_rank_can_answer_it_is_held_back(start):
    job = start(
        "note('started')\nwhile 15 not in signal.sigpending(): time.sleep(0.01)\nnote('late')\n"
        f"signal.signal(15, lambda *_: (note('asked'), sys.exit(75))); {ANSWERS}time.sleep(600)",
        STOPPED_GRACE_S=LONG_S,
    )
    job.wait_for("started")
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == (75, "")
    assert job.noted("late").keys() == job.noted("asked").keys() == {0, 1, 2}


def test_peers_of_a_rank_that_was_stopped_by_itself_are_stopped_too(start):
    job = start(
        f"signal.signal(15, lambda *_: sys.exit(75)); {ANSWERS}note('started')\n"
        "if rank == 1: wait_for('started.0', 'started.2'); sys.exit(75)\ntime.sleep(600)"
    )
    assert job.end() == (75, "")


def test_a_frozen_rank_is_ended_once_the_others_have_said_so(start):
    job = start(
        "note('started')\nif rank == 2: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "wait_for('started.0', 'started.2'); first = open(f'{folder}/started.0').read().strip()\n"
        "while rank == 1 and os.path.exists(f'/proc/{first}'): time.sleep(0.01)\n"
        "sys.exit(76)"
    )
    code, errors = job.end()
    assert (code, errors) == (76, "")  # rank 0 says who is frozen
    wait_until_dead([pid for pids in job.noted("started").values() for pid in pids])


def test_where_rank_0_is_frozen_another_is_quoted(start):
    job = start(
        "if rank == 0: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "print(f'error: rank {rank}: rank 0 is frozen', file=sys.stderr); sys.exit(76)"
    )
    code, errors = job.end()
    assert code == 76
    assert "error: rank 1: rank 0 is frozen" in errors or "error: rank 2: rank 0 is frozen" in errors


def test_a_crash_in_native_code_shows_the_python_stack(start):
    job = start("import ctypes\ndef crash():\n    ctypes.string_at(0)\nif rank == 1: crash()\ntime.sleep(600)")
    code, errors = job.end()
    assert code == 128 + signal.SIGSEGV
    assert "was killed by SIGSEGV (exit code 139): a crash in native code\n" in errors
    assert " in crash\n" in errors


CHILD = "note('started'); subprocess.Popen([sys.executable, '-c', PROGRAM]); time.sleep(600)"
PROGRAM = (
    "PROGRAM = f\"import os, time; open('{folder}/new.{rank}', 'w').write(str(os.getpid())); "
    "os.rename('{folder}/new.{rank}', '{folder}/child.{rank}'); time.sleep(600)\"\n"
)


def test_a_killed_launcher_leaves_no_rank_and_nothing_that_a_rank_has_started(start):
    job = start(PROGRAM + CHILD)
    job.wait_for("child")
    job.process.kill()
    wait_until_dead([pid for what in ("started", "child") for pids in job.noted(what).values() for pid in pids])


STANDS_STILL = """
def note(what):
    Path(sys.argv[3], "new").write_text(str(os.getpid()))
    os.rename(f"{sys.argv[3]}/new", f"{sys.argv[3]}/{what}.0")
"""
"""Of a process that has just been forked, and does not come to its first call for a while."""


def test_a_launcher_that_is_killed_while_it_starts_a_rank_leaves_none(start):
    job = start(
        "note('started'); time.sleep(5)",
        STANDS_STILL + "def late(parent, real=local.die_with):\n    note('forked')\n"
        "    while os.getppid() == parent: time.sleep(0.01)\n    real(parent)\n"
        "local.die_with = late",
    )
    job.wait_for("forked", 1)
    job.process.kill()
    wait_until_dead(job.noted("forked")[0])
    assert not job.noted("started")


def test_a_signal_to_the_group_does_not_end_a_janitor_that_has_just_been_forked(start):
    job = start(
        PROGRAM + CHILD,
        "from launch import janitor\n" + STANDS_STILL + "def late(*pipe, real=janitor._keep_watch):\n"
        "    note('janitor')\n    while not os.path.exists(f'{sys.argv[3]}/asked'): time.sleep(0.01)\n    real(*pipe)\n"
        "janitor._keep_watch = late",
    )
    job.wait_for("janitor", 1)
    (janitor,) = job.noted("janitor")[0]
    os.kill(janitor, signal.SIGINT)
    (job.folder / "asked").touch()
    job.wait_for("child")
    assert is_running(janitor)
    job.process.kill()
    wait_until_dead([pid for pids in job.noted("child").values() for pid in pids])


def test_a_killed_rank_leaves_nothing_that_it_has_started(start):
    job = start(PROGRAM + CHILD)
    job.wait_for("child")
    os.kill(job.noted("started")[1][0], signal.SIGKILL)
    assert job.end()[0] == 128 + signal.SIGKILL
    wait_until_dead([pid for pids in job.noted("child").values() for pid in pids])


def test_logs_of_earlier_attempts_are_kept(start):
    for _ in range(2):
        job = start("print('hello from', rank)")
        assert job.end()[0] == 0
    assert (job.folder / "logs" / "rank-00001.out").read_text() == "hello from 1\n" * 2
    assert not (job.folder / "logs" / "rank-00000.out").exists()


def test_a_log_that_cannot_be_written_is_told_before_a_rank_runs_on(start, tmp_path):
    (tmp_path / "logs" / "rank-00002.out").mkdir(parents=True)
    job = start("note('started'); time.sleep(600)")
    code, errors = job.end()
    assert code != 0
    assert "rank-00002.out: cannot be opened: Is a directory; correct its permissions" in errors
    wait_until_dead([pid for pids in job.noted("started").values() for pid in pids])
