"""The launcher's supervision, with small programs as ranks: who dies takes the others along, and is named."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain_launch.local import STOP_SIGNALS
from tests.helpers.processes import is_running
from tests.helpers.tables import thinned
from tests.helpers.waiting import finish, wait_until

ROOT = Path(__file__).parents[3]
LAUNCH = """
import json, os, sys
from pathlib import Path
from pretrain_launch import local
from tests.helpers.waiting import poll_pause, wait_until
local.rank_command = lambda config, overrides: [sys.executable, "-c", config, *overrides]
vars(local).update(json.loads(os.environ["WAITS"]))
class Clock:
    now = 0.0
    def sleep(seconds):
        Clock.now += seconds
        poll_pause()
    def monotonic():
        return Clock.now
local.time = Clock
exec(os.environ["PREPARE"])
program, logs, *arguments = sys.argv[1:]
def live():
    sys.argv[1:] = arguments
    exec(program, {})
    return 0
main = live if os.environ["RANKS"] == "forks" else None
mode, run = os.environ["RECOVER"], local.RunDir(Path(logs).parent)
mode, _, copies = mode.partition(" ")
worlds = local.Worlds(run, mode, lambda ranks: True, copies=bool(copies)) if mode != "off" else None
sys.exit(local.launch_local(program, arguments, 3, None, Path(logs), main=main, worlds=worlds))
"""
"""The launcher's clock goes on as it sleeps, which it does shortly."""
SHORT = {"SETTLE_S": 0.2, "FAILURE_GRACE_S": 0.5, "HANG_SETTLE_S": 0.5, "STOPPED_GRACE_S": 0.5}
NEVER_S = 10.0**6
"""For what ends by itself, however busy the machine is."""
RANK = """
import os, signal, subprocess, sys
from tests.helpers.waiting import hang, wait_until
rank, folder = int(os.environ["RANK"]), sys.argv[1]
def note(what):
    with open(f"{folder}/{what}.{rank}", "a") as file:
        file.write(f"{os.getpid()}\\n")
def has_noted(path):
    return os.path.exists(path) and os.path.getsize(path) > 0
def wait_for(*names):
    wait_until(lambda: all(has_noted(f"{folder}/{name}") for name in names))
def wait_until_gone(name):
    wait_for(name)
    process = open(f"{folder}/{name}").read().strip()
    wait_until(lambda: not os.path.exists(f"/proc/{process}"))
"""
"""A note is there once something is in it: a rank may stand still, or be killed, before it has written its number."""
ANSWERS = f"signal.pthread_sigmask(signal.SIG_UNBLOCK, {list(map(int, STOP_SIGNALS))}); "
"""A rank that can answer stop signals takes those that were held back."""


class Job:
    """A launcher of three ranks that run `program`."""

    def __init__(
        self, ranks: str, folder: Path, program: str, prepare: str = "", recover: str = "off", **waits: float
    ) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, RANK + program, str(folder / "logs"), str(folder)],
            cwd=ROOT,
            env={
                **os.environ,
                "RANKS": ranks,
                "PREPARE": prepare,
                "RECOVER": recover,
                "WAITS": json.dumps(SHORT | waits),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, what: str, number: int = 3) -> None:
        """Waits until every rank, or so many processes, have noted `what`."""
        wait_until(
            lambda: sum(path.stat().st_size > 0 for path in self.folder.glob(f"{what}.*")) == number,
            f"{what!r} of {number} ranks",
            while_running=self.process,
        )

    def noted(self, what: str) -> dict[int, list[int]]:
        """The process ids that noted `what`, by rank."""
        files = self.folder.glob(f"{what}.*")
        return {int(path.suffix[1:]): [int(line) for line in path.read_text().split()] for path in files}

    def end(self) -> tuple[int, str]:
        """Waits for the launcher; returns its exit code and what it printed to stderr."""
        _, errors = finish(self.process)
        return self.process.returncode, errors


def wait_until_dead(pids: list[int]) -> None:
    """Waits until none of the processes runs."""
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the end of all ranks")


@pytest.fixture(params=[pytest.param("programs", marks=pytest.mark.long), "forks"])
def start(request, tmp_path):
    """Starts a job, with other waits of the launcher if any are given, and ends what is left of it."""
    jobs: list[Job] = []

    def start(program: str, prepare: str = "", recover: str = "off", **waits: float) -> Job:
        jobs.append(Job(request.param, tmp_path, program, prepare, recover, **waits))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.kill()
        job.process.communicate()


def test_ranks_that_end_well_end_the_job_well(start):
    assert start("note('ran')").end() == (0, "")


def test_each_rank_knows_its_place(start):
    job = start("import json; print(json.dumps({k: os.environ[k] for k in ('RANK', 'WORLD_SIZE', 'MASTER_PORT')}))")
    output, _ = finish(job.process)
    rows = [json.loads(output), *(json.loads((job.folder / f"logs/rank-0000{n}.out").read_text()) for n in (1, 2))]
    assert [row["RANK"] for row in rows] == ["0", "1", "2"]
    assert {row["WORLD_SIZE"] for row in rows} == {"3"}
    assert len({row["MASTER_PORT"] for row in rows}) == 1


def test_ranks_that_were_stopped_end_the_job_with_the_resume_code(start):
    assert start("sys.exit(75)").end() == (75, "")
    assert start("sys.exit(75 if rank == 1 else 0)").end()[0] == 75


EITHER = pytest.mark.parametrize("start", ["programs", "forks"], indirect=True)
"""For what the gate tries with ranks that are programs, too: who supervises them is the same."""


@EITHER
@pytest.mark.parametrize("culprit", thinned(range(3), 2))
def test_a_killed_rank_takes_the_others_along_and_is_named(start, culprit):
    job = start(
        "note('started'); wait_for('started.0', 'started.1', 'started.2')\n"
        f"if rank == {culprit}: os.kill(os.getpid(), 9)\nhang()"
    )
    code, errors = job.end()
    assert code == 128 + signal.SIGKILL
    assert errors == (
        f"launch: rank {culprit} on {socket.gethostname()} was killed by SIGKILL (exit code 137): the kernel's "
        "out-of-memory killer does that (see dmesg), or a user's kill -9\n"
    )
    assert not any(is_running(pid) for pids in job.noted("started").values() for pid in pids)


def test_a_rank_that_fails_is_quoted_and_its_code_returned(start):
    job = start(
        "print('first'); print('error: rank 2: bad shard', file=sys.stderr); note('said')\n"
        "if rank == 2: wait_for('said.0'); sys.exit(65)\nhang()"
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
        f"{ANSWERS}\nif rank < 2: wait_until_gone(f'failed.{{rank + 1}}')\n"
        "print('error: bad data', file=sys.stderr); note('failed'); sys.exit(65)",
        SETTLE_S=NEVER_S,
    )
    assert job.end() == (65, "error: bad data\n")


ASKED = """
def were_asked(*ranks):
    notes = [Path(f"{sys.argv[3]}/asked.{rank}") for rank in ranks]
    return all(note.exists() and note.stat().st_size for note in notes)
"""
LATE = """
class Late(Clock):
    def monotonic():
        return Clock.now + 2.0 * 10**6 * were_asked(0, 2)
local.time = Late
"""
"""The launcher's clock jumps once two ranks have been asked to end and have not."""
ROUNDS = """
class Counting(Clock):
    rounds = 0
    def sleep(seconds):
        Clock.sleep(seconds)
        Counting.rounds += were_asked(0, 1, 2)
        if Counting.rounds == 5:
            Path(sys.argv[3], "rounds").write_text("5")
local.time = Counting
"""
"""The launcher notes that it has looked five times since all ranks were asked."""


def test_ranks_that_ignore_the_request_to_end_are_killed(start):
    job = start(
        f"signal.signal(15, lambda *_: note('asked')); {ANSWERS}note('started')\n"
        "if rank == 1: wait_for('started.0', 'started.2'); sys.exit(70)\nhang()",
        ASKED + LATE,
        FAILURE_GRACE_S=NEVER_S,
    )
    assert job.end()[0] == 70
    assert job.noted("asked").keys() == {0, 2}
    assert all(len(pids) == 1 for pids in job.noted("asked").values())


@EITHER
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGUSR1]
)
def test_a_stop_signal_reaches_every_rank_once(start, number):
    job = start(
        f"signal.signal({int(number)}, lambda *_: note('asked')); {ANSWERS}note('started')\n"
        "wait_for('rounds'); sys.exit(75)",
        ASKED + ROUNDS,
        STOPPED_GRACE_S=NEVER_S,
    )
    job.wait_for("started")
    job.process.send_signal(number)
    assert job.end() == (75, "")
    assert {rank: len(pids) for rank, pids in job.noted("asked").items()} == {0: 1, 1: 1, 2: 1}


def test_a_signal_that_comes_before_a_rank_can_answer_it_is_held_back(start):
    job = start(
        "note('started'); wait_until(lambda: 15 in signal.sigpending()); note('late')\n"
        f"signal.signal(15, lambda *_: (note('asked'), sys.exit(75))); {ANSWERS}hang()",
        STOPPED_GRACE_S=NEVER_S,
    )
    job.wait_for("started")
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == (75, "")
    assert job.noted("late").keys() == job.noted("asked").keys() == {0, 1, 2}


def test_peers_of_a_rank_that_was_stopped_by_itself_are_stopped_too(start):
    job = start(
        f"signal.signal(15, lambda *_: sys.exit(75)); {ANSWERS}note('started')\n"
        "if rank == 1: wait_for('started.0', 'started.2'); sys.exit(75)\nhang()"
    )
    assert job.end() == (75, "")


def test_a_stopped_rank_is_ended_at_once_when_the_others_have_said_so(start):
    job = start(
        "note('started')\nif rank == 2: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "wait_for('started.0', 'started.2')\n"
        "if rank == 1: wait_until_gone('started.0')\n"
        "sys.exit(76)",
        HANG_SETTLE_S=NEVER_S,
    )
    code, errors = job.end()
    assert (code, errors) == (76, "")  # rank 0 says who is frozen
    wait_until_dead([pid for pids in job.noted("started").values() for pid in pids])


def test_a_rank_that_hangs_and_cannot_end_is_ended_after_a_while(start):
    job = start("note('started')\nif rank == 2: hang()\nwait_for('started.2')\nsys.exit(76)")
    assert job.end() == (76, "")
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
    job = start("import ctypes\ndef crash():\n    ctypes.string_at(0)\nif rank == 1: crash()\nhang()")
    code, errors = job.end()
    assert code == 128 + signal.SIGSEGV
    assert "was killed by SIGSEGV (exit code 139): a crash in native code\n" in errors
    assert " in crash\n" in errors


CHILD = "note('started'); subprocess.Popen([sys.executable, '-c', PROGRAM]); hang()"
PROGRAM = (
    "PROGRAM = f\"import os, signal; open('{folder}/new.{rank}', 'w').write(str(os.getpid())); "
    "os.rename('{folder}/new.{rank}', '{folder}/child.{rank}'); signal.pause()\"\n"
)


@EITHER
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
        "note('started'); hang()",
        STANDS_STILL + "def late(parent, real=local.die_with):\n    note('forked')\n"
        "    wait_until(lambda: os.getppid() != parent)\n    real(parent)\n"
        "local.die_with = late",
    )
    job.wait_for("forked", 1)
    job.process.kill()
    wait_until_dead(job.noted("forked")[0])
    assert not job.noted("started")


def test_a_signal_to_the_group_does_not_end_a_janitor_that_has_just_been_forked(start):
    job = start(
        PROGRAM + CHILD,
        "from pretrain_launch import local\n" + STANDS_STILL + "def late(*pipe, real=local._keep_watch):\n"
        "    note('janitor')\n    wait_until(lambda: os.path.exists(f'{sys.argv[3]}/asked'))\n    real(*pipe)\n"
        "local._keep_watch = late",
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


@EITHER
def test_logs_of_earlier_attempts_are_kept(start):
    for _ in range(2):
        job = start("print('hello from', rank)")
        assert job.end()[0] == 0
    assert (job.folder / "logs" / "rank-00001.out").read_text() == "hello from 1\n" * 2
    assert not (job.folder / "logs" / "rank-00000.out").exists()


def test_a_log_that_cannot_be_written_is_told_before_a_rank_runs_on(start, tmp_path):
    (tmp_path / "logs" / "rank-00002.out").mkdir(parents=True)
    job = start("note('started'); hang()")
    code, errors = job.end()
    assert code != 0
    assert "rank-00002.out: cannot open: Is a directory; check the path" in errors
    wait_until_dead([pid for pids in job.noted("started").values() for pid in pids])


@pytest.mark.parametrize(
    ("prepare", "is_forked"),
    [
        ("", True),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", False),
        ("from pretrain.utils import forked; forked._ACCELERATORS = ('/dev/full',); gpu = open('/dev/full')", False),
    ],
    ids=["alone", "a thread", "a context on a GPU"],
)
def test_ranks_are_forks_with_names_where_nothing_of_the_launcher_would_be_lost(tmp_path, prepare, is_forked):
    job = Job("forks", tmp_path, "note(open('/proc/self/comm').read().strip())", prepare)
    assert job.end() == (0, "")
    assert all(bool(job.noted(f"rank-{rank}")) is is_forked for rank in range(3))


def test_a_fork_has_no_file_of_the_launcher(tmp_path):
    job = Job("forks", tmp_path, "from pretrain.utils.forked import open_files\nnote(len(open_files()))")
    assert job.end() == (0, "")
    assert job.noted("3").keys() == {0, 1, 2}, "its streams"


WORLD = """
import contextlib, json
world = json.loads(os.environ["PRETRAIN_RECOVERY"])["number"]
ranks = int(os.environ["WORLD_SIZE"])
def meet():
    note(f"world{world}")
    wait_for(*(f"world{world}.{other}" for other in range(ranks)))
def open_of(place):
    names = []
    for name in os.listdir(place):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"{place}/{name}"))
    return names
def is_read(name):  # for a moment: by the launcher, or as the log of a rank that it has just started
    return os.path.isfile(name) or name.startswith("/proc")
def count_files(place):
    wait_until(lambda: not any(map(is_read, open_of(place))))
    return sum(not is_read(name) for name in open_of(place))
def reach(step):
    if rank == 0:
        with open(f"{folder}/audit.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "attempt": world + 1}) + "\\n")
"""
"""Of a rank that knows which world it is in."""


def test_worlds_follow_each_other_and_nothing_of_an_earlier_one_is_left(tmp_path):
    """Descriptors, threads and children of the launcher, and descriptors of its forks: as many in each world."""
    job = Job(
        "forks",
        tmp_path,
        WORLD + "from pretrain.utils.forked import open_files\n"
        "own = len(open_files())\n"
        "reach(4 * world)\nmeet()\n"
        "if rank == world % 3:\n"
        "    launcher = f'/proc/{os.getppid()}'\n"
        "    children = open(f'{launcher}/task/{os.getppid()}/children').read().split()\n"
        "    files = count_files(f'{launcher}/fd')\n"
        "    counts = [own, files, len(os.listdir(f'{launcher}/task')), len(children)]\n"
        "    with open(f'{folder}/counts', 'a') as file: file.write(json.dumps(counts) + '\\n')\n"
        "    if world < 4: os.kill(os.getpid(), 9)\n"
        "    note('counted')\n"
        "wait_for('counted.1')",
        recover="spare",
    )
    code, errors = job.end()
    assert (code, errors.count("was killed by SIGKILL"), errors.count("launch: recovery")) == (0, 4, 4), errors
    counts = [json.loads(line) for line in (tmp_path / "counts").read_text().splitlines()]
    assert len(counts) == 5 and counts == [counts[0]] * 5
    assert counts[0][2:] == [1, 4], "one thread; three ranks and the janitor"
    wait_until_dead([pid for world in range(4) for pids in job.noted(f"world{world}").values() for pid in pids])


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_stopped_rank_counts_as_lost_and_is_replaced(start, culprit):
    job = start(
        WORLD + "meet()\n"
        f"if world == 0 and rank == {culprit}: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "if world == 0: hang()",
        recover="spare",
    )
    code, errors = job.end()
    host = socket.gethostname()
    assert code == 0
    assert f"launch: rank {culprit} on {host} was stopped, and killed as a lost one\n" in errors


def test_a_hang_is_told_with_its_reason_where_ranks_are_replaced(start):
    job = start(
        WORLD + "meet()\n"
        "if world == 0 and rank == 1:\n"
        "    print('error: rank 1: rank 1 hangs: in data, at:\\n' + '  a line\\n' * 60, file=sys.stderr)\n"
        "if world == 0 and rank != 1: wait_until_gone('world0.1')\n"
        "if world == 0: sys.exit(76)",
        recover="spare",
    )
    code, errors = job.end()
    assert code == 0
    assert "launch: rank 1: rank 1 hangs: in data\n" in errors
    assert "launch: recovery 1, 3 ranks\n" in errors


def test_a_smaller_world_leaves_out_the_place_of_the_lost_rank_until_none_is_left(start):
    job = start(
        WORLD + "reach(20 * world)\nmeet()\nnote(f\"place{world}-{os.environ['LOCAL_RANK']}\")\n"
        'if rank == 0: wait_for(*(f"world{world}.{other}" for other in range(ranks))); os.kill(os.getpid(), 9)\n'
        "hang()",
        recover="shrink",
    )
    code, errors = job.end()
    assert code == 137
    assert errors.endswith("launch: no smaller number of ranks fits the config\n")
    assert [len(job.noted(f"world{world}")) for world in range(4)] == [3, 2, 1, 0]
    assert job.noted("place2-2").keys() == {0}, "the last rank has the place of none that was lost"


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_memory_of_copies_lasts_as_long_as_the_launcher(tmp_path, is_killed):
    job = Job(
        "forks",
        tmp_path,
        WORLD + "meet()\nPath = __import__('pathlib').Path\n"
        "memory = Path(json.loads(os.environ['PRETRAIN_RECOVERY'])['memory'])\n"
        "(memory / f'{world}-{rank}').touch()\n"
        "if world == 0 and rank == 0: os.kill(os.getpid(), 9)\n"
        "if world == 0: hang()\n"
        "assert (memory / '0-0').exists()\nnote('seen')\n"
        "wait_for('end')",
        "from pretrain.run import worlds; worlds.SHARED_MEMORY = sys.argv[3]",
        recover="spare copies",
    )
    job.wait_for("seen")
    assert len(list(tmp_path.glob("pretrain-*"))) == 1
    if is_killed:
        job.process.kill()
    (tmp_path / "end").write_text("now")
    job.end()
    wait_until(lambda: not list(tmp_path.glob("pretrain-*")), "the memory is free")


def test_a_rank_that_is_lost_after_a_stop_is_not_replaced(start):
    job = start(
        WORLD + f"signal.signal(15, lambda *_: note('asked')); {ANSWERS}meet()\nwait_for('asked.1')\n"
        "if rank == 1: os.kill(os.getpid(), 9)\nhang()",
        recover="spare",
    )
    job.wait_for("world0")
    job.process.send_signal(signal.SIGTERM)
    assert job.end()[0] == 137
    assert not job.noted("world1")


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_during_the_imports_ends_a_launcher_that_has_nothing_to_save(number):
    code = "import os\nfrom pretrain_launch.local import importing\n"
    code += f"with importing(2): os.kill(os.getpid(), {int(number)})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    said = f"{number.name}: ended before a rank was started: nothing to save; the same command continues\n"
    assert (done.returncode, done.stderr) == (75, said)
