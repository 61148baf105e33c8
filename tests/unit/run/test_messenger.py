"""What goes through the store when a process stands still between two calls."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch.distributed as td

from pretrain.run import heartbeat as boards
from pretrain.run import heartbeat as messengers
from pretrain.run.heartbeat import SILENT_S, Beat, Board, Messenger, Progress, Pulse, Verdict
from tests.helpers.clock import FakeClock
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


class SharedBoard:
    """A board of many ranks in one process, which counts the heartbeats that are read."""

    def __init__(self) -> None:
        self.beats: dict[int, Beat] = {}
        self.turns: dict[str, str] = {}
        self.num_read = 0

    def publish(self, beat: Beat) -> None:
        self.beats[beat.rank] = beat

    def read(self, ranks: Iterable[int]) -> list[Beat]:
        found = [self.beats[rank] for rank in ranks if rank in self.beats]
        self.num_read += len(found)
        return found

    def take_turn(self, key: str, expected: str, mine: str) -> str:
        if self.turns.get(key, "") == expected:
            self.turns[key] = mine
        return self.turns[key]

    def verdict(self) -> Verdict | None:
        return None


@pytest.fixture
def clock(monkeypatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(messengers, "time", clock)
    return clock


def messengers_of(size: int) -> list[Messenger]:
    """Ranks without threads."""
    pulses = [Pulse(Progress(), rank, 600.0, lambda: 0) for rank in range(size)]
    return [Messenger(pulse, rank, size, ("127.0.0.1", 1), 0) for rank, pulse in enumerate(pulses)]


def beat(clock: FakeClock, board: SharedBoard, ranks: Iterable[Messenger], seconds: int) -> None:
    """Lets the ranks talk to the store once a second."""
    for _ in range(seconds):
        for messenger in ranks:
            messenger._round(board)
        clock.sleep(1.0)


def test_a_job_that_stands_still_is_read_by_a_few_of_its_ranks(clock):
    size = 200
    board, ranks = SharedBoard(), messengers_of(size)
    beat(clock, board, ranks, 1)
    board.num_read = 0
    for messenger in ranks:
        messenger.observe(True)
    beat(clock, board, ranks, 5)
    assert board.num_read <= 5 * (messengers.TURNS + 1) * size
    watching = [messenger for messenger in ranks if messenger.has_watched]
    assert len(watching) == messengers.TURNS
    assert all(len(messenger.standings()) == size - 1 for messenger in watching)
    for messenger in ranks:
        messenger.observe(False)
    beat(clock, board, ranks, 1)
    assert set(board.turns.values()) == {""} and not any(messenger.has_watched for messenger in ranks)


def test_a_rank_that_loses_its_turn_is_followed_by_one_that_begins_to_watch(clock):
    size = 2 * messengers.TURNS
    board, ranks = SharedBoard(), messengers_of(size)
    for messenger in ranks:
        messenger.observe(True)
    beat(clock, board, ranks, 5)
    assert [messenger.has_watched for messenger in ranks] == [True] * (size // 2) + [False] * (size // 2)
    frozen, later = ranks[1], ranks[1 + messengers.TURNS]
    others = [messenger for messenger in ranks if messenger is not frozen]
    beat(clock, board, others, 5)
    assert later._turn is not None and not later.has_watched
    assert max(standing.silent_s for standing in later.standings().values()) < SILENT_S
    beat(clock, board, others, 4)
    silent = {rank for rank, standing in later.standings().items() if standing.silent_s >= SILENT_S}
    assert later.has_watched and silent == {1}
    frozen._round(board)
    assert not frozen.has_watched


def test_ranks_that_have_lost_one_do_not_wait_for_the_limit_of_those_that_have_not(clock):
    size = 2 * messengers.TURNS
    board, ranks = SharedBoard(), messengers_of(size)
    for messenger in ranks[: size // 2]:
        messenger.observe(True)
    for messenger in ranks[size // 2 :]:
        messenger.observe(True, purpose="loss")
    beat(clock, board, ranks, 5)
    assert all(messenger.has_watched for messenger in ranks)
