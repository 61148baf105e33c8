"""Shards over HTTP and S3, through a cache: the same rows, each file once, within the limit."""

import sys
import threading
import time
from contextlib import ExitStack

import pytest

from pretrain.config.data import BatchConfig, plan_batch
from pretrain.data.bin_stream import BinStream
from pretrain.data.loader import TrainLoader
from pretrain.data.remote import fetch
from pretrain.data.remote.store import LocalStore, Patience, UnavailableError, WaitStoppedError, open_store
from pretrain.data.shard_set import ShardSet
from pretrain.errors import DataError, DiskError, LaunchError
from pretrain.index import load_index
from tests.helpers.rows import CAUSAL
from tests.helpers.served import (
    PLENTY,
    QUICK,
    cached,
    cached_bytes,
    digest_stream,
    make_served,
    open_quick,
    open_stream,
    room_for,
    size_of,
)
from tests.helpers.servers import Fault, serve_folder, serve_s3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return folder, make_served(folder)


@pytest.fixture
def server(data):
    with serve_folder(data[0]) as server:
        yield server


@pytest.fixture
def opened(server, tmp_path):
    """Opens stores of the server's folder, and closes them."""
    stores = []

    def open_it(num_bytes=PLENTY, patience=QUICK, **options):
        """With room for so many bytes of shards."""
        limit = num_bytes + room_for(server.folder)
        stores.append(open_quick(server.url, tmp_path / "cache", limit, patience, **options))
        return stores[-1]

    yield open_it
    server.go.set()
    for store in stores:
        store.close()


def train_shards(data):
    return data[1].split("train").shards


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_idle(store):
    """Whether no thread of a store is at a shard any more, and holds it."""
    with store._fetcher._changed:
        return not store._fetcher._active


def tars(server):
    return [path.lstrip("/") for path in server.paths() if path.endswith(".tar")]


@pytest.mark.parametrize("share", [0.75, 10])
def test_a_stream_over_http_is_that_of_the_folder(data, server, opened, tmp_path, share):
    limit = int(share * size_of(*train_shards(data)))
    store = opened(limit)
    assert load_index(store.folder) == data[1]
    assert digest_stream(open_stream(store)) == digest_stream(open_stream(data[0]))
    there, here = open_stream(store, "validation"), open_stream(data[0], "validation")
    for first in range(0, here.num_windows(), 3):
        assert there.read_windows(range(first, first + 3)).tokens.tolist() == (
            here.read_windows(range(first, first + 3)).tokens.tolist()
        )
    assert cached_bytes(tmp_path / "cache") <= limit
    assert (len(tars(server)) > len(set(tars(server)))) == (share < 1)


def test_a_stream_over_s3_is_that_of_the_folder(data, tmp_path):
    with serve_s3({"bucket": data[0]}):
        store = open_quick("s3://bucket", tmp_path)
        assert digest_stream(open_stream(store)) == digest_stream(open_stream(data[0]))
        store.check()
        store.close()
        with pytest.raises(DataError, match=r"s3://bucket/elsewhere/index\.json: cannot be fetched"):
            open_quick("s3://bucket/elsewhere/", tmp_path)


def test_the_stream_starts_anywhere(data, opened):
    assert digest_stream(open_stream(opened()), 212, 240) == digest_stream(open_stream(data[0]), 212, 240)


def test_ranks_with_threads_read_the_same_steps_through_one_small_cache(data, opened):
    plan = plan_batch(BatchConfig(global_tokens=24 * 16, seq_len=16, micro=3), 2)
    options = {"world_size": 2, "workers": 3, "prefetch": 6}
    limit = int(0.9 * size_of(*train_shards(data)))
    ranks = [TrainLoader(open_stream(opened(limit)), CAUSAL, plan, rank=rank, **options) for rank in (0, 1)]
    expected = [TrainLoader(open_stream(data[0]), CAUSAL, plan, rank=rank, **options) for rank in (0, 1)]
    for _ in range(12):
        assert [next(rank).digest for rank in ranks] == [next(rank).digest for rank in expected]
    for loader in (*ranks, *expected):
        loader.close()


def test_packed_rows_over_http_are_those_of_the_folder(data, opened):
    limit = int(0.75 * size_of(*train_shards(data)))
    there, here = (BinStream(ShardSet(where, data[1], "train"), seq_len=64) for where in (opened(limit), data[0]))
    for first in range(0, 60, 6):
        ours, theirs = there.read(range(first, first + 6)), here.read(range(first, first + 6))
        assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.starts.tolist() == theirs.starts.tolist()


def lengths_asked(server):
    return sorted(path.lstrip("/") for path in server.paths() if path.endswith(".lengths.npy"))


@pytest.mark.parametrize("bucket_rows", [None, 6])
def test_bins_are_made_without_any_shard(data, server, opened, bucket_rows):
    names = sorted(shard.lengths.name for shard in train_shards(data))
    for _ in range(2):  # the second finds what the first has left
        BinStream(ShardSet(opened(), data[1], "train"), seq_len=64, bucket_rows=bucket_rows)
        assert lengths_asked(server) == names
    assert not tars(server)


def test_lengths_are_fetched_once_whoever_needs_them_and_whatever_goes_wrong(data, server, opened):
    name = train_shards(data)[0].lengths.name
    server.faults += [Fault(path=name, status=503), Fault(path=name, flip=True), Fault(path=name, hold_after=50)]
    stores, found = [opened() for _ in range(4)], []
    threads = [threading.Thread(target=lambda store=store: found.append(store.sidecar(name))) for store in stores]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(lengths_asked(server)) == 3)
    server.go.set()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in found] == [(data[0] / name).read_bytes()] * 4
    assert len(lengths_asked(server)) == 3
    assert not list(found[0].parent.glob("*.lock")) and not list(found[0].parent.glob("*.tmp-*"))


def test_a_stop_ends_the_wait_for_lengths(data, server, opened):
    name = train_shards(data)[0].lengths.name
    server.faults.append(Fault(path=name, status=503, times=10**6))
    asked = threading.Event()
    store = opened(stop=asked.is_set)
    threading.Timer(0.1, asked.set).start()
    with pytest.raises(WaitStoppedError):
        store.sidecar(name)


def test_what_was_fetched_is_found_again_by_other_stores_and_other_folders(data, server, tmp_path):
    copy = tmp_path / "copy"
    make_served(copy, train=(700, 300, 900))
    for url in (server.url, f"{server.url}/"):
        store = open_quick(url, tmp_path / "cache")
        digest_stream(open_stream(store))
        store.close()
    assert sorted(tars(server)) == sorted(shard.name for shard in train_shards(data))
    with serve_folder(copy) as other:
        store = open_quick(other.url, tmp_path / "cache")
        assert digest_stream(open_stream(store)) == digest_stream(open_stream(copy))
        store.close()
        assert tars(other) == []


def test_a_local_folder_is_read_in_place(data, tmp_path):
    for path in (str(data[0]), data[0].as_uri()):
        store = open_store(path, tmp_path / "cache", 1)
        assert isinstance(store, LocalStore) and store.folder == data[0] and not store.fetches
        assert store.path("train/x.tar") == data[0] / "train/x.tar"
        store.check()
    assert not (tmp_path / "cache").exists()


def test_shards_are_fetched_ahead_in_the_order_of_need(data, server, opened, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "PARALLEL", 1)
    names = [shard.name for shard in train_shards(data)][::-1]
    opened().upcoming(names)
    wait_until(lambda: len(cached(tmp_path / "cache")) == len(names))
    assert tars(server) == names


def test_only_so_many_are_fetched_ahead_at_a_time(data, server, opened):
    server.faults.append(Fault(path=".tar", times=99, hold_after=100))
    opened().upcoming([shard.name for shard in train_shards(data)])
    wait_until(lambda: len(tars(server)) == fetch.PARALLEL)
    assert len(train_shards(data)) > fetch.PARALLEL
    time.sleep(0.05)
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
        UnavailableError, match=rf"{server.url}/{name}: cannot be fetched: HTTP 403 Forbidden; correct data"
    ):
        store.path(name)
    store.upcoming([name])
    wait_until(lambda: tars(server) == [name] * 3)
    assert store.path(name).is_file()


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
    """Opens the folder at an address, with room for so many bytes, and has its first shard."""
    stores = []

    def open_it(url, num_bytes):
        stores.append(open_quick(url, tmp_path / "cache", num_bytes, Patience(first_s=0.01, room_s=0.2)))
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
        visit(two.url, room_for(one.folder, shard) + size_of(shard))
    assert load_index(first.folder) == indexes[0]


def test_what_is_in_use_stays_and_a_full_cache_says_how_much_is_needed(data, opened, tmp_path):
    a, b, c = train_shards(data)[:3]
    store = opened(size_of(a, c), Patience(first_s=0.01, room_s=0.3))
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
    store.upcoming([a.name, b.name, c.name, d.name])
    wait_until(lambda: len(cached(tmp_path / "cache")) == 3)
    time.sleep(0.1)
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


def test_a_stop_ends_the_wait(data, server, opened):
    server.faults.append(Fault(path=".tar", times=9, hold_after=100))
    asked = threading.Event()
    store = opened(stop=asked.is_set)
    threading.Timer(0.1, asked.set).start()
    with pytest.raises(WaitStoppedError):
        store.path(train_shards(data)[0].name)


def test_a_stop_ends_the_wait_for_an_index(server, opened):
    server.stop()
    asked = threading.Event()
    threading.Timer(0.1, asked.set).start()
    with pytest.raises(WaitStoppedError):
        opened(stop=asked.is_set)


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


def test_a_long_wait_is_reported_with_its_reason(data, server, opened, caplog):
    name = train_shards(data)[0].name
    server.faults.append(Fault(path=".tar", times=10, status=503))
    opened(patience=Patience(first_s=0.02, longest_s=0.02, total_s=20, report_s=0.01)).path(name)
    assert f"waiting for {server.url}/{name} since 0 s: 0.0 of 0.0 MiB, HTTP 503 Service Unavailable" in caplog.text
    assert caplog.text.count("waiting for") <= 7  # at 10, 20, 40, ... ms


def test_credentials_come_from_netrc(data, server, opened, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login lab password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    opened()
    assert {request.authorization for request in server.requests} == {"Basic bGFiOnNlY3JldA=="}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/data", "ftp://host/data: no such kind of address; use a folder, or one of http://, https://, s3"),
        ("http://user:secret@host/x", "http://host/x: an address of data has no user, password, query or fragment"),
        ("https://host/x?token=secret", "https://host/x: an address of data has no user"),
        ("s3:///data", "s3:///data: no such kind of address"),
    ],
)
def test_an_address_that_is_none_is_refused(tmp_path, url, message):
    with pytest.raises(DataError) as caught:
        open_quick(url, tmp_path)
    assert message in str(caught.value) and "secret" not in str(caught.value)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for scheme in ("gs", "gcs"):  # what an earlier import of it has left there
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
    with pytest.raises(LaunchError, match=r"gs://bucket: gs:// needs a package .*; pip install 'pretrain\[cloud\]'"):
        open_quick("gs://bucket", tmp_path)


def test_a_cache_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="file/cache/shards: cannot create the folder"):
        open_quick(server.url, tmp_path / "file" / "cache")
