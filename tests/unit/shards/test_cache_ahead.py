"""Shards that are fetched before they are needed: in the order of need, and never in the way of what is needed now."""

import threading

import pytest

from pretrain.shards import fetch
from pretrain.shards.store import UnavailableError
from tests.helpers.served import (
    cached,
    tars,
    train_shards,
)
from tests.helpers.servers import Fault
from tests.helpers.waiting import LIMIT_S, wait_until


def test_shards_are_fetched_ahead_in_the_order_of_need(data, server, opened, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "PARALLEL", 1)
    names = [shard.name for shard in train_shards(data)][::-1]
    opened().upcoming(names)
    wait_until(lambda: len(cached(tmp_path / "cache")) == len(names))
    assert tars(server) == names


def test_only_so_many_are_fetched_ahead_at_a_time(data, server, opened, monkeypatch):
    next_job, refused = fetch.Fetcher._next_job, threading.Event()

    def next_job_noted(fetcher):
        name = next_job(fetcher)
        if name is None and len(fetcher._active) == fetch.PARALLEL:
            refused.set()
        return name

    monkeypatch.setattr(fetch.Fetcher, "_next_job", next_job_noted)
    server.faults.append(Fault(path=".tar", times=99, hold_after=100))
    opened().upcoming([shard.name for shard in train_shards(data)])
    wait_until(lambda: len(tars(server)) == fetch.PARALLEL)
    assert len(train_shards(data)) > fetch.PARALLEL
    assert refused.wait(LIMIT_S)  # the thread that has nothing to do has asked
    assert len(tars(server)) == fetch.PARALLEL


def test_what_is_needed_now_goes_before_what_is_fetched_ahead(data, server, opened):
    *others, last = [shard.name for shard in train_shards(data)]
    store = opened()
    server.faults.append(Fault(path=".tar", times=len(others), hold_after=100))
    store.upcoming([*others, last])
    wait_until(lambda: len(tars(server)) == fetch.PARALLEL)
    assert store.path(last).read_bytes() == (data[0] / last).read_bytes()


def test_what_is_no_longer_upcoming_is_abandoned(data, server, opened, tmp_path):
    first = train_shards(data)[2]
    store = opened()
    server.faults.append(Fault(path=first.name, hold_after=10_000))
    store.upcoming([first.name])
    wait_until(lambda: cached(tmp_path / "cache", "*.tmp-*"))
    store.upcoming([])
    server.go.set()
    wait_until(lambda: not cached(tmp_path / "cache", "*.tmp-*"))
    assert not cached(tmp_path / "cache")


def test_what_could_not_be_fetched_ahead_is_an_error_only_when_it_is_needed(data, server, opened, caplog):
    name = train_shards(data)[0].name
    store = opened()
    server.faults.append(Fault(path=name, status=403, times=2))
    store.upcoming([name])
    wait_until(lambda: "could not fetch ahead" in caplog.text)
    with pytest.raises(
        UnavailableError, match=rf"{server.url}/{name}: cannot be fetched: the server answers 403 Forbidden; correct"
    ):
        store.path(name)
    store.upcoming([name])
    wait_until(lambda: tars(server) == [name] * 3)
    assert store.path(name).is_file()
