"""Waiting for a server: a stop ends it, closing ends it, and a long wait says its reason."""

import itertools
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pretrain.shards import remote_store
from pretrain.shards.store import Patience, WaitStoppedError
from tests.helpers.clock import FakeClock
from tests.helpers.served import (
    tars,
    train_shards,
)
from tests.helpers.servers import Fault
from tests.helpers.waiting import LIMIT_S, wait_until


def test_a_stop_ends_the_wait(data, server, opened):
    server.faults.append(Fault(path=".tar", times=9, hold_after=100))
    store = opened(stop=lambda: bool(tars(server)))
    with pytest.raises(WaitStoppedError):
        store.path(train_shards(data)[0].name)


def test_a_stop_ends_the_wait_for_an_index(server, opened):
    server.stop()
    looks = itertools.count()
    with pytest.raises(WaitStoppedError):
        opened(stop=lambda: next(looks) > 3)


def test_close_ends_the_wait_of_other_threads(data, server, opened):
    server.faults.append(Fault(path=".tar", times=9, hold_after=100))
    store = opened()
    caught = []

    def wait():
        try:
            store.path(train_shards(data)[0].name)
        except WaitStoppedError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: tars(server))
    server.stop()  # a silent server would be waited for
    store.close()
    store.close()
    thread.join()
    assert len(caught) == 1


class LookClock(FakeClock):
    """A second passes at each look."""

    def monotonic(self):
        self.now += 1
        return self.now


def test_a_long_wait_is_reported_with_its_reason(data, server, opened, caplog, monkeypatch):
    clock = LookClock()
    monkeypatch.setattr(remote_store, "time", clock)
    name = train_shards(data)[0].name
    server.faults.append(Fault(path=".tar", times=10**9, status=503))
    store = opened(patience=Patience(first_s=0.02, longest_s=0.02, total_s=LIMIT_S, report_s=1))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.path, name)
        report = rf"waiting for {server.url}/{name} since \d+ s: 0\.0 of 0\.0 MiB, the server answers 503"
        wait_until(lambda: re.search(report, caplog.text))
        server.faults[0].times = 0
        waiting.result()
    assert caplog.text.count("waiting for") <= 1 + math.log2(clock.now - 1000), "at 1, 2, 4, ... s, and no more"


def test_a_stop_ends_the_wait_for_lengths(data, server, opened):
    name = train_shards(data)[0].lengths.name
    server.faults.append(Fault(path=name, status=503, times=10**6))
    store = opened(stop=lambda: server.paths().count(f"/{name}") > 1)
    with pytest.raises(WaitStoppedError):
        store.sidecar(name)
