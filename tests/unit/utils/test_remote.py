"""What a failure over a network means, and how long attempts go on."""

import errno

import pytest

from pretrain.utils import remote
from pretrain.utils.remote import AbandonedError, Failure, RemoteAttempts, Waits, describe, failure_of
from tests.helpers.clock import FakeClock

URL = "https://host/a.txt"


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ConnectionResetError(), Failure.PASSING),
        (TimeoutError(), Failure.PASSING),
        (FileNotFoundError(), Failure.MISSING),
        (PermissionError(), Failure.FORBIDDEN),
        (type("ProfileNotFound", (Exception,), {})(), Failure.FORBIDDEN),
        (OSError(errno.ENAMETOOLONG, "too long"), Failure.REFUSED),
    ],
)
def test_a_failure_passes_or_does_not(error, failure):
    assert failure_of(error) is failure


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(remote, "time", clock)
    return clock


def test_attempts_end_when_there_was_no_answer_for_too_long(clock):
    attempts, begun = RemoteAttempts(URL, Waits(0.001, 0.002, 0.05)), clock.now
    number = 0
    with pytest.raises(OSError, match=r"gone, and no answer for 0\.05 s"):
        while number < 100:
            attempts.wait("gone")
            number += 1
    assert number >= 24
    assert 0.05 - 0.002 < clock.now - begun <= 0.05


def test_an_answer_starts_the_count_anew(clock):
    attempts = RemoteAttempts(URL, Waits(0.01, 0.01, 0.015))
    begun = clock.now
    for _ in range(5):
        attempts.wait("gone")
        attempts.succeed()
    assert clock.now - begun > 0.015, "more than the time after which attempts without an answer end"


def test_attempts_are_abandoned_while_they_wait():
    attempts = RemoteAttempts(URL, Waits(60, 60, 600), abandoned=lambda: True)
    with pytest.raises(AbandonedError):
        attempts.wait("gone")


def test_no_secret_of_an_address_is_in_a_description():
    error = ConnectionError("no answer of https://lab:secret@host/a.txt?X-Amz-Signature=secret\nin time")
    assert describe(error) == "ConnectionError: no answer of https://host/a.txt?... in time"
