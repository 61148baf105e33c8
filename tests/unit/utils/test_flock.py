"""A lock of a file is waited for as long as asked, shared or not, and let go of with the descriptor."""

import fcntl
import os
from collections.abc import Callable

import pytest

from pretrain.utils import io
from pretrain.utils.io import take_flock
from tests.helpers.clock import FakeClock

PATIENCE = 5.0


class Clock(FakeClock):
    """While it is waited for, something happens: when half as long again has passed as somebody was patient."""

    def __init__(self, event: Callable[[], object]) -> None:
        super().__init__()
        self._begun, self._event = self.now, event

    @property
    def waited(self) -> float:
        """How much has passed."""
        return self.now - self._begun

    def sleep(self, seconds: float) -> None:
        """As `time.sleep`."""
        super().sleep(seconds)
        if self.waited > 1.5 * PATIENCE:
            self._event()


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


def test_a_lock_is_waited_for_as_long_as_asked_and_had_when_it_comes_free(two, monkeypatch):
    first, second = two
    assert take_flock(first)
    clock = Clock(lambda: fcntl.flock(first, fcntl.LOCK_UN))
    monkeypatch.setattr(io, "time", clock)
    assert not take_flock(second, wait_s=PATIENCE)
    assert clock.waited == pytest.approx(PATIENCE, abs=io.LOOK_EVERY_S)
    assert take_flock(second, wait_s=2 * PATIENCE)
    assert clock.waited == pytest.approx(1.5 * PATIENCE, abs=2 * io.LOOK_EVERY_S)


def test_a_file_system_without_locks_is_said(two, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="not implemented"):
        take_flock(two[0], wait_s=PATIENCE)
