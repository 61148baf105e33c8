"""The limit of a cache: what makes room, what stays, and what is said when nothing can go."""

import threading
from contextlib import ExitStack

import pytest

from pretrain.errors import DataError
from pretrain.shards import fetch
from pretrain.shards.cache import Fill, ShardCache
from pretrain.shards.index import load_index
from pretrain.shards.store import Patience, UnavailableError
from tests.helpers.served import (
    QUICK,
    cached,
    cached_bytes,
    make_served,
    open_quick,
    open_stream,
    room_for,
    size_of,
    train_shards,
)
from tests.helpers.servers import serve_folder
from tests.helpers.waiting import LIMIT_S, wait_until

AT_ONCE = Patience(first_s=0.01, room_s=0.0)
"""Gives up at once where there is no room."""


def is_idle(store):
    """Whether no thread of a store is at a shard any more, and holds it."""
    with store._fetcher._changed:
        return not store._fetcher._active


def test_room_is_taken_from_the_least_recently_used(data, opened, tmp_path):
    a, b, c = train_shards(data)[:3]
    store = opened(size_of(a, b, c))
    for shard in (a, b, c, a):
        store.path(shard.name)
        store.release(shard.name)
        wait_until(lambda: is_idle(store))
    d = train_shards(data)[3]
    store.path(d.name)
    assert a.sha256 in cached(tmp_path / "cache") and b.sha256 not in cached(tmp_path / "cache")
    assert cached_bytes(tmp_path / "cache") <= size_of(a, b, c)


@pytest.fixture
def visit(tmp_path):
    """Opens the folder at an address, with room for so many bytes, and has its first shard: waits for room or not."""
    stores = []

    def open_it(url, num_bytes, patience=QUICK):
        stores.append(open_quick(url, tmp_path / "cache", num_bytes, patience))
        store = stores[-1]
        shard = load_index(store.folder).split("train").shards[0]
        store.path(shard.name), store.release(shard.name), store.sidecar(shard.lengths.name)
        return store

    yield open_it
    for store in stores:
        store.close()


@pytest.fixture
def others(tmp_path):
    """Servers of three small folders."""
    with ExitStack() as servers:
        folders = [tmp_path / f"data-{number}" for number in range(3)]
        indexes = [make_served(folder, train=(300 + n,), validation=(200 + n,)) for n, folder in enumerate(folders)]
        yield [servers.enter_context(serve_folder(folder)) for folder in folders], indexes


def folders_of(cache):
    return sorted(path.name for path in (cache / "folders").iterdir() if path.is_dir())


def test_folders_of_addresses_that_nobody_has_open_make_room_too(others, visit, tmp_path):
    (one, two, three), indexes = others
    shard = indexes[0].split("train").shards[0]
    both = 2 * room_for(one.folder, shard) + 2 * shard.lengths_bytes
    limit = both + room_for(one.folder) - 1  # for a third index not quite
    stores = [visit(one.url, limit)]
    stores[0].close()
    stores.append(visit(two.url, limit))
    assert folders_of(tmp_path / "cache") == sorted(store.folder.name for store in stores)
    stores.append(visit(three.url, limit))
    # The first shard and the first folder were used least recently; the second folder is in use.
    assert folders_of(tmp_path / "cache") == sorted(store.folder.name for store in stores[1:])
    assert not (tmp_path / "cache/folders" / f"{stores[0].folder.name}.lock").exists()
    for store in stores[1:]:
        assert load_index(store.folder) and (store.folder / "tokenizer.json").is_file()
    again = visit(one.url, 2 * limit)  # what was removed is fetched again
    assert again.folder == stores[0].folder and load_index(again.folder) == indexes[0]


def test_a_folder_that_is_in_use_is_counted_and_stays(others, visit, tmp_path):
    (one, two, _), indexes = others
    shard = indexes[0].split("train").shards[0]
    first = visit(one.url, room_for(one.folder, shard) + shard.lengths_bytes)
    first.path(shard.name)
    with pytest.raises(UnavailableError, match=r"the cache is full of shards in use, 0\.001 of 0\.001 GiB"):
        visit(two.url, room_for(one.folder, shard) + size_of(shard), AT_ONCE)
    assert load_index(first.folder) == indexes[0]


def test_what_is_in_use_stays_and_a_full_cache_says_how_much_is_needed(data, opened, tmp_path):
    a, b, c = train_shards(data)[:3]
    store = opened(size_of(a, c), AT_ONCE)
    store.path(a.name), store.path(a.name), store.path(c.name)
    store.release(a.name)  # one of two
    with pytest.raises(
        UnavailableError,
        match=rf"the cache is full of shards in use, 0.001 of 0.001 GiB, and {b.name} needs 0.001 GiB; "
        r"set data.cache_gib to 0.001 at the very least, better to twice that",
    ):
        store.path(b.name)
    assert cached(tmp_path / "cache") == {a.sha256, c.sha256}
    store.release(a.name)
    wait_until(lambda: is_idle(store))
    store.path(b.name)
    assert cached(tmp_path / "cache") == {b.sha256, c.sha256}


def test_more_than_fits_read_at_once_is_refused(data, opened):
    names = [shard.name for shard in train_shards(data)]
    with pytest.raises(
        DataError,
        match=r"3 shards, with their index 0.001 GiB, are read at the same time, and the cache may hold 0.001",
    ):
        opened(size_of(*train_shards(data)[:3]) - 1).upcoming(names, at_once=3)


def test_fetching_ahead_takes_no_room_of_what_is_needed_sooner(data, opened, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "PARALLEL", 1)
    monkeypatch.setattr(fetch, "LISTEN_S", 0.01)
    a, b, c, d, _ = train_shards(data)
    store = opened(size_of(a, b, c))
    fill, full = ShardCache.fill, threading.Event()

    def fill_noted(cache, shard, *arguments, **options):
        outcome = fill(cache, shard, *arguments, **options)
        if shard.name == d.name and outcome is Fill.FULL:
            full.set()
        return outcome

    monkeypatch.setattr(ShardCache, "fill", fill_noted)
    store.upcoming([a.name, b.name, c.name, d.name])
    wait_until(lambda: len(cached(tmp_path / "cache")) == 3)
    assert full.wait(LIMIT_S)
    assert cached(tmp_path / "cache") == {a.sha256, b.sha256, c.sha256}
    # What is needed now takes it from what is needed last.
    store.path(d.name)
    assert cached(tmp_path / "cache") == {a.sha256, b.sha256, d.sha256}
    store.upcoming([d.name, c.name])
    wait_until(lambda: c.sha256 in cached(tmp_path / "cache"))
    assert cached_bytes(tmp_path / "cache") <= size_of(a, b, c)


def test_a_reader_lets_go_of_what_it_only_keeps_open(data, opened, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "LISTEN_S", 0.01)
    a, b, *_ = train_shards(data)
    one, other = opened(size_of(a, b)), opened(size_of(a, b))
    stream = open_stream(one, "validation")
    stream.read_windows(range(3))
    assert stream._reader.cache_info().currsize == 1
    other.path(a.name), other.path(b.name)
    assert cached(tmp_path / "cache") == {a.sha256, b.sha256}
    assert stream._reader.cache_info().currsize == 0


def test_a_reader_lets_go_when_it_is_said_what_comes_next(data, opened, tmp_path):
    a, b, *_ = train_shards(data)
    store = opened(size_of(a, b))
    stream = open_stream(store, "validation")
    stream.read_windows(range(3))
    store.upcoming([a.name, b.name], reader="validation")
    wait_until(lambda: cached(tmp_path / "cache") == {a.sha256, b.sha256})
    assert stream._reader.cache_info().currsize == 0
