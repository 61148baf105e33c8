"""The stop flag, against real signals."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pretrain.control import STOP_SIGNALS, StopFlag


@pytest.fixture(autouse=True)
def _own_handlers_back():
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def armed() -> StopFlag:
    """A flag that a loop looks at."""
    flag = StopFlag()
    flag.install()
    flag.arm()
    return flag


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_sets_the_flag_and_nothing_else(number):
    flag = armed()
    assert not flag
    os.kill(os.getpid(), number)
    assert flag
    assert flag.signal_name == signal.Signals(number).name


def test_repeats_within_a_second_are_one_request():
    flag = armed()
    for number in STOP_SIGNALS:
        os.kill(os.getpid(), number)
    assert flag.signal_name == "SIGTERM"


WAIT_FOREVER = """
import time
from pretrain import control
control.SAME_REQUEST_S = 0.05
flag = control.StopFlag()
flag.install()
{arm}
print("ready", flush=True)
while not flag:
    time.sleep(0.01)
print(flag.signal_name, flush=True)
try:
    while True:
        time.sleep(0.01)
finally:
    print("cleaned up", flush=True)
"""


def start(arm: bool) -> subprocess.Popen[str]:
    """A process that notes a first signal and waits for a second."""
    code = WAIT_FOREVER.format(arm="flag.arm()" if arm else "")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_second_signal_ends_the_process_at_once(number):
    process = start(arm=True)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n"
    time.sleep(0.1)
    process.send_signal(number)
    assert process.communicate(timeout=10)[0] == ""
    assert process.returncode == 128 + number


def test_before_there_is_a_loop_a_signal_ends_the_process_with_the_resume_code():
    process = start(arm=False)
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=10)[0] == ""
    assert process.returncode == 75
