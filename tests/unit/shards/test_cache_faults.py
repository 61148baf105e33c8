"""A server that fails in every way, and one that dies and comes back: whole shards, or an error that says what."""

import json
import shutil
import threading

import pytest

from pretrain.errors import DataError
from pretrain.shards.index import INDEX_NAME
from pretrain.shards.reader import ShardReader, ShardSet, load_lengths
from pretrain.shards.store import Patience, UnavailableError
from pretrain.utils import remote
from tests.helpers.clock import FakeClock
from tests.helpers.served import (
    cached,
    cached_bytes,
    digest_stream,
    make_served,
    open_quick,
    open_stream,
    size_of,
)
from tests.helpers.servers import Fault, serve_s3
from tests.helpers.waiting import wait_until

IN_FIRST_MEMBER = 512 + 128
"""Behind the headers of tar and npy."""

IMPATIENT = Patience(first_s=0.01, longest_s=0.05, total_s=0.2)


@pytest.fixture
def data(data, tmp_path):
    """A copy that a test may damage, and the index."""
    return shutil.copytree(data[0], tmp_path / "data"), data[1]


@pytest.fixture
def clock(monkeypatch):
    """Of those who try again: it is their waits that count."""
    clock = FakeClock()
    monkeypatch.setattr(remote, "time", clock)
    return clock


@pytest.fixture
def shard(data):
    return data[1].split("train").shards[0]


def tar_requests(server, shard):
    return [request for request in server.requests if request.path == f"/{shard.name}"]


@pytest.mark.parametrize(
    ("faults", "first_bytes"),
    [
        ([Fault(status=500, times=3)], [None] * 4),
        ([Fault(status=429), Fault(status=503)], [None] * 3),
        ([Fault(drop=True, times=2)], [None] * 3),
        ([Fault(cut_after=0)], [None] * 2),
        ([Fault(cut_after=7000), Fault(cut_after=5000)], [None, 7000, 12000]),
        ([Fault(cut_after=7000), Fault(status=502), Fault(drop=True)], [None, 7000, 7000, 7000]),
        ([Fault(cut_after=7000), Fault(whole=True)], [None, 7000]),
        ([Fault(cut_after=7000), Fault(whole=True, cut_after=3000)], [None, 7000, 7000]),
        ([Fault(flip=True)], [None, None]),
        ([Fault(cut_after=7000), Fault(flip=True)], [None, 7000, None]),
    ],
)
def test_a_shard_arrives_whole_and_broken_downloads_go_on_where_they_broke(
    data, server, shard, tmp_path, faults, first_bytes
):
    server.faults += [Fault(**(vars(fault) | {"path": shard.name})) for fault in faults]
    store = open_quick(server.url, tmp_path / "cache")
    assert store.path(shard.name).read_bytes() == (data[0] / shard.name).read_bytes()
    assert [request.first for request in tar_requests(server, shard)] == first_bytes
    assert cached_bytes(tmp_path / "cache") == size_of(shard)
    store.close()


def test_a_server_that_dies_and_comes_back_is_waited_for(data, server, shard, tmp_path):
    server.faults += [Fault(path=shard.name, hold_after=9000)]
    store = open_quick(server.url, tmp_path / "cache")
    result = []
    thread = threading.Thread(target=lambda: result.append(store.path(shard.name).read_bytes()))
    thread.start()
    wait_until(lambda: tar_requests(server, shard))
    server.stop()
    wait_until(lambda: "refused" in store._fetcher._active[shard.name].trouble)
    assert not result
    server.start()
    thread.join()
    assert result == [(data[0] / shard.name).read_bytes()]
    store.close()


def test_a_stream_survives_faults_at_random(data, server, tmp_path):
    for path in ("0000", "0002", "0003"):
        server.faults += [Fault(path=path, status=500), Fault(path=path, cut_after=100), Fault(path=path, drop=True)]
    server.faults += [Fault(path=INDEX_NAME, cut_after=99), Fault(path="tokenizer", status=500)]
    store = open_quick(server.url, tmp_path / "cache")
    assert digest_stream(open_stream(store)) == digest_stream(open_stream(data[0]))
    store.close()


def test_a_server_that_stays_away_is_given_up(server, shard, tmp_path, clock):
    store = open_quick(server.url, tmp_path / "cache", patience=IMPATIENT)
    server.stop()
    with pytest.raises(
        UnavailableError,
        match=rf"{server.url}/{shard.table.name}: cannot be fetched: .*refused, and no answer for 0.2 s; start again",
    ):
        store.path(shard.name)
    assert not cached(tmp_path / "cache", "*.tmp-*")
    server.start()
    assert store.path(shard.name).is_file()
    store.close()


def test_bytes_count_as_an_answer_however_slow_they_come(data, server, shard, tmp_path, clock):
    server.faults += [Fault(path=shard.name, cut_after=400, times=40)]
    store = open_quick(server.url, tmp_path / "cache", patience=IMPATIENT)
    started = clock.now
    assert store.path(shard.name).read_bytes() == (data[0] / shard.name).read_bytes()
    assert clock.now - started > IMPATIENT.total_s
    store.close()


@pytest.mark.parametrize("suffix", ["tar", "table"])
def test_wrong_bytes_are_fetched_once_more_and_then_refused(server, shard, tmp_path, suffix):
    name = shard.name if suffix == "tar" else shard.table.name
    server.faults += [Fault(path=name, flip=True, times=2)]
    store = open_quick(server.url, tmp_path / "cache")
    with pytest.raises(
        DataError, match=rf"{server.url}/{name}: is not the file of the index: its hash is \w+ instead of \w+, twice; "
    ):
        store.path(shard.name)
    assert not cached(tmp_path / "cache") and not cached(tmp_path / "cache", "*.tmp-*")
    assert store.path(shard.name).is_file()
    store.close()


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_refused_without_waiting(data, server, shard, tmp_path, change):
    content = (data[0] / shard.name).read_bytes()
    (data[0] / shard.name).write_bytes(content[:-1] if change < 0 else content + b"x")
    store = open_quick(server.url, tmp_path / "cache")
    size = shard.num_bytes
    with pytest.raises(
        DataError, match=f"it has {size + change} bytes instead of {size}, twice; upload this file again"
    ):
        store.path(shard.name)
    assert len(tar_requests(server, shard)) == 2
    store.close()


def test_a_missing_shard_is_no_matter_of_patience(data, server, shard, tmp_path):
    (data[0] / shard.name).unlink()
    store = open_quick(server.url, tmp_path / "cache")
    with pytest.raises(
        DataError, match=f"{server.url}/{shard.name}: cannot be fetched: no such file; correct"
    ) as caught:
        store.path(shard.name)
    assert not isinstance(caught.value, UnavailableError)
    assert len(tar_requests(server, shard)) == 1
    store.close()


def test_a_check_lists_all_that_is_missing_before_anything_is_fetched(data, server, tmp_path):
    folder, index = data
    a, b, c, *_ = index.split("train").shards
    (folder / a.name).unlink()
    (folder / b.table.name).unlink()
    (folder / b.lengths.name).unlink()
    (folder / c.name).write_bytes(b"short")
    server.faults += [Fault(path=c.name, status=503)]
    store = open_quick(server.url, tmp_path / "cache")
    with pytest.raises(
        DataError,
        match=rf"{a.name} cannot be fetched: no such file, {b.table.name} cannot .*, {b.lengths.name} cannot .*, "
        rf"{c.name} has 5 bytes, not {c.num_bytes}; upload these files again",
    ):
        store.check()
    store.check("validation")
    assert not [path for path in server.paths() if path.endswith(".tar")]
    store.close()


def rot(path, place):
    """Flips a bit of a file where it lies."""
    with path.open("r+b") as file:
        file.seek(place)
        (value,) = file.read(1)
        file.seek(place)
        file.write(bytes([value ^ 4]))


def cached_path(cache, shard, suffix=".tar"):
    (path,) = (cache / "shards").glob(f"{shard.sha256}*{suffix}")
    return path


@pytest.mark.parametrize(("suffix", "place"), [(".tar", IN_FIRST_MEMBER), (".idx.npy", 130)])
def test_a_shard_that_rots_in_the_cache_is_fetched_again(data, server, shard, tmp_path, caplog, suffix, place):
    store = open_quick(server.url, tmp_path / "cache")
    for entry in data[1].split("train").shards:
        store.path(entry.name), store.release(entry.name)
    path = cached_path(tmp_path / "cache", shard, suffix)
    rot(path, place)
    server.requests.clear()
    assert digest_stream(open_stream(store)) == digest_stream(open_stream(data[0]))
    name = shard.name if suffix == ".tar" else shard.table.name
    assert server.paths() == [f"/{name}"]
    assert path.read_bytes() == (data[0] / name).read_bytes()
    assert f"{server.url}/{name} is damaged on this machine; fetching it again" in caplog.text
    assert not list(path.parent.glob("*.tar.lock")) and cached_bytes(tmp_path / "cache") == size_of(
        *data[1].split("train").shards
    )
    store.close()


def test_ranks_that_find_the_same_rot_fetch_the_shard_again_once(data, server, shard, tmp_path):
    stores = [open_quick(server.url, tmp_path / "cache") for _ in range(3)]
    readers = [ShardSet(store, data[1], "train").reader(0) for store in stores]  # all have mapped it
    rot(cached_path(tmp_path / "cache", shard), IN_FIRST_MEMBER)
    server.faults.append(Fault(path=shard.name, hold_after=100))
    found = []
    threads = [threading.Thread(target=lambda r=reader: found.append(r.member(0)[0].tolist())) for reader in readers]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(tar_requests(server, shard)) == 2)
    server.go.set()
    for thread in threads:
        thread.join()
    assert found == [ShardReader(data[0], shard, "uint16").member(0)[0].tolist()] * 3
    assert len(tar_requests(server, shard)) == 2
    for store in stores:
        store.close()


def test_lengths_that_rot_are_fetched_again(data, server, shard, tmp_path):
    name = shard.lengths.name
    store = open_quick(server.url, tmp_path / "cache")
    rot(store.sidecar(name), 130)
    assert ShardSet(store, data[1], "train").lengths(0).tolist() == load_lengths(data[0], shard)[:, 0].tolist()
    assert server.paths().count(f"/{name}") == 2
    store.close()


def test_only_a_shard_that_is_damaged_at_its_address_too_is_damaged(data, server, shard, tmp_path):
    with pytest.raises(DataError, match="is damaged: CRC32"):  # a folder has nothing to fetch it from
        copy = shutil.copytree(data[0], tmp_path / "copy")
        rot(copy / shard.name, IN_FIRST_MEMBER)
        ShardSet(copy, data[1], "train").reader(0).member(0)
    store = open_quick(server.url, tmp_path / "cache")
    reader = ShardSet(store, data[1], "train").reader(0)
    rot(cached_path(tmp_path / "cache", shard), IN_FIRST_MEMBER)
    rot(data[0] / shard.name, IN_FIRST_MEMBER)
    with pytest.raises(DataError, match=rf"{server.url}/{shard.name}: is not the file of the index: .*, twice"):
        reader.member(0)
    with pytest.raises(DataError, match=r"00000000\.tokens\.npy is damaged: CRC32 of"):
        reader.member(0)
    assert reader.member(1)[0].size
    assert len(tar_requests(server, shard)) == 3, "it is not asked for again at every row"
    store.close()


def test_a_rotten_shard_whose_server_is_away_is_not_called_damaged(data, server, shard, tmp_path, clock):
    store = open_quick(server.url, tmp_path / "cache", patience=IMPATIENT)
    reader = ShardSet(store, data[1], "train").reader(0)
    rot(cached_path(tmp_path / "cache", shard), IN_FIRST_MEMBER)
    server.stop()
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"no answer for 0\.2 s"):
            reader.member(0)
    server.start()
    assert reader.member(0)[0].size
    store.close()


def test_another_tokenizer_than_that_of_the_index_is_refused(data, server, tmp_path):
    (data[0] / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=rf"{server.url}/tokenizer.json: is not the tokenizer of the index: its sha256"):
        open_quick(server.url, tmp_path / "cache")


def test_an_index_that_is_none_is_refused_by_its_address(data, server, tmp_path):
    (data[0] / INDEX_NAME).write_text("<html>")
    with pytest.raises(DataError, match=rf"{server.url}/index.json: not JSON: .*; run `pretrain prepare` again"):
        open_quick(server.url, tmp_path / "cache")
    (data[0] / INDEX_NAME).unlink()
    with pytest.raises(DataError, match=rf"{server.url}/index.json: cannot be fetched: no such file"):
        open_quick(server.url, tmp_path / "cache")


def test_a_hash_in_the_index_never_leads_out_of_the_cache(data, server, shard, tmp_path):
    raw = json.loads((data[0] / INDEX_NAME).read_text())
    raw["splits"]["train"]["shards"][0]["sha256"] = "../../../escaped"
    (data[0] / INDEX_NAME).write_text(json.dumps(raw))
    store = open_quick(server.url, tmp_path / "cache")
    with pytest.raises(DataError, match=r"its sha256 in the index is none: '\.\./\.\./\.\./escaped'"):
        store.path(shard.name)
    store.close()


def test_a_new_index_at_the_same_address_is_another_folder(data, server, tmp_path):
    first = open_quick(server.url, tmp_path / "cache")
    make_served(data[0], train=(400, 200))
    second = open_quick(server.url, tmp_path / "cache")
    assert digest_stream(open_stream(second)) == digest_stream(open_stream(data[0]))
    assert first.folder != second.folder
    first.close()
    second.close()


def test_an_object_that_is_missing_or_other_on_s3_is_refused(data, shard, tmp_path):
    other = data[1].split("train").shards[1]
    (data[0] / shard.name).unlink()
    (data[0] / other.name).write_bytes(bytes(other.num_bytes))
    with serve_s3({"bucket": data[0].parent}):
        store = open_quick("s3://bucket/data", tmp_path / "cache")
        with pytest.raises(DataError, match=f"s3://bucket/data/{shard.name}: cannot be fetched: "):
            store.path(shard.name)
        with pytest.raises(DataError, match=f"s3://bucket/data/{other.name}: is not the file of the index: its hash"):
            store.path(other.name)
        with pytest.raises(DataError, match=f"{shard.name} cannot be fetched"):
            store.check()
        store.close()
