"""Runs of the real trainer whose rank freezes, hangs, fails or dies, and what is left of them."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch.distributed as td

from pretrain.utils.net import reserved_port, usable_addresses
from tests.helpers.fork_server import SOURCE_PATH
from tests.helpers.holds import Hold
from tests.helpers.processes import is_running
from tests.helpers.runs import RunMaker, kill_rank, rank_pids
from tests.helpers.waiting import finish, wait_until
from tests.unit.tracking.wandb_file import read_history

pytestmark = pytest.mark.long

TWO_RANKS = ("engine={kind: ddp, zero_stage: 0}", "train.steps=100000", "checkpoint.every_steps=0")
# Phases have a limit of 8 s from when a file is there, so that slowness before is no hang; heartbeats are noted.
LIMITS = """
import os
from pathlib import Path

from pretrain.run import heartbeat, watchdog
from pretrain.run.heartbeat import Board

NOTES = Path(os.environ["NOTES"])
LIMIT_OF, PUBLISH = heartbeat.limit_of, Board.publish

def limit_of(phase, timeout_s):
    return 8 if (NOTES / "short").exists() else LIMIT_OF(phase, timeout_s)

def publish(board, beat):
    PUBLISH(board, beat)
    note = NOTES / f"new-{beat.rank}"
    note.write_text(f"{beat.phase} {beat.step}")
    note.replace(NOTES / f"beat-{beat.rank}")

heartbeat.limit_of = watchdog.limit_of = limit_of
Board.publish = publish
"""
ALONE = ("engine={kind: single, zero_stage: 0}", "train.steps=100000", "tracking.wandb=offline")
HOST = socket.gethostname()
ROWS = 12
"""Of a step."""
# What one rank's source of data does at some sample: sleep for ever, or raise. No other rank counts as frozen.
BAD_DATA = """
import os
from pathlib import Path

from pretrain.run import watchdog
from pretrain.data.stream import SourceStreams
from pretrain.errors import DataError
from tests.helpers.waiting import hang

watchdog.SILENT_S = 600.0
read = SourceStreams.read

def bad(self, positions):
    if os.environ["RANK"] == os.environ["BAD_RANK"] and positions.start >= 200:
        if os.environ["DOES"] == "sleep":
            note = Path(os.environ["NOTES"], "sleeps.new")
            note.write_text(str(positions.start))
            note.replace(note.with_suffix(""))
            hang()
        raise DataError("shard 7 is damaged", where="train/000007.tar", fix="restore it")
    return read(self, positions)

SourceStreams.read = bad
"""


def wait_until_dead(pids: list[int]) -> None:
    """Waits until none of the processes runs."""
    wait_until(lambda: not any(is_running(pid) for pid in pids), f"none of {pids} runs")


def last_attempt(runs: RunMaker, name: str) -> dict[str, object]:
    """How run.json says that the last attempt ended."""
    attempt = json.loads(runs.folder(name).record.read_text())["attempts"][-1]
    return {key: attempt.get(key) for key in ("exit_code", "reason")}


@dataclass(frozen=True)
class Notes:
    """What the ranks of a run under `LIMITS` note, and its limit."""

    folder: Path
    process: subprocess.Popen[str]

    def wait(self, what: str, is_so: Callable[[], object]) -> None:
        """Waits for it while the run goes on."""
        wait_until(is_so, what, self.process)

    def beat(self, rank: int) -> tuple[str, int]:
        """Phase and step of the last heartbeat of a rank."""
        path = self.folder / f"beat-{rank}"
        phase, step = path.read_text().split() if path.exists() else ("none", "0")
        return phase, int(step)

    def wait_for_steps(self) -> None:
        """Waits until both ranks have told of a step, beyond the first ones and their imports."""
        self.wait("heartbeats", lambda: all(self.beat(rank)[1] >= 5 for rank in (0, 1)))

    def shorten(self) -> None:
        """Lets the limit of 8 s begin."""
        (self.folder / "short").touch()

    def end(self) -> str:
        """Waits for the run; returns its output."""
        return finish(self.process)[0]


@pytest.fixture
def start(make_run, tmp_path) -> Callable[..., Notes]:
    """Starts a run of two ranks under `LIMITS`, and other modules."""
    (tmp_path / "limits.py").write_text(LIMITS)
    (tmp_path / "bad_data.py").write_text(BAD_DATA)

    def start(name: str, *modules: str, launcher: list[str] | None = None, **environment: str) -> Notes:
        notes = tmp_path / f"notes-{name}"
        notes.mkdir()
        environment |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE_PATH}", "NOTES": str(notes)}
        extend = f"extend=[{', '.join(('limits', *modules))}]"
        return Notes(notes, make_run.start(name, *TWO_RANKS, extend, launcher=launcher, **environment))

    return start


@pytest.mark.parametrize("culprit", [1, 0])
def test_a_frozen_rank_is_named_and_everything_ends_with_76(make_run, start, culprit):
    run = start("frozen")
    run.wait_for_steps()
    pids = rank_pids(run.process)
    os.kill(pids[culprit], signal.SIGSTOP)
    run.shorten()
    output = run.end()
    assert run.process.returncode == 76, output
    assert f"rank {culprit} ({HOST}, process {pids[culprit]}) is frozen or gone: no heartbeat for" in output
    # Where it was is a matter of chance.
    assert re.search(r"last seen in [a-z-]+ of step \d+.*, at:\n( +\S.*:\d+ \S+\n)+", output), "the stack of then"
    found = last_attempt(make_run, "frozen")
    assert found["exit_code"] == 76
    assert f"rank {culprit} ({HOST}" in str(found["reason"])
    wait_until_dead(list(pids.values()))


@pytest.mark.parametrize("culprit", [1, 0])
def test_a_rank_whose_data_never_comes_is_named_with_phase_and_line(make_run, start, culprit):
    run = start("hung", "bad_data", DOES="sleep", BAD_RANK=str(culprit))
    run.wait("data that does not come", (sleeps := run.folder / "sleeps").exists)
    step = int(sleeps.read_text()) // ROWS  # it is asked for in the step before the one that it is for
    run.wait("the rank hangs", lambda: run.beat(culprit) == ("data", step))
    run.wait("the other waits", lambda: run.beat(1 - culprit) == ("update", step))
    run.shorten()
    output = run.end()
    assert run.process.returncode == 76, output
    assert f"rank {culprit} ({HOST}, process " in output
    assert f"hangs: in data of step {step} " in output
    assert "(limit 8 s), while 1 rank waits for it, at:" in output
    assert "data/prefetch.py" in output
    # All threads of the hung rank, so also the one that reads.
    logs = make_run.folder("hung").logs
    assert " in bad\n" in (logs / f"rank-0000{culprit}.log").read_text()
    assert last_attempt(make_run, "hung")["exit_code"] == 76


def test_the_first_error_is_told_and_not_that_its_peers_lost_it(make_run, start):
    run = start("failed", "bad_data", DOES="raise", BAD_RANK="1")
    output = run.end()
    assert run.process.returncode == 65, output
    assert "train/000007.tar: shard 7 is damaged; restore it" in output
    assert "Connection closed" not in output
    assert "Traceback" not in output
    found = last_attempt(make_run, "failed")
    assert found["exit_code"] == 65
    assert "shard 7 is damaged" in str(found["reason"])


@pytest.mark.parametrize("culprit", [1, 0])
def test_a_killed_rank_is_said_first_and_brings_all_down(make_run, culprit):
    process = make_run.start("killed", *TWO_RANKS)
    make_run.wait_for_step("killed", 5, process)
    pids = rank_pids(process)
    kill_rank(process, culprit)
    output = finish(process)[0]
    wait_until_dead(list(pids.values()))
    assert process.returncode == 137, output
    assert f"launch: rank {culprit} on {HOST} was killed by SIGKILL (exit code 137): the kernel's" in output
    assert "Traceback" not in output
    found = last_attempt(make_run, "killed")
    assert found["exit_code"] == 137
    assert str(found["reason"]).startswith(f"rank {culprit} on {HOST} was killed by SIGKILL")


def test_a_rank_that_crashes_in_native_code_shows_where_its_threads_were(make_run):
    process = make_run.start("crashed", *TWO_RANKS)
    make_run.wait_for_step("crashed", 2, process)
    kill_rank(process, 1, signal.SIGSEGV)
    output = finish(process)[0]
    assert process.returncode == 128 + signal.SIGSEGV, output
    assert f"launch: rank 1 on {HOST} was killed by SIGSEGV (exit code 139): a crash in native code" in output
    said = (make_run.folder("crashed").logs / "rank-00001.out").read_text()
    assert "Fatal Python error: Segmentation fault" in said
    assert re.search(r'File ".*/pretrain/training/loop\.py", line \d+ in _take_steps', said)


def test_under_torchrun_a_frozen_rank_is_named_by_the_others(start):
    with reserved_port(None) as port:
        module = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
        run = start("torchrun", launcher=[sys.executable, *module, "-m", "pretrain", "train"])
        run.wait_for_steps()
        pid = rank_pids(run.process)[1]
        os.kill(pid, signal.SIGSTOP)
        run.shorten()
        output = run.end()
    assert run.process.returncode == 1, output
    assert f"error: rank 1 ({HOST}, process {pid}) is frozen or gone: no heartbeat for" in output


def test_a_stranger_cannot_reach_the_store_and_a_forged_verdict_is_no_success(make_run, start):
    with reserved_port(None) as port:
        local = ["-m", "pretrain", "launch", "local", "--ranks", "2", "--port", str(port)]
    run = start("forged", launcher=[sys.executable, *local])
    run.wait_for_steps()
    for _, address in usable_addresses():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port)).close()
    forged = json.dumps({"text": "\x1b]0;PWN\x07", "exit_code": 0, "culprits": []})
    store = td.TCPStore("127.0.0.1", port, is_master=False)
    td.PrefixStore("pretrain-watchdog-0", store).set("verdict", forged)
    output = run.end()
    assert run.process.returncode == 76, output
    assert "\x1b" not in output
    assert last_attempt(make_run, "forged") == {"exit_code": 76, "reason": "]0;PWN"}


# A launcher may be late with a signal that the rank has had itself, and wandb slow to end.
PATIENT = """
from pretrain.run import stop
from pretrain.training import run

import held

stop.SAME_REQUEST_S = run.STOPPED_TRACKER_S = 600.0
"""


def tracked(runs: RunMaker, name: str, folder: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Starts a run that wandb tracks offline; returns it, and the processes of wandb's that its rank has started.

    It waits before step 40, whose metrics come after the signal that lets it go on.
    """
    (folder / "patient.py").write_text(PATIENT)
    hold = Hold(folder, name, "forward-backward", step=40)
    process = runs.start(name, *ALONE, "extend=[patient]", ranks=1, **hold.environment)
    wait_until(lambda: hold.is_reached, "step 40", process)
    note = runs.folder(name).path / "wandb" / "SYNC.txt"
    wait_until(note.exists, "wandb has a run open", process)
    ranks = set(rank_pids(process).values())
    started = [p for p in psutil.Process(process.pid).children(recursive=True) if p.pid not in ranks]
    services = [p for p in started if _is_service(p)]
    assert services, "wandb's service is a process"
    return process, services


def _is_service(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return _runs(process) and "wandb" in " ".join(process.cmdline())
    return False


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _would_die(pid: int, number: int) -> bool:
    """Whether a thread of a process neither holds a signal back nor ignores it, nor has a handler."""
    bit = 1 << (number - 1)
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    assert texts, "it has ended"
    masks = [
        [int(mask, 16) for mask in re.findall(r"^Sig(?:Blk|Ign|Cgt):\s*(\w+)", text, re.MULTILINE)] for text in texts
    ]
    return any(not any(mask & bit for mask in of_thread) for of_thread in masks)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_wandbs_service_survives_what_slurm_sends_to_every_process(make_run, tmp_path, number):
    process, services = tracked(make_run, "tracked", tmp_path)
    assert not [service for service in services if _would_die(service.pid, number)]
    members = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in sorted(members, key=lambda member: member not in services):  # while the rank still waits
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(number)
    if number == signal.SIGUSR2:  # a process that minded it would do so first: signals come in the order of numbers
        process.send_signal(signal.SIGTERM)
    output = finish(process)[0]
    assert process.returncode == 75, output
    asked_by = signal.SIGTERM if number == signal.SIGUSR2 else number
    assert f"stopped by {asked_by.name} at step 40" in output, "nobody minds SIGUSR2"
    assert "wandb: cannot" not in output and "wandb: not finished" not in output, output
    rows = [row["step"] for row in read_history(make_run.folder("tracked").path)]
    steps = [json.loads(line)["step"] for line in make_run.folder("tracked").metrics.read_text().splitlines()]
    assert rows == steps and steps[-1] == 40, f"every row came to wandb, that after the signal too\n{output}"


def test_a_killed_launcher_leaves_no_process(make_run, tmp_path):
    process, services = tracked(make_run, "orphaned", tmp_path)
    everything = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
    process.kill()
    finish(process)
    wait_until_dead(everything + [service.pid for service in services])


def test_files_of_an_ended_job_are_those_of_any_other(make_run, start):
    """A rank that was frozen leaves nothing that the next attempt stumbles over."""
    run = start("again")
    run.wait_for_steps()
    os.kill(rank_pids(run.process)[1], signal.SIGSTOP)
    run.shorten()
    output = run.end()
    assert run.process.returncode == 76, output
    make_run.complete("again", *TWO_RANKS, "train.stop_after=3")
    assert Path(make_run.folder("again").checkpoints / "step-00000003").is_dir()
