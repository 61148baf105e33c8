import errno
import logging

import pytest

from pretrain.utils import remote
from pretrain.utils.remote import Waits
from tests.helpers.clock import FakeClock

URL = "https://host/a.txt?secret"


def call_remote(url, call):
    return remote.call_remote(url, call, Waits(0.01, 0.02, 0.1))


class Calls:
    """Fails in the ways that are given, one after another, then returns 7."""

    def __init__(self, *failures):
        self.failures = list(failures)
        self.number = 0

    def __call__(self):
        self.number += 1
        if self.failures:
            raise self.failures.pop(0)
        return 7


class AnswerError(OSError):
    """As the clients of each store tell of an answer that is an error."""

    def __init__(self, **attributes):
        super().__init__("answer")
        self.__dict__.update(attributes)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, "time", FakeClock())


@pytest.mark.parametrize(
    "failure",
    [
        ConnectionResetError("gone"),
        TimeoutError(),
        AnswerError(status=500),
        AnswerError(code=429),
        AnswerError(response={"ResponseMetadata": {"HTTPStatusCode": 503}}),
    ],
)
def test_what_may_pass_is_tried_again(failure, caplog):
    calls = Calls(failure, failure)
    with caplog.at_level(logging.WARNING):
        assert call_remote(URL, calls) == 7
    assert calls.number == 3
    assert caplog.text.count("https://host/a.txt: ") == 2 and "secret" not in caplog.text


def test_the_last_failure_is_one_error_that_says_for_how_long():
    calls = Calls(*[ConnectionResetError(f"gone at {URL}") for _ in range(99)])
    message = r"ConnectionResetError: gone at https://host/a\.txt\?\.\.\., and no answer for 0\.1 s"
    with pytest.raises(OSError, match=message) as caught:
        call_remote(URL, calls)
    assert (caught.value.filename, caught.value.errno) == ("https://host/a.txt", errno.EIO)
    assert 5 <= calls.number <= 20  # waits of 5 to 20 ms, in 100 ms


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (FileNotFoundError(), FileNotFoundError),
        (AnswerError(status=404), FileNotFoundError),
        (AnswerError(response={"ResponseMetadata": {"HTTPStatusCode": 404}}), FileNotFoundError),
        (PermissionError("no"), PermissionError),
        (AnswerError(status=401), PermissionError),
        (AnswerError(code="403"), PermissionError),
        (AnswerError(status=400), OSError),
        (OSError(errno.EINVAL, "bad request"), OSError),
    ],
)
def test_what_will_not_pass_is_told_at_once(failure, expected):
    calls = Calls(failure)
    with pytest.raises(expected) as caught:
        call_remote(URL, calls)
    assert type(caught.value) is expected
    assert (caught.value.filename, calls.number) == ("https://host/a.txt", 1)
    assert caught.value.errno and caught.value.strerror


def test_a_mistake_of_ours_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        call_remote(URL, Calls(ZeroDivisionError()))
