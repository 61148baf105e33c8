"""What goes through the store when a process stands still between two calls."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch.distributed as td

from pretrain.run import heartbeat as boards
from pretrain.run import heartbeat as messengers
from pretrain.run.heartbeat import Beat, Board, Messenger, Progress, Pulse, Verdict
from tests.helpers.waiting import LIMIT_S, pass_time, wait_until

BEAT = Beat(1, "n1", 7, number=1, marks=2, collectives=3, phase="data", step=4, for_s=0.0, limit_s=600.0, stack=[])


class Answering:
    """A store that says that every key is there; `asked` is set when one is asked for."""

    def __init__(self, store: td.Store) -> None:
        self._store, self.asked = store, threading.Event()

    def check(self, keys: list[str]) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked.set()
        return self._store.multi_get(keys)


def check_late_answer(late_s: float) -> None:
    """Asks a store for a heartbeat that comes so long after."""
    store = td.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = (Board("127.0.0.1", store.port) for _ in range(2))
    assert ours._store.timeout.total_seconds() == boards.ANSWER_S
    ours._store = Answering(ours._store)
    with ThreadPoolExecutor(1) as threads:
        beats = threads.submit(ours.read, [1])
        assert ours._store.asked.wait(LIMIT_S)
        pass_time(late_s)
        theirs.publish(BEAT)
        assert beats.result(LIMIT_S) == [BEAT]


def test_a_store_is_given_time_to_answer_however_soon_it_has_to_be_reached():
    """Else a rank 0 that stands still for a while, between two questions, would be taken for gone,
    and for good."""
    check_late_answer(0.0)


@pytest.mark.long
def test_a_store_may_take_longer_to_answer_than_to_be_reached():
    check_late_answer(boards.CONNECT_S + 1.0)


class SlowBoard:
    """A board that answers whether there is a verdict when it is let."""

    asked, let = threading.Event(), threading.Event()
    concluded: ClassVar[list[Verdict]] = []

    def __init__(self, host: str, port: int) -> None:
        pass

    def publish(self, beat: Beat) -> None:
        pass

    def read(self, ranks: Iterable[int]) -> list[Beat]:
        return []

    def verdict(self) -> Verdict | None:
        self.asked.set()
        self.let.wait(LIMIT_S)
        return None

    def conclude(self, verdict: Verdict) -> Verdict:
        self.concluded.append(verdict)
        return verdict


@pytest.fixture
def messenger(monkeypatch) -> Iterator[Messenger]:
    monkeypatch.setattr(messengers, "BEAT_S", 0.02)
    monkeypatch.setattr(messengers, "Board", SlowBoard)
    monkeypatch.setattr(messengers, "_listens", lambda address: True)
    messenger = Messenger(Pulse(Progress(), 1, 600.0, lambda: 0), 1, 2, ("127.0.0.1", 1), 0)
    messenger.start()
    yield messenger
    SlowBoard.let.set()
    messenger.close()


def test_what_is_said_while_others_are_asked_is_in_the_store_before_the_rank_goes_on(messenger):
    said = Verdict("rank 1 failed first: shard 7 is damaged", 65, (1,))

    def say() -> list[Verdict]:
        messenger.say(said, LIMIT_S)
        return list(SlowBoard.concluded)

    SlowBoard.asked.wait(LIMIT_S)
    with ThreadPoolExecutor(1) as threads:
        there = threads.submit(say)
        wait_until(lambda: messenger._outgoing is said, "the verdict is on its way")
        SlowBoard.let.set()
        assert there.result(LIMIT_S) == [said]


class Coming(dict):
    """Heartbeats, to which the thread adds that of a rank while they are looked through."""

    def items(self) -> Iterator:
        for item in super().items():
            self[2] = item[1]
            yield item


def test_heartbeats_may_come_while_those_that_there_are_are_looked_through():
    messenger = Messenger(Pulse(Progress(), 0, 600.0, lambda: 0), 0, 3, ("127.0.0.1", 1), 0)
    messenger._seen = Coming({1: (BEAT, 0.0)})
    messenger.observe(True)
    assert messenger.standings()[1].beat == BEAT
