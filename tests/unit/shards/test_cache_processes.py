"""Processes that share a cache: one download, one limit, and nothing believed that a killed one has left."""

import fcntl
import os
import signal
import threading

import pytest

from pretrain.shards.cache import lock, scan_shards, try_lock
from pretrain.shards.store import Patience, UnavailableError
from tests.helpers.served import (
    QUICK,
    cached,
    cached_bytes,
    digest_shards,
    make_served,
    open_quick,
    room_for,
    size_of,
    start_reader,
)
from tests.helpers.servers import Fault, serve_folder
from tests.helpers.waiting import LIMIT_S, wait_until


def test_processes_share_each_download(data, server, tmp_path):
    # No shard arrives before all three processes want one.
    server.faults.append(Fault(path=".tar", times=99, hold_after=100))
    readers = [start_reader(server.url, tmp_path) for _ in range(3)]
    wait_until(lambda: server.paths().count("/index.json") == 3)
    server.go.set()
    outputs = [reader.communicate()[0].strip() for reader in readers]
    assert outputs == [digest_shards(data[0])] * 3
    for shard in data[1].split("train").shards:
        assert server.paths().count(f"/{shard.name}") == server.paths().count(f"/{shard.table.name}") == 1


@pytest.mark.long
def test_processes_share_the_limit(data, server, tmp_path):
    shards = data[1].split("train").shards
    limit = int(0.8 * room_for(server.folder, *shards))
    readers = [start_reader(server.url, tmp_path, limit) for _ in range(2)]
    largest = 0

    def look():
        nonlocal largest
        if (tmp_path / "shards").is_dir():
            largest = max(largest, cached_bytes(tmp_path))
        return all(reader.poll() is not None for reader in readers)

    wait_until(look, "the end of the readers", pause_s=0.001)
    outputs = [reader.communicate()[0].strip() for reader in readers]
    assert outputs == [digest_shards(data[0])] * 2
    largest = max(largest, cached_bytes(tmp_path))
    assert 0 < largest <= limit


def test_a_killed_downloader_leaves_nothing_that_is_believed(data, server, tmp_path):
    shards = data[1].split("train").shards
    server.faults.append(Fault(path=".tar", times=99, hold_after=8000))
    victim = start_reader(server.url, tmp_path)
    wait_until(lambda: cached(tmp_path, "*.tar.tmp-*"))
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert cached(tmp_path, "*.tar.tmp-*") and not cached(tmp_path)
    server.faults.clear()
    server.go.set()
    # Room for one shard, if what the dead one had begun and was promised does not count.
    store = open_quick(server.url, tmp_path, room_for(server.folder, shards[-1]))
    store.path(shards[-1].name)
    assert not cached(tmp_path, "*.tmp-*") and cached(tmp_path) == {shards[-1].sha256}
    store.close()
    store = open_quick(server.url, tmp_path, room_for(server.folder, *shards))
    store.upcoming([shard.name for shard in shards])
    for shard in shards:
        assert store.path(shard.name).read_bytes() == (data[0] / shard.name).read_bytes()
    assert not cached(tmp_path, "*.tmp-*") and cached_bytes(tmp_path) == size_of(*shards)
    store.close()


def test_a_reader_that_is_killed_holds_nothing(data, server, tmp_path):
    a = data[1].split("train").shards[0]
    server.faults.append(Fault(path=a.name, hold_after=100))
    reader = start_reader(server.url, tmp_path)
    wait_until(lambda: len(cached(tmp_path)) > 1)
    reader.send_signal(signal.SIGKILL)
    reader.communicate()
    server.go.set()
    store = open_quick(server.url, tmp_path, room_for(server.folder, a))
    assert store.path(a.name).is_file()
    assert cached(tmp_path) == {a.sha256}
    store.close()


def test_a_folder_is_kept_for_a_process_that_lives_and_not_for_one_that_was_killed(data, server, tmp_path):
    other = tmp_path / "other"
    index = make_served(other, train=(400,))
    with serve_folder(other) as second:
        server.faults.append(Fault(path=".tar", times=99, hold_after=100))
        reader = start_reader(server.url, tmp_path)
        wait_until(lambda: server.paths().count("/tokenizer.json") == 1 and len(server.paths()) > 2)
        (folder,) = (path for path in (tmp_path / "folders").iterdir() if path.is_dir())

        def visit(patience):
            limit = room_for(other, *index.split("train").shards)  # not for another index
            store = open_quick(second.url, tmp_path, limit, patience)
            try:
                store.path(index.split("train").shards[0].name)
            finally:
                store.close()

        with pytest.raises(UnavailableError, match="the cache is full of shards in use"):
            visit(Patience(first_s=0.01, room_s=0.0))
        assert (folder / "index.json").is_file()
        reader.send_signal(signal.SIGKILL)
        reader.communicate()
        visit(QUICK)
        assert not folder.exists()


def test_who_makes_room_is_not_hindered_by_one_who_has_just_fetched_a_damaged_file_again(tmp_path, monkeypatch):
    """The lock of the file goes between a look at the folder and one at its entries."""
    damaged = tmp_path / f"{'0' * 64}.tar.lock"
    damaged.touch()
    scan = os.scandir

    def scan_and_be_late(folder):
        found = list(scan(folder))
        damaged.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(os, "scandir", scan_and_be_late)
    assert scan_shards(tmp_path) == {}


def test_a_lock_that_was_waited_for_is_that_of_the_file_that_is_there(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    first = lock(path)
    taken, flock, asked = [], fcntl.flock, threading.Event()

    def flock_noted(*arguments):
        asked.set()
        return flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", flock_noted)
    thread = threading.Thread(target=lambda: taken.append(lock(path)))
    thread.start()
    assert asked.wait(LIMIT_S)  # it has opened the file that is there now
    path.unlink()
    os.close(first)
    thread.join()
    assert os.path.samestat(os.fstat(taken[0]), path.stat())
    assert try_lock(path, fcntl.LOCK_EX) is None
    os.close(taken[0])
