"""A lock of a file is waited for as long as asked, shared or not, and let go of with the descriptor."""

import fcntl
import os
import threading
import time

import pytest

from pretrain.flock import take_flock


@pytest.fixture
def two(tmp_path):
    descriptors = [os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2)]
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def test_only_shared_locks_go_together(two):
    first, second = two
    assert take_flock(first) and not take_flock(second) and not take_flock(second, fcntl.LOCK_SH)
    assert take_flock(first, fcntl.LOCK_SH) and take_flock(second, fcntl.LOCK_SH)
    assert not take_flock(first, fcntl.LOCK_EX)


def test_a_lock_that_comes_free_in_time_is_had(two):
    first, second = two
    assert take_flock(first)
    begin = time.monotonic()
    assert not take_flock(second, wait_s=0.1) and time.monotonic() - begin >= 0.1
    threading.Timer(0.2, fcntl.flock, (first, fcntl.LOCK_UN)).start()
    assert take_flock(second, wait_s=30)


def test_a_file_system_without_locks_is_said(two, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="not implemented"):
        take_flock(two[0], wait_s=30)
