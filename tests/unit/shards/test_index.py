"""The index of a shard folder: round trip, identity, and one clear line for every way in which it can be bad."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.errors import DataError
from pretrain.shards.index import (
    INDEX_VERSION,
    DataIndex,
    ShardIndex,
    build_split,
    check_shards,
    data_hash,
    load_index,
    write_index,
)
from tests.helpers.shards import describe_shard, make_shards


def make_shard(name: str = "train/a.tar", num_tokens: int = 10, sha256: str = "ab") -> ShardIndex:
    return describe_shard(name, num_tokens, sha256=sha256)


def make_index(*shards: ShardIndex) -> DataIndex:
    return DataIndex("cd", 300, "uint16", 0, {"train": build_split(list(shards or [make_shard()]), 99)})


def edit(folder: Path, change) -> None:
    """Applies `change` to the parsed index.json."""
    raw = json.loads((folder / "index.json").read_text())
    change(raw)
    (folder / "index.json").write_text(json.dumps(raw))


def test_an_index_is_read_back_as_it_was_written(tmp_path):
    index = make_index(make_shard("train/a.tar", 10), make_shard("train/b.tar", 5))
    write_index(tmp_path, index)
    assert load_index(tmp_path) == index
    assert (index.split("train").num_tokens, index.split("train").num_documents) == (15, 4)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere: no such shard folder; run `pretrain prepare`"):
        load_index(tmp_path / "nowhere")


def test_a_folder_without_an_index_is_named(tmp_path):
    with pytest.raises(DataError, match=r"holds no index\.json; run `pretrain prepare` to the end"):
        load_index(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_an_index_that_is_not_json_is_refused(tmp_path, content):
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(DataError, match=r"index\.json: not JSON: "):
        load_index(tmp_path)


def test_an_index_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "index.json").mkdir()
    with pytest.raises(DataError, match=r"index\.json: cannot be read: not a regular file"):
        load_index(tmp_path)


def test_an_index_of_a_newer_version_asks_for_an_upgrade(tmp_path):
    write_index(tmp_path, make_index())
    edit(tmp_path, lambda raw: raw.update(version=INDEX_VERSION + 1, splits="unknown shape"))
    with pytest.raises(DataError, match=r"index version 4 is newer than 3, .* upgrade pretrain"):
        load_index(tmp_path)


def test_an_index_of_an_older_version_asks_to_prepare_anew(tmp_path):
    write_index(tmp_path, make_index())
    edit(tmp_path, lambda raw: raw.update(version=INDEX_VERSION - 1, splits="another shape"))
    with pytest.raises(
        DataError, match=r"version 2 is older than 3, .*; run `pretrain prepare` again into a new folder"
    ):
        load_index(tmp_path)


@pytest.mark.parametrize("field", ["version", "tokenizer_sha256", "vocab_size", "dtype", "eos_id", "splits", "kind"])
def test_a_missing_field_is_named(tmp_path, field):
    write_index(tmp_path, make_index())
    edit(tmp_path, lambda raw: raw.pop(field))
    with pytest.raises(DataError, match=f"field '{field}' is missing"):
        load_index(tmp_path)


@pytest.mark.parametrize(
    "field", ["name", "num_bytes", "sha256", "num_tokens", "num_documents", "num_members", "table", "lengths"]
)
def test_a_missing_field_of_a_shard_is_named_with_its_place(tmp_path, field):
    write_index(tmp_path, make_index(make_shard("train/a.tar"), make_shard("train/b.tar")))
    edit(tmp_path, lambda raw: raw["splits"]["train"]["shards"][1].pop(field))
    with pytest.raises(DataError, match=rf"field 'splits\.train\.shards\.1\.{field}' is missing"):
        load_index(tmp_path)


@pytest.mark.parametrize("value", ["300", 300.0, True, None, [300]])
def test_a_field_of_the_wrong_type_is_named(tmp_path, value):
    write_index(tmp_path, make_index())
    edit(tmp_path, lambda raw: raw.update(vocab_size=value))
    with pytest.raises(DataError, match="field 'vocab_size': Input should be a valid integer, not "):
        load_index(tmp_path)


@pytest.mark.parametrize("raw", ["[]", '"text"', "3"])
def test_a_top_level_that_is_no_object_is_refused(tmp_path, raw):
    (tmp_path / "index.json").write_text(raw)
    with pytest.raises(DataError, match="the top level must be a JSON object"):
        load_index(tmp_path)


def test_a_negative_count_is_refused(tmp_path):
    write_index(tmp_path, make_index())
    edit(tmp_path, lambda raw: raw["splits"]["train"]["shards"][0].update(num_tokens=-10))
    with pytest.raises(DataError, match=r"num_tokens': Input should be greater than or equal to 0, not -10"):
        load_index(tmp_path)


@pytest.mark.parametrize("name", ["../a.tar", "train/../../a.tar", "/etc/passwd", "", "a\\..\\b.tar", "a\0.tar"])
@pytest.mark.parametrize("of", ["shard", "table", "lengths"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path, name, of):
    write_index(tmp_path, make_index())

    def rename(raw):
        shard = raw["splits"]["train"]["shards"][0]
        (shard if of == "shard" else shard[of])["name"] = name

    edit(tmp_path, rename)
    with pytest.raises(DataError, match=r"name' leaves the shard folder"):
        load_index(tmp_path)


def test_a_shard_listed_twice_is_refused(tmp_path):
    write_index(tmp_path, make_index(make_shard(), make_shard()))
    with pytest.raises(DataError, match=r"listed twice: train/a\.idx\.npy, train/a\.lengths\.npy, train/a\.tar"):
        load_index(tmp_path)


@pytest.mark.parametrize("field", ["num_tokens", "num_documents"])
def test_totals_that_do_not_add_up_are_refused(tmp_path, field):
    write_index(tmp_path, make_index())
    edit(tmp_path, lambda raw: raw["splits"]["train"].update({field: 11}))
    with pytest.raises(DataError, match=rf"field 'splits\.train\.{field}' is 11, but its shards have"):
        load_index(tmp_path)


@pytest.mark.parametrize("change", [{"eos_id": 300}, {"vocab_size": 65537}])
def test_ids_that_do_not_fit_are_refused(tmp_path, change):
    write_index(tmp_path, make_index())
    edit(tmp_path, lambda raw: raw.update(change))
    with pytest.raises(DataError, match=r"eos_id \d+, vocab_size \d+ and dtype uint16 contradict each other"):
        load_index(tmp_path)


def test_an_unknown_dtype_is_refused(tmp_path):
    write_index(tmp_path, replace(make_index(), dtype="int8"))
    with pytest.raises(DataError, match="field 'dtype' must be one of uint16, uint32, not 'int8'"):
        load_index(tmp_path)


def test_an_index_without_a_train_split_is_refused(tmp_path):
    write_index(tmp_path, replace(make_index(), splits={"validation": build_split([make_shard()], 1)}))
    with pytest.raises(DataError, match="there is no split 'train'"):
        load_index(tmp_path)


@pytest.mark.parametrize("of", ["table", "lengths"])
def test_sidecars_of_another_kind_are_refused(tmp_path, of):
    write_index(tmp_path, make_index())
    edit(tmp_path, lambda raw: raw["splits"]["train"]["shards"][0][of].update(num_columns=2))
    with pytest.raises(DataError, match=r"the sidecars of train/a\.tar do not have the columns of text"):
        load_index(tmp_path)


def test_an_unknown_split_lists_the_known_ones():
    with pytest.raises(DataError, match="there is no split 'test'; use one of: train"):
        make_index().split("test")


def test_every_bad_file_is_listed_in_one_line(tmp_path):
    index = make_shards(tmp_path, train=(100, 100, 100), validation=(50,))
    check_shards(tmp_path, index)
    first, second, third = index.split("train").shards
    (tmp_path / first.name).unlink()
    (tmp_path / second.table.name).unlink()
    (tmp_path / first.lengths.name).write_bytes(b"")
    with (tmp_path / third.name).open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(DataError) as caught:
        check_shards(tmp_path, index)
    line = str(caught.value)
    assert "train/part-00000-0000.tar is missing" in line
    assert "train/part-00000-0001.idx.npy is missing" in line
    assert f"train/part-00000-0000.lengths.npy has 0 bytes, not {first.lengths_bytes}" in line
    assert f"train/part-00000-0002.tar has 1000 bytes, not {third.num_bytes}" in line
    assert "\n" not in line
    check_shards(tmp_path, index, "validation")


def test_the_data_hash_is_of_content_not_of_names():
    index = make_index(make_shard("train/a.tar", sha256="1"), make_shard("train/b.tar", sha256="2"))
    renamed = make_index(make_shard("train/x.tar", sha256="1"), make_shard("train/y.tar", sha256="2"))
    swapped = make_index(make_shard("train/a.tar", sha256="2"), make_shard("train/b.tar", sha256="1"))
    assert data_hash(index) == data_hash(renamed)
    others = [swapped, replace(index, tokenizer_sha256="ef"), replace(index, eos_id=1), replace(index, dtype="uint32")]
    assert data_hash(index) not in {data_hash(other) for other in others}


@pytest.mark.parametrize(
    "name", ["train/\u00e4.tar", "train/.a.tar", "train/" + "a" * 200 + ".tar", "./a.tar", "a b.tar"]
)
def test_an_unusual_name_within_the_folder_is_read(tmp_path, name):
    index = make_index(make_shard(name))
    write_index(tmp_path, index)
    assert load_index(tmp_path) == index


@pytest.mark.parametrize("name", ["a" * 256, "train/" + "\u00e4" * 128, "a/../b.tar", "train/a.tar\n/../../b"])
def test_a_name_that_no_file_may_have_is_refused(tmp_path, name):
    write_index(tmp_path, make_index(make_shard(name)))
    with pytest.raises(DataError, match=r"name' (is no file name|leaves the shard folder)"):
        load_index(tmp_path)
