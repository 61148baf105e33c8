"""A run whose shards are fetched over HTTP or S3 is the run whose shards are in a folder."""

import shutil

import pytest

from pretrain.data.bin_stream import BinStream
from pretrain.data.lookahead import shards_ahead
from pretrain.shards.reader import ShardSet
from pretrain.tracking.audit import read_audit
from tests.helpers.served import make_served, open_quick
from tests.helpers.servers import serve_folder, serve_s3

SHORT = ["train.stop_after=8", "checkpoint.every_steps=0", "engine.kind=ddp", "engine.zero_stage=0"]


def rows_of(run):
    return [(row.step, row.digest, row.loss) for row in read_audit(run.audit)]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("bucket")
    shutil.copytree(corpus, folder / "corpus")
    return folder


@pytest.mark.long
def test_a_run_over_http_and_s3_is_the_run_over_a_folder(make_run, bucket, tmp_path):
    make_run.train("local", *SHORT)
    local = rows_of(make_run.folder("local"))
    cache = [f"data.cache_dir={tmp_path / 'cache'}"]
    with serve_folder(bucket) as server:
        make_run.train("http", *SHORT, *cache, f"data.path={server.url}/corpus")
    assert rows_of(make_run.folder("http")) == local
    with serve_s3({"lab": bucket}):
        s3_cache = [f"data.cache_dir={tmp_path / 'cache-s3'}"]
        make_run.train("s3", *SHORT, *s3_cache, "data.path=s3://lab/corpus")
    assert rows_of(make_run.folder("s3")) == local
    assert len(local) == 8


def test_data_that_is_not_at_its_address_is_refused_in_one_line(make_run, bucket, tmp_path):
    with serve_folder(bucket) as server:
        output = make_run.train(
            "gone", *SHORT, f"data.cache_dir={tmp_path / 'cache'}", f"data.path={server.url}/nowhere", expect=65
        )
    assert "Traceback" not in output
    assert f"{server.url}/nowhere" in output


@pytest.mark.long
@pytest.mark.parametrize("bucket_rows", [None, 8])
def test_packed_rows_start_without_shards_other_than_the_next_ones(tmp_path, bucket_rows):
    sizes = [900 + 10 * number for number in range(90)]
    index = make_served(tmp_path / "data", train=tuple(sizes))
    names = [shard.name for shard in index.split("train").shards]
    with serve_folder(tmp_path / "data") as server:
        store = open_quick(server.url, tmp_path / "cache")

        def fetched() -> list[str]:
            return [path.lstrip("/") for path in server.paths() if path.endswith((".tar", ".idx.npy"))]

        order = {"seed": 5, "lanes": 2, "block_samples": 20, "bucket_rows": bucket_rows}
        stream = BinStream(ShardSet(store, index, "train"), seq_len=64, **order)
        assert fetched() == []
        rows = stream.read(range(8))
        upcoming, _ = shards_ahead(stream.order, stream._layout, (0, 0), overlap=0)
        assert 0 < len({name for name in fetched() if name in names}) <= len(upcoming) < len(names)
        assert {name for name in fetched() if name in names} <= {names[shard] for shard in upcoming}
        store.close()
    local = BinStream(ShardSet(tmp_path / "data", index, "train"), seq_len=64, **order)
    assert rows.tokens_BT.tolist() == local.read(range(8)).tokens_BT.tolist()
