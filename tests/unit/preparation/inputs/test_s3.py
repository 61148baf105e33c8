"""Inputs on S3, from moto's server on the loopback."""

import gzip

import boto3
import pyarrow
import pyarrow.parquet
import pytest
import s3fs

from pretrain.config.prepare import InputConfig
from pretrain.errors import DataError
from pretrain.preparation.input_parts import plan_parts
from pretrain.utils.remote import Waits
from tests.helpers.reading import documents, listing, read, texts, touch
from tests.helpers.servers import serve_s3

LINES = b"".join(b'{"text": "%d"}\n' % number for number in range(500))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bucket")
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", "y", "z"]}), folder / "c.parquet", row_group_size=1)
    touch(folder, "t/1.txt", "t/2.md", "t/u/3.txt", "t/4.log", "t/.hidden.txt", "t/.git/5.txt", "t/6[1].txt")
    return folder


@pytest.fixture(scope="module")
def bucket(folder):
    with serve_s3({"corpus": folder}):
        boto3.client("s3").put_object(Bucket="corpus", Key="t/mark/")  # as consoles make empty folders
        yield "s3://corpus"


def listed(bucket, *paths, **options):
    return [file.path.removeprefix(bucket + "/") for file in listing(*paths, **options)]


def test_folders_and_globs_are_listed_as_on_a_disk(bucket, folder):
    found = listed(bucket, f"{bucket}/t")
    assert found == ["t/1.txt", "t/2.md", "t/6[1].txt", "t/u/3.txt"]
    assert found == listed(str(folder), folder / "t")
    assert listed(bucket, f"{bucket}/t/") == found
    assert listed(bucket, f"{bucket}/t/*.txt", f"{bucket}/t/u") == ["t/1.txt", "t/6[1].txt", "t/u/3.txt"]
    assert listed(bucket, f"{bucket}/?") == ["t/1.txt", "t/2.md", "t/6[1].txt", "t/u/3.txt"]
    assert listed(bucket, f"{bucket}/t/6[1].txt") == ["t/6[1].txt"]
    assert len(listed(bucket, bucket)) == 7


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.parquet", "t/1.txt"])
def test_files_read_as_they_do_from_a_disk(bucket, folder, name, monkeypatch):
    monkeypatch.setattr("pretrain.preparation.inputs.remote_files.BLOCK_BYTES", 2000)
    assert documents(f"{bucket}/{name}", part_bytes=3000) == documents(folder / name, part_bytes=3000)


def test_a_listing_tells_the_version_as_a_look_at_one_file_does(bucket):
    (by_folder,) = [file for file in listing(bucket) if file.path.endswith("/a.jsonl")]
    assert [by_folder] == listing(f"{bucket}/a.jsonl")
    assert len(by_folder.version) > 30 and " " not in by_folder.version


@pytest.mark.parametrize("path", ["none.txt", "t/none*", "none/"])
def test_what_is_not_there_is_refused(bucket, path):
    with pytest.raises(DataError, match=r"no such file or folder; correct the path|nothing to read; give files of"):
        listing(f"{bucket}/{path}")


def test_a_bucket_that_is_not_there_and_a_file_that_is_not_text_are_refused(bucket):
    with pytest.raises(DataError, match=r"s3://nobody/a\.txt: no such file or folder"):
        listing("s3://nobody/a.txt")
    with pytest.raises(DataError, match=r"s3://corpus/t/4\.log: unsupported file type; give one of"):
        listing(f"{bucket}/t/4.log")


def test_a_file_that_is_replaced_by_one_of_equal_size_is_refused(bucket, monkeypatch):
    monkeypatch.setattr("pretrain.preparation.inputs.remote_files.BLOCK_BYTES", 2000)
    files = s3fs.S3FileSystem()
    files.pipe_file("corpus/changing.jsonl", LINES)
    parts = plan_parts(listing(f"{bucket}/changing.jsonl"), 1 << 20)
    found = read(parts[0].slices, [InputConfig()])
    next(found)
    files.pipe_file("corpus/changing.jsonl", LINES[::-1].strip() + b"\n")
    with pytest.raises(DataError, match=r"changing\.jsonl: the file changed while it was being prepared"):
        list(found)
    with pytest.raises(DataError, match=r"changing\.jsonl: the file changed while it was being prepared"):
        list(read(parts[0].slices, [InputConfig()]))
    files.rm("corpus/changing.jsonl")
    with pytest.raises(FileNotFoundError) as caught:
        list(read(parts[0].slices, [InputConfig()]))
    assert caught.value.filename == "s3://corpus/changing.jsonl"


def test_pairs_may_be_on_s3(bucket, tmp_path):
    (tmp_path / "a.en").write_bytes(LINES)
    found = documents(tmp_path / "a.en", paired_path=f"{bucket}/b.jsonl.gz", kind="pairs")
    assert [document.source for document in found] == [document.text for document in found]


def test_missing_credentials_are_told_at_once(bucket, monkeypatch, tmp_path):
    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read: NoCredentialsError: Unable to locate credentials"):
        listing(f"{bucket}/a.jsonl")
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_server_that_is_not_there_is_one_error(bucket, monkeypatch):
    monkeypatch.setattr("pretrain.preparation.inputs.remote_files.WAITS", Waits(0.0, 0.0, 0.0))
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read: .*, and no answer for 0 s; fix the access problem"):
        listing(f"{bucket}/a.jsonl")
    s3fs.S3FileSystem.clear_instance_cache()


def test_prepared_text_is_that_of_the_same_files_on_a_disk(bucket, folder):
    assert texts(f"{bucket}/t", f"{bucket}/a.jsonl") == texts(folder / "t", folder / "a.jsonl")
