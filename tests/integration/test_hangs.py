"""Runs of the real trainer whose rank freezes, hangs, fails or dies, and what is left of them."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launch.local import choose_port
from tests.helpers.runs import RunMaker, kill_rank, rank_pids
from tests.unit.launch.test_local import wait_until_dead
from tests.unit.tracking.wandb_file import read_history

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TWO_RANKS = ("engine={kind: ddp, zero_stage: 0, timeout_s: 8}", "train.steps=100000", "checkpoint.every_steps=0")
ALONE = ("engine={kind: single, zero_stage: 0}", "train.steps=100000", "tracking.wandb=offline")
HOST = socket.gethostname()
# What one rank's source of data does at some sample: sleep for ever, or raise.
BAD_DATA = """
import os, time
from pretrain.data.source_streams import SourceStreams
from pretrain.errors import DataError

read = SourceStreams.read

def bad(self, positions):
    if os.environ["RANK"] == os.environ["BAD_RANK"] and positions.start >= 200:
        if os.environ["DOES"] == "sleep":
            time.sleep(3600)
        raise DataError("shard 7 is damaged", where="train/000007.tar", fix="restore it")
    return read(self, positions)

SourceStreams.read = bad
"""


def last_attempt(runs: RunMaker, name: str) -> dict[str, object]:
    """How run.json says that the last attempt ended."""
    attempt = json.loads(runs.folder(name).record.read_text())["attempts"][-1]
    return {key: attempt.get(key) for key in ("exit_code", "reason")}


@pytest.fixture
def bad_data(make_run, tmp_path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a run whose data goes wrong on one rank."""
    (tmp_path / "bad_data.py").write_text(BAD_DATA)

    def start(name: str, does: str, rank: int) -> subprocess.Popen[str]:
        environment = {"PYTHONPATH": str(tmp_path), "DOES": does, "BAD_RANK": str(rank)}
        return make_run.start(name, *TWO_RANKS, "extend=[bad_data]", **environment)

    return start


@pytest.mark.parametrize("culprit", [1, 0])
def test_a_frozen_rank_is_named_and_everything_ends_with_76(make_run, culprit):
    process = make_run.start("frozen", *TWO_RANKS)
    make_run.wait_for_step("frozen", 5, process, timeout_s=300)
    pids = rank_pids(process)
    time.sleep(1)  # a heartbeat of a step
    os.kill(pids[culprit], signal.SIGSTOP)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 76, output
    assert f"rank {culprit} ({HOST}, process {pids[culprit]}) is frozen or gone: no heartbeat for" in output
    # Where it was is a matter of chance: in a step, or in an import that the first steps make.
    assert re.search(r"last seen in [a-z-]+ of step \d+.*, at:\n( +\S.*:\d+ \S+\n)+", output), "the stack of then"
    found = last_attempt(make_run, "frozen")
    assert found["exit_code"] == 76
    assert f"rank {culprit} ({HOST}" in str(found["reason"])
    wait_until_dead(list(pids.values()))


@pytest.mark.parametrize("culprit", [1, 0])
def test_a_rank_whose_data_never_comes_is_named_with_phase_and_line(make_run, bad_data, culprit):
    process = bad_data("hung", "sleep", culprit)
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 76, output
    assert f"rank {culprit} ({HOST}, process " in output
    assert "hangs: in data of step " in output
    assert "(limit 8 s), while 1 rank waits for it, at:" in output
    assert "data/prefetch.py" in output
    # All threads of the hung rank, so also the one that reads.
    logs = make_run.folder("hung").logs
    assert " in bad\n" in (logs / f"rank-0000{culprit}.log").read_text()
    assert last_attempt(make_run, "hung")["exit_code"] == 76


def test_the_first_error_is_told_and_not_that_its_peers_lost_it(make_run, bad_data):
    process = bad_data("failed", "raise", 1)
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 65, output
    assert "train/000007.tar: shard 7 is damaged; restore it" in output
    assert "Connection closed" not in output
    assert "Traceback" not in output
    found = last_attempt(make_run, "failed")
    assert found["exit_code"] == 65
    assert "shard 7 is damaged" in str(found["reason"])


@pytest.mark.parametrize("culprit", [1, 0])
def test_a_killed_rank_is_said_first_and_brings_all_down(make_run, culprit):
    process = make_run.start("killed", *TWO_RANKS)
    make_run.wait_for_step("killed", 5, process, timeout_s=300)
    pids = rank_pids(process)
    kill_rank(process, culprit)
    wait_until_dead(list(pids.values()))  # within 10 s
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 137, output
    assert f"launch: rank {culprit} on {HOST} was killed by SIGKILL (exit code 137): the kernel's" in output
    assert "Traceback" not in output
    found = last_attempt(make_run, "killed")
    assert found["exit_code"] == 137
    assert str(found["reason"]).startswith(f"rank {culprit} on {HOST} was killed by SIGKILL")


def test_under_torchrun_a_frozen_rank_is_named_by_the_others(make_run):
    module = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(choose_port(None))]
    process = make_run.start("torchrun", *TWO_RANKS, launcher=[sys.executable, *module, "-m", "pretrain", "train"])
    make_run.wait_for_step("torchrun", 5, process, timeout_s=300)
    time.sleep(1)
    pid = rank_pids(process)[1]
    os.kill(pid, signal.SIGSTOP)
    with contextlib.suppress(ProcessLookupError):
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 1, output
    assert f"error: rank 1 ({HOST}, process {pid}) is frozen or gone: no heartbeat for" in output


def tracked(runs: RunMaker, name: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Starts a run that wandb tracks offline; returns it, and the processes that its rank has started."""
    process = runs.start(name, *ALONE, ranks=1)
    runs.wait_for_step(name, 10, process, timeout_s=300)
    while not (runs.folder(name).path / "wandb" / "SYNC.txt").exists():  # wandb has a run open
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    ranks = set(rank_pids(process).values())
    started = [p for p in psutil.Process(process.pid).children(recursive=True) if p.pid not in ranks and _runs(p)]
    services = [p for p in started if "wandb" in " ".join(p.cmdline())]
    assert services, "wandb's service is a process"
    return process, services


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_wandbs_service_survives_what_slurm_sends_to_every_process(make_run, number):
    process, services = tracked(make_run, "tracked")
    for service in services:
        service.send_signal(number)
    time.sleep(1)
    assert all(_runs(service) for service in services)
    for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(number)
    if number == signal.SIGUSR2:
        time.sleep(1)
        assert process.poll() is None, "nobody minds SIGUSR2"
        process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 75, output
    assert "wandb: cannot" not in output and "wandb: not finished" not in output, output
    rows = [row["step"] for row in read_history(make_run.folder("tracked").path)]
    steps = [json.loads(line)["step"] for line in make_run.folder("tracked").metrics.read_text().splitlines()]
    assert rows == steps, f"every row came to wandb\n{output}"


def test_a_killed_launcher_leaves_no_process(make_run):
    process, services = tracked(make_run, "orphaned")
    everything = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
    process.kill()
    process.communicate(timeout=60)
    wait_until_dead(everything + [service.pid for service in services])


def test_files_of_an_ended_job_are_those_of_any_other(make_run):
    """A rank that was frozen leaves nothing that the next attempt stumbles over."""
    process = make_run.start("again", *TWO_RANKS)
    make_run.wait_for_step("again", 5, process, timeout_s=300)
    os.kill(rank_pids(process)[1], signal.SIGSTOP)
    assert process.wait(timeout=120) == 76
    process.communicate()
    make_run.complete("again", *TWO_RANKS, "train.stop_after=3")
    assert Path(make_run.folder("again").checkpoints / "step-00000003").is_dir()
