"""The time that a rank needs, under clocks that the test owns."""

import threading

import pytest

from pretrain.tracking import own_time
from pretrain.tracking.own_time import FEWEST, STEPS, OwnTime, core_wait_s


class Machine:
    """Clocks of a thread: all time, time without a core, and CPU time."""

    def __init__(self) -> None:
        self.now = self.without_core = self.cpu = 0.0
        self.own = OwnTime(lambda: self.now, lambda: self.without_core, lambda: self.cpu)

    def work(self, cpu: float, without_core: float = 0.0, stopped: float = 0.0) -> None:
        """Passes time."""
        self.cpu += cpu
        self.without_core += without_core
        self.now += cpu + without_core + stopped

    def step(self, *pieces: tuple[float, ...]) -> float:
        """Takes a step of pieces of work, with other work between them."""
        for piece in pieces:
            self.own.start()
            self.work(*piece)
            self.own.stop()
            self.work(9, 9, 9)
        return self.own.end_step()


def test_waits_for_a_core_and_for_others_are_not_work():
    machine = Machine()
    times = [machine.step((2, 3), (1, 5)) for _ in range(FEWEST + 8)]
    assert times[: FEWEST - 1] == [0] * (FEWEST - 1) and times[-1] == 3
    machine.own.start()
    machine.work(1)
    with machine.own.waiting():
        machine.work(0.5, 4, 8)
    machine.work(2)
    machine.own.stop()
    with machine.own.waiting():
        machine.work(1)
    assert machine.own.end_step() == 3
    assert machine.own.end_step() == 0


def test_a_stopped_process_takes_longer_and_one_with_a_busy_neighbour_does_not():
    machine = Machine()
    times = [machine.step((2, 1)) for _ in range(50)]
    assert times[-1] == 2
    assert machine.step((2, 1, 0.4)) == pytest.approx(2.4)
    assert machine.step((3, 1, 0.6)) == pytest.approx(2.4)
    assert machine.step((3, 1)) == pytest.approx(2)


def test_a_core_that_stays_slow_is_slow():
    machine = Machine()
    for _ in range(2 * STEPS):
        machine.step((2, 1))
    times = [machine.step((3, 0)) for _ in range(STEPS)]
    assert times[STEPS // 3] == pytest.approx(2) and times[-1] == pytest.approx(3)


def test_each_thread_has_its_own_wait_for_a_core_and_it_never_falls(monkeypatch):
    first = core_wait_s()
    others: list[float] = []
    thread = threading.Thread(target=lambda: others.append(core_wait_s()))
    thread.start()
    thread.join()
    assert 0 <= first <= core_wait_s() and others[0] >= 0
    monkeypatch.setattr(own_time, "_open_schedstat", lambda pid, thread: None)
    assert core_wait_s() == 0  # a system that does not say
