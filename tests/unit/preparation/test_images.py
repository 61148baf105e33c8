"""`prepare` of folders of images: the shards, the same bytes whenever, and input that is refused whole."""

import json
import re
from pathlib import Path

import pytest

from pretrain.config.load import parse_section, short_prepare
from pretrain.config.prepare import PrepareConfig
from pretrain.config.yaml_nodes import LocatedTree
from pretrain.errors import ConfigError, DataError
from pretrain.preparation.filters import TooManyBadError
from pretrain.preparation.input_parts import Share
from pretrain.preparation.prepare import prepare
from pretrain.shards.index import load_index
from pretrain.shards.reader import ShardReader
from tests.helpers.corpus import digests
from tests.helpers.images import COLORS, encode, noise, prepare_colors, write_colors


def images_of(folder: Path, split: str) -> list[tuple[bytes, str]]:
    """Files and labels of a split, in order."""
    index = load_index(folder)
    readers = [ShardReader(folder, shard, index.dtype) for shard in index.split(split).shards]
    counts = [shard.num_members for shard in index.split(split).shards]
    found = [reader.image(number) for reader, count in zip(readers, counts, strict=True) for number in range(count)]
    return [(bytes(content), index.labels[label]) for content, label in found]


def given(folder: Path) -> set[tuple[bytes, str]]:
    return {(path.read_bytes(), path.relative_to(folder).parts[0]) for path in folder.rglob("*.png")}


def test_every_image_is_kept_as_it_is_with_the_name_of_its_folder(tmp_path):
    folder, index = prepare_colors(tmp_path)
    assert (index.kind, index.labels) == ("images", tuple(sorted(COLORS)))
    train, validation = images_of(folder, "train"), images_of(folder, "validation")
    assert {*train, *validation} == given(tmp_path / "photos")
    assert len(train) + len(validation) == 24
    facts = json.loads((folder / "statistics.json").read_text())["splits"]
    assert sum(facts[split]["labels"]["red"] for split in facts) == 8
    assert facts["train"]["width"] == {"least": 16, "median": 16, "most": 16}
    # Mixed: a shard of one class after the other would make bad batches for any reader.
    assert [label for _, label in train] != sorted(label for _, label in train)


def test_the_same_input_gives_the_same_bytes_from_any_place_and_in_shares(tmp_path):
    folder, _ = prepare_colors(tmp_path / "a")
    other = tmp_path / "b"
    write_colors(other / "elsewhere")
    config = short_prepare(other / "data", [str(other / "elsewhere")], kind="images", split="hash:0.25")
    assert prepare(config, share=Share(1, 2), processes=1) is not None
    tars = {name: digest for name, digest in digests(folder).items() if name.endswith((".tar", ".npy"))}
    assert tars.items() <= digests(other / "data").items()
    before = digests(folder)
    again = short_prepare(folder, [str(tmp_path / "a/photos")], kind="images", split="hash:0.25")
    assert prepare(again, processes=1) == load_index(folder)
    assert digests(folder) == before


def test_deeper_folders_and_given_splits_and_labels(tmp_path):
    write_colors(tmp_path / "all/train", each=2)
    write_colors(tmp_path / "all/test", each=2)
    (tmp_path / "all/train/red/deeper").mkdir()
    (tmp_path / "all/train/red/deeper/one.JPEG").write_bytes(encode(noise(9, 9), "JPEG"))
    values = {
        "output": str(tmp_path / "data"),
        "kind": "images",
        "labels": ["green", "red", "blue", "black"],
        "inputs": [
            {"path": str(tmp_path / "all/train"), "split": "train"},
            {"path": str(tmp_path / "all/test"), "split": "validation"},
        ],
    }
    index = prepare(parse_section(PrepareConfig, LocatedTree(values, {}), "a test"), processes=1)
    assert index is not None and index.labels == ("green", "red", "blue", "black")
    assert [index.splits[name].num_documents for name in ("train", "validation")] == [7, 6]


def refused(tmp_path: Path, **options: object) -> str:
    """Runs `prepare` on tmp_path/photos; returns the message, after a look that nothing is left."""
    with pytest.raises((DataError, ConfigError)) as caught:
        prepare(short_prepare(tmp_path / "data", [str(tmp_path / "photos")], kind="images", **options), processes=1)
    assert not (tmp_path / "data/index.json").exists()
    assert list((tmp_path / "data").rglob("*.tar*")) == [] and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_without_images(tmp_path):
    (tmp_path / "photos/cat").mkdir(parents=True)
    (tmp_path / "photos/cat/notes.txt").write_text("none")
    assert re.search(r"photos: there are no images \(\.jpg .*\); give a folder with one folder", refused(tmp_path))


def test_a_class_with_one_image(tmp_path):
    write_colors(tmp_path / "photos")
    (tmp_path / "photos/cat").mkdir()
    (tmp_path / "photos/cat/a.png").write_bytes(encode(noise(4, 4)))
    message = refused(tmp_path)
    assert re.search(r"photos/cat/a\.png: class 'cat' has one image: .*; add images of it, or remove", message)


def test_an_image_beside_the_classes(tmp_path):
    write_colors(tmp_path / "photos")
    (tmp_path / "photos/a.png").write_bytes(encode(noise(4, 4)))
    assert re.search(r"photos/a\.png: an image without a class: .*; put it into a folder", refused(tmp_path))


def test_one_class(tmp_path):
    write_colors(tmp_path / "photos/below")
    assert re.search(r"there is one class, 'below'.*; give the folder above", refused(tmp_path))


def test_a_damaged_image_ends_it_with_its_name(tmp_path):
    write_colors(tmp_path / "photos")
    path = tmp_path / "photos/red/003.png"
    path.write_bytes(path.read_bytes()[:-40])
    assert re.search(r"red/003\.png: its pixels are damaged: .*; remove it, or save it anew", refused(tmp_path))
    assert not (tmp_path / "data").exists()


def test_a_class_that_is_held_out_whole(tmp_path):
    write_colors(tmp_path / "photos", each=2)
    assert "is in the training split; add images of it, hold out less" in refused(tmp_path, split="hash:0.9")
    message = "there are no images to train on; give more images, or hold out less with --split"
    assert message in refused(tmp_path, split="hash:0.999999999")


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("s3://a:b@bucket/photos", {}, r"s3://bucket/photos: an address of data has no user, password, query or"),
        ("photos", {"split": "tail:0.1"}, r"split=tail:0\.1 cuts texts in two, and kind=images has none; use hash:F"),
        ("photos", {"tokenizer": "char"}, r"blue/000\.png: an image without a caption; write it to 000\.txt beside"),
        ("missing", {}, r"missing: no such file or folder; correct the path"),
    ],
)
def test_options_that_images_do_not_have(tmp_path, monkeypatch, path, options, message):
    monkeypatch.chdir(tmp_path)
    write_colors(tmp_path / "photos", each=2)
    with pytest.raises((ConfigError, DataError), match=message):
        prepare(short_prepare("data", [path], kind="images", **options), processes=1)


def test_images_that_cannot_be_decoded_are_left_out_on_request(tmp_path):
    write_colors(tmp_path / "photos")
    (tmp_path / "photos/red/broken.png").write_bytes(encode(noise(40, 40))[:-300])
    options = {"kind": "images", "split": "hash:0.25", "on_error": "skip"}
    with pytest.raises(TooManyBadError, match=r"1 of \d+ records are bad, .*broken\.png: its pixels are damaged"):
        prepare(short_prepare(tmp_path / "data", [str(tmp_path / "photos")], **options), processes=1)
    options |= {"max_skipped_share": 0.8}
    index = prepare(short_prepare(tmp_path / "data", [str(tmp_path / "photos")], **options), processes=1)
    assert sum(split.num_documents for split in index.splits.values()) == 24
    facts = json.loads((tmp_path / "data/statistics.json").read_text())
    assert facts["left_out"] == {"bad_image": 1} and facts["skipped"]["num_read"] == 25
