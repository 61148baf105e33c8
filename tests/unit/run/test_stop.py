"""The stop flag, against real signals in processes of their own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain.errors import EXIT_RESUME_ME
from pretrain.run.stop import STOP_SIGNALS
from tests.helpers.waiting import LIMIT_S, finish

ROOT = Path(__file__).parents[3]
PREAMBLE = """
import os, signal, subprocess, sys
from pretrain.run import stop
from tests.helpers.clock import FakeClock
from tests.helpers.waiting import hang, wait_until
stop.time = clock = FakeClock()
handle, taken = stop.StopFlag._handle, []

def take(self, number):
    handle(self, number)
    taken.append(number)

stop.StopFlag._handle = take
flag = stop.StopFlag()
"""
"""A signal that did not end the process is among those taken. Time passes where the program says so."""
WAIT = """
print("ready", flush=True)
wait_until(lambda: flag, "a signal")
clock.sleep(stop.SAME_REQUEST_S + 0.1)
print(flag.signal_name, flush=True)
try:
    wait_until(lambda: len(taken) == 2, "another")
    clock.sleep(stop.SAME_REQUEST_S + 0.1)
    print("taken", taken[1], flush=True)
    hang()
finally:
    print("cleaned up", flush=True)
"""
"""It says what it was asked when that was long ago."""
SLEEP_IN_C = """
import ctypes
print("ready", flush=True)
while True:  # a signal ends a sleep before its time
    ctypes.CDLL(None).sleep(60)
"""


@pytest.fixture
def start():
    """Starts Python after the preamble, waits until it is ready; kills what is left of it."""
    processes: list[subprocess.Popen[str]] = []

    def start(code: str, prepare: Callable[[], object] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + code],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=prepare,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def asked(start, number: signal.Signals) -> subprocess.Popen[str]:
    """A process that was asked to stop, and knows it, some time ago."""
    process = start("flag.install(); flag.arm()" + WAIT)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.readline() == f"{number.name}\n"
    return process


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_sets_the_flag_and_a_second_ends_the_process_at_once(start, number):
    process = asked(start, number)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == ""
    assert process.returncode == 128 + signal.SIGINT


LOGGED = "import logging\nlogging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')\n"


def test_it_says_what_a_signal_leads_to(start):
    process = start(LOGGED + "flag.install(); flag.arm()" + WAIT)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    lines = {process.stdout.readline() for _ in range(2)}
    effect = "saving and stopping after this step; a second one ends at once, without saving"
    assert lines == {"SIGINT\n", f"SIGINT: {effect}\n"}
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0].startswith("SIGTERM again: ended without a save; the same command continues")


def test_it_says_that_a_rank_has_failed_where_the_launcher_ends_the_others(start):
    process = start(LOGGED + "flag.install(); flag.arm(); flag.is_failing = lambda: True" + WAIT)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    lines = {process.stdout.readline() for _ in range(2)}
    assert lines == {"SIGTERM\n", "SIGTERM: a rank has failed: ending without a save\n"}


def test_it_says_that_there_was_nothing_to_save(start):
    process = start(LOGGED + "flag.install(); print('ready', flush=True); hang()")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert finish(process)[0].startswith("SIGINT: ended before the first step of this start: nothing to save")
    assert process.returncode == EXIT_RESUME_ME


def test_a_terminal_that_takes_nothing_does_not_hold_up_a_second_signal(start):
    stuck = "import logging\nlogging.root.setLevel(logging.INFO)\nlogging.root.addHandler(h := logging.Handler())\n"
    process = start(stuck + "h.emit = lambda record: hang()\nflag.install(); flag.arm()" + WAIT)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT\n"
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == ""
    assert process.returncode == 128 + signal.SIGINT


def test_the_end_that_usr1_has_announced_is_not_a_second_request(start):
    """Slurm sends SIGTERM at the limit, and SIGKILL some time later: that time is for the commit."""
    process = asked(start, signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == f"taken {int(signal.SIGTERM)}\n"
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == ""
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("first", STOP_SIGNALS)
def test_an_announcement_is_never_a_second_request(start, first):
    """Slurm sends SIGUSR1 to a rank, and so does its launcher, which may be late."""
    process = asked(start, first)
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == f"taken {int(signal.SIGUSR1)}\n"


def test_repeats_within_a_second_are_one_request(start):
    process = start(
        "flag.install(); flag.arm()\n"
        "for number in stop.STOP_SIGNALS:\n"
        "    os.kill(os.getpid(), number); wait_until(lambda: number in taken); clock.sleep(stop.SAME_REQUEST_S / 3)\n"
        "print('goes on', bool(flag), flush=True)"
    )
    assert finish(process)[0] == "goes on True\n"


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_before_there_is_a_loop_a_signal_ends_the_process_with_the_resume_code(start, number):
    process = start("flag.install()" + WAIT)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert finish(process)[0] == ""
    assert process.returncode == 75


def test_after_the_last_commit_a_signal_ends_the_process_with_its_outcome(start):
    process = start("flag.install(); flag.arm(); flag.disarm(0)" + WAIT)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == ""
    assert process.returncode == 0


def test_a_process_that_ends_at_once_says_farewell(start):
    process = start("flag.farewell = lambda code, why: print(code, why, flush=True); flag.install()" + WAIT)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert finish(process)[0] == "75 stopped by SIGUSR1\n"


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_main_thread_that_is_in_native_code_does_not_delay_the_end(start, number):
    process = start("flag.install()" + SLEEP_IN_C)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    finish(process)
    assert process.returncode == 75


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_that_the_launcher_held_back_comes_once_it_can_be_answered(start, number):
    process = start(
        f"os.kill(os.getpid(), {int(number)}); print('held', flush=True); flag.install(); hang()",
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS),
    )
    assert finish(process)[0] == "held\n"
    assert process.returncode == 75


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_that_comes_while_the_flag_is_installed_is_not_lost(start, number):
    process = start(
        f"real = signal.set_wakeup_fd\nsignal.set_wakeup_fd = lambda *arguments, **options: "
        f"(os.kill(os.getpid(), {int(number)}), real(*arguments, **options))\n"
        "flag.install(); hang()"
    )
    assert process.wait(LIMIT_S) == 75


CHILDREN = """
flag.install(); flag.arm()
import threading
from concurrent.futures import ThreadPoolExecutor
child = "import sys; print('up', flush=True); [print(line, end='', flush=True) for line in sys.stdin]"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
spawn = lambda: subprocess.Popen([sys.executable, "-c", child], **pipes, text=True)
children = [spawn(), ThreadPoolExecutor(1).submit(spawn).result()]
assert [child.stdout.readline() for child in children] == ["up\\n"] * 2
(asked, ask), (answers, answer) = os.pipe(), os.pipe()
forked = os.fork()
if not forked:
    os.close(ask)
    while byte := os.read(asked, 1):
        os.write(answer, byte)
    os._exit(0)

def is_up(child):
    child.stdin.write("?\\n")
    child.stdin.flush()
    return child.stdout.readline() == "?\\n"
"""
"""Two processes that it has started and one that it has forked; each answers while it lives."""


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_children_survive_the_signals_that_slurm_sends_to_every_process_of_a_step(start, name):
    process = start(
        CHILDREN
        + f"for pid in (os.getpid(), forked, *(c.pid for c in children)): os.kill(pid, signal.{name})\n"
        + ("wait_until(lambda: flag)\n" if name == "SIGUSR1" else "")
        + "os.write(ask, b'!')\n"
        "print(flag.signal_name, [is_up(child) for child in children], os.read(answers, 1), flush=True)\n"
        "for pid in (forked, *(c.pid for c in children)): os.kill(pid, signal.SIGKILL)\n"
    )
    assert finish(process)[0] == f"{'SIGUSR1' if name == 'SIGUSR1' else None} [True, True] b'!'\n"


def test_children_are_ended_by_sigterm_and_their_signals_are_not_taken_for_those_of_the_run(start):
    process = start(
        CHILDREN + "for pid in (forked, *(c.pid for c in children)): os.kill(pid, signal.SIGTERM)\n"
        "ended = [child.wait() for child in children]\n"
        "print(bool(flag), ended, os.waitpid(forked, 0)[1], flush=True)\n"
    )
    assert finish(process)[0] == f"False [{-signal.SIGTERM}, {-signal.SIGTERM}] {int(signal.SIGTERM)}\n"


def test_installing_twice_is_installing_once(start):
    process = start("flag.install(); flag.install(); flag.arm()" + WAIT)
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n"
