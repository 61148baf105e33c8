"""Shards over HTTP and S3, through a cache: the same rows, each file once."""

import json
import sys
import threading
from importlib import import_module

import pytest

from pretrain.artifact.open import normalize_of_data
from pretrain.config.data import BatchConfig, plan_batch
from pretrain.config.prepare import NormalizeConfig
from pretrain.data.bin_stream import BinStream
from pretrain.data.loader import TrainLoader
from pretrain.errors import DataError, DiskError, LaunchError
from pretrain.shards.index import load_index
from pretrain.shards.reader import ShardSet
from pretrain.shards.remote_store import open_store
from pretrain.shards.store import LocalStore
from tests.helpers.rows import CAUSAL
from tests.helpers.served import (
    cached_bytes,
    digest_stream,
    make_served,
    open_quick,
    open_stream,
    size_of,
    tars,
    train_shards,
)
from tests.helpers.servers import Fault, serve_folder, serve_s3
from tests.helpers.waiting import wait_until


@pytest.mark.long
@pytest.mark.parametrize("share", [0.75, 10])
def test_a_stream_over_http_is_that_of_the_folder(data, server, opened, tmp_path, share):
    limit = int(share * size_of(*train_shards(data)))
    store = opened(limit)
    assert load_index(store.folder) == data[1]
    assert digest_stream(open_stream(store)) == digest_stream(open_stream(data[0]))
    there, here = open_stream(store, "validation"), open_stream(data[0], "validation")
    for first in range(0, here.num_windows(), 3):
        assert there.read_windows(range(first, first + 3)).tokens_BT.tolist() == (
            here.read_windows(range(first, first + 3)).tokens_BT.tolist()
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


def test_an_address_tells_how_its_text_was_normalised_and_need_not(data, server, tmp_path):
    without = open_quick(server.url, tmp_path / "without")
    steps = {"inputs.0.normalize.steps": ["lowercase"], "inputs.0.normalize.language": None}
    (data[0] / "prepare.json").write_text(json.dumps({"options": steps}))
    try:
        store = open_quick(server.url, tmp_path / "cache")
        assert normalize_of_data([store.folder]) == normalize_of_data([data[0]]) == NormalizeConfig(steps=["lowercase"])
        assert normalize_of_data([without.folder]) is None
    finally:
        (data[0] / "prepare.json").unlink()
        without.close()
    store.close()


def test_the_stream_starts_anywhere(data, opened):
    assert digest_stream(open_stream(opened()), 212, 240) == digest_stream(open_stream(data[0]), 212, 240)


@pytest.mark.long
def test_ranks_with_threads_read_the_same_steps_through_one_small_cache(data, opened):
    plan = plan_batch(BatchConfig(global_tokens=24 * 16, seq_len=16, micro=3), 2)
    options = {"world_size": 2, "workers": 3, "prefetch": 6}
    limit = int(0.9 * size_of(*train_shards(data)))
    ranks = [TrainLoader(open_stream(opened(limit)), CAUSAL, plan, rank=rank, **options) for rank in (0, 1)]
    expected = [TrainLoader(open_stream(data[0]), CAUSAL, plan, rank=rank, **options) for rank in (0, 1)]
    for _ in range(12):
        assert [next(rank).counts for rank in ranks] == [next(rank).counts for rank in expected]
    for loader in (*ranks, *expected):
        loader.close()


def test_packed_rows_over_http_are_those_of_the_folder(data, opened):
    limit = int(0.75 * size_of(*train_shards(data)))
    there, here = (BinStream(ShardSet(where, data[1], "train"), seq_len=64) for where in (opened(limit), data[0]))
    for first in range(0, 60, 6):
        ours, theirs = there.read(range(first, first + 6)), here.read(range(first, first + 6))
        assert ours.tokens_BT.tolist() == theirs.tokens_BT.tolist() and ours.starts.tolist() == theirs.starts.tolist()


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
        monkeypatch.delitem(import_module("fsspec.registry")._registry, scheme, raising=False)
    with pytest.raises(LaunchError, match=r"gs://bucket/index.json: gs:// needs a package .*-e '\.\[cloud\]'"):
        open_quick("gs://bucket", tmp_path)


def test_a_cache_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="file/cache/shards: cannot create the folder"):
        open_quick(server.url, tmp_path / "file" / "cache")
