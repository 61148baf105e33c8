"""Work done ahead: in order, bounded, with errors as themselves."""

import itertools
import threading

import pytest

from pretrain.data import prefetch
from pretrain.data.prefetch import Prefetcher
from pretrain.shards.store import WaitStoppedError
from tests.helpers.clock import FakeClock
from tests.helpers.waiting import LIMIT_S, wait_until


def test_items_come_in_order_however_long_each_takes():
    made = [threading.Event() for _ in range(30)]

    def make(number: int) -> int:
        if number % 3 == 0:
            assert made[number + 1].wait(LIMIT_S)  # ready after the one behind it
        made[number].set()
        return number

    prefetcher = Prefetcher(make, depth=6, workers=4, total=30)
    assert [prefetcher.take() for _ in range(30)] == list(range(30))
    prefetcher.close()


def test_no_more_than_depth_items_are_made_ahead():
    made = []
    prefetcher = Prefetcher(made.append, depth=3, workers=1)
    for taken in range(1, 5):
        prefetcher.take()
        assert len(made) <= taken + 3
    prefetcher.close()


def test_without_threads_items_are_made_when_they_are_taken():
    made = []

    def make(number: int) -> int:
        if number == 2:
            raise KeyError("the third")
        made.append(number)
        return number

    before = set(threading.enumerate())
    prefetcher = Prefetcher(make, depth=4, workers=0)
    assert not made
    assert [prefetcher.take(), prefetcher.take()] == made == [0, 1]
    assert before.issuperset(threading.enumerate())
    with pytest.raises(KeyError, match="the third"):
        prefetcher.take()
    with pytest.raises(StopIteration):
        prefetcher.take()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_finite_one_ends(workers: int):
    prefetcher = Prefetcher(lambda number: number, depth=4, workers=workers, total=3)
    assert [prefetcher.take() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(StopIteration):
        prefetcher.take()
    prefetcher.close()


def test_an_error_is_raised_as_itself_in_its_turn_and_ends_the_work():
    def make(number: int) -> int:
        if number == 2:
            raise KeyError("the third")
        return number

    prefetcher = Prefetcher(make, depth=4, workers=2)
    assert [prefetcher.take(), prefetcher.take()] == [0, 1]
    with pytest.raises(KeyError, match="the third"):
        prefetcher.take()
    with pytest.raises(StopIteration):
        prefetcher.take()


def test_close_joins_the_threads():
    before = set(threading.enumerate())
    prefetcher = Prefetcher(lambda number: number, depth=8, workers=4)
    prefetcher.take()
    prefetcher.close()
    prefetcher.close()
    assert before.issuperset(threading.enumerate())


def wait_until_ready(prefetcher):
    """Waits until the next item is there."""
    wait_until(prefetcher._queue[0].args[0].done, "the next item")


def test_waiting_is_measured(monkeypatch):
    clock, first = FakeClock(), threading.Event()
    monkeypatch.setattr(prefetch, "time", clock)

    def look_up() -> bool:
        if not first.is_set():
            clock.sleep(0.05)
            first.set()
        return False

    prefetcher = Prefetcher(lambda number: number or first.wait(), depth=1, workers=1, stop=look_up)
    prefetcher.take()
    assert prefetcher.wait_s == pytest.approx(0.05)
    wait_until_ready(prefetcher)
    prefetcher.take()
    assert prefetcher.wait_s == pytest.approx(0.05)
    prefetcher.close()


def test_a_stop_ends_the_wait_for_an_item_that_does_not_come_and_its_thread_is_left_behind():
    taken, release, looks = threading.Event(), threading.Event(), itertools.count()

    def make(number: int) -> int:
        if number == 1:
            release.wait()
        return number

    prefetcher = Prefetcher(make, depth=2, workers=1, stop=lambda: taken.is_set() and next(looks) == 3)
    assert prefetcher.take() == 0
    taken.set()
    with pytest.raises(WaitStoppedError):
        prefetcher.take()
    prefetcher.close()  # does not wait for it
    assert not release.is_set()
    release.set()


def test_what_is_ready_is_taken_in_spite_of_a_stop():
    prefetcher = Prefetcher(lambda number: number, depth=2, workers=1, stop=lambda: True)
    wait_until_ready(prefetcher)
    assert prefetcher.take() == 0
    prefetcher.close()
