"""Captioned images: folders and tars with their texts, the tokens of rows, and input that is refused whole."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import webdataset

from benchmarks.shapes import write_shapes
from pretrain.config.data import ImagesConfig
from pretrain.config.load import parse_section, short_prepare
from pretrain.config.model import ImageSize
from pretrain.config.prepare import PrepareConfig
from pretrain.config.yaml_nodes import LocatedTree
from pretrain.data.image_stream import ImageStream
from pretrain.errors import ConfigError, DataError
from pretrain.objective.seq2seq import caption_rows
from pretrain.preparation.prepare import prepare
from pretrain.rows import IGNORE_INDEX
from pretrain.shards.index import load_index
from pretrain.shards.reader import ShardSet
from pretrain.shards.remote_store import open_store
from pretrain.shards.store import ShardStore
from pretrain.tokenizer.file import load_tokenizer
from tests.helpers.corpus import digests
from tests.helpers.images import encode, noise, write_colors
from tests.helpers.servers import serve_folder
from tests.unit.preparation.readers.test_webdataset import write

PNG = encode(noise(9, 12))


def captioned(folder: Path, *inputs: object, **options: object) -> Path:
    """Prepares captions of characters; returns the shard folder."""
    given = {"kind": "images", "tokenizer": "char", "split": "hash:0.25"} | options
    assert prepare(short_prepare(folder, [str(one) for one in inputs], **given), processes=1) is not None
    return folder


def texts_of(folder: Path, split: str = "train") -> dict[bytes, str]:
    """The caption of each image file of a split, decoded from its tokens, which end with the end token."""
    index = load_index(folder)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    shards = ShardSet(folder, index, split)
    found = {}
    for place in range(len(shards)):
        captions = shards.captions(place)
        for number in range(shards.split.shards[place].num_members):
            *tokens, end = captions.slice(number, number + 1).values.tolist()
            assert end == index.eos_id
            found[bytes(shards.reader(place).image(number)[0])] = tokenizer.decode(tokens)
    return found


def test_a_folder_keeps_images_and_captions_and_any_reader_gets_both(tmp_path):
    write_shapes(tmp_path / "shapes", 24)
    (tmp_path / "shapes/notes.md").write_text("left out")
    folder = captioned(tmp_path / "data", tmp_path / "shapes")
    index = load_index(folder)
    assert (index.kind, index.labels) == ("captions", ())
    expected = {path.read_bytes(): path.with_suffix(".txt").read_text().strip()
                for path in (tmp_path / "shapes").glob("*.png")}  # fmt: skip
    train, validation = texts_of(folder), texts_of(folder, "validation")
    assert train | validation == expected and len(train) + len(validation) == 24 and validation
    facts = json.loads((folder / "statistics.json").read_text())["splits"]["train"]["captions"]
    assert facts["lengths"]["longest"] == 1 + max(map(len, train.values()))
    assert facts["num_bytes_text"] == sum(map(len, train.values()))
    urls = [str(folder / shard.name) for shard in index.split("train").shards]
    samples = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    assert {sample["png"]: sample["txt"].decode() for sample in samples} == train
    before = digests(folder)
    assert prepare(short_prepare(folder, [str(tmp_path / "shapes")], kind="images", tokenizer="char",
                                 split="hash:0.25"), processes=1) == index  # fmt: skip
    assert (
        digests(folder)
        == before
        == digests(captioned(tmp_path / "again", tmp_path / "shapes")) | {"prepare.json": before["prepare.json"]}
    )


def test_images_without_folders_and_with_texts_need_no_key_to_be_captions(tmp_path):
    write_shapes(tmp_path / "shapes", 40)
    folder = tmp_path / "data"
    options = {"kind": "images", "split": "hash:0.2"}
    index = prepare(short_prepare(folder, [str(tmp_path / "shapes")], **options), processes=1)
    assert index is not None and index.kind == "captions"
    # Of classes a .txt beside an image is another file, as before.
    write_colors(tmp_path / "photos")
    (tmp_path / "photos/red/000.txt").write_text("red")
    index = prepare(short_prepare(tmp_path / "classes", [str(tmp_path / "photos")], **options), processes=1)
    assert index is not None and index.kind == "images"


def test_tars_of_others_are_read_where_they_are(tmp_path):
    (tmp_path / "tars").mkdir()
    members = []
    for number in range(6):
        caption = f"number {number}"
        text = ("txt", caption) if number % 2 else ("json", json.dumps({"text": caption, "url": "x"}))
        members += [(f"{number}.png", encode(noise(9, 12, seed=number))), (f"{number}.{text[0]}", text[1].encode())]
    write(tmp_path / "tars/train.tar", members)
    write(tmp_path / "tars/val.tar", [("a.png", PNG), ("a.txt", b"number 5")])
    folder = captioned(tmp_path / "data", tmp_path / "tars")
    index = load_index(folder)
    assert (folder / index.split("train").shards[0].name).resolve() == tmp_path / "tars/train.tar"
    found = texts_of(folder)
    assert found == {encode(noise(9, 12, seed=number)): f"number {number}" for number in range(6)}
    assert list(texts_of(folder, "validation").values()) == ["number 5"]


def stream_of(folder: Path, seq_len: int, store: ShardStore | None = None) -> ImageStream:
    image, config = ImageSize(3, 8), ImagesConfig(crop="random", padding=1)
    index = load_index(folder)
    return ImageStream(store or folder, index, "train", image=image, seq_len=seq_len, config=config)


def test_rows_are_the_captions_of_their_images_with_a_start_token_before(tmp_path):
    write_shapes(tmp_path / "shapes", 24)
    folder = captioned(tmp_path / "data", tmp_path / "shapes")
    index = load_index(folder)
    rows = caption_rows(stream_of(folder, 60).read(range(5)), start_id=3, num_read=17)
    assert rows.pixels_BCYX is not None and rows.pixels_BCYX.shape == (5, 3, 8, 8)
    assert rows.source is not None and rows.source.tokens_BT.shape == (5, 17)
    captions = set(texts_of(folder).values())
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    for inputs, targets in zip(rows.tokens_BT, rows.targets_BT, strict=True):
        kept = targets[targets != IGNORE_INDEX]
        assert kept[-1] == index.eos_id and tokenizer.decode(kept[:-1].tolist()) in captions
        assert inputs[0] == 3 and np.array_equal(inputs[1 : len(kept)], kept[:-1])
    assert rows.num_targets() == (rows.targets_BT != IGNORE_INDEX).sum()
    assert rows.num_tokens() == rows.num_targets() + 5 * 17


def test_a_caption_that_is_longer_than_a_row_is_named_before_a_step(tmp_path):
    write_shapes(tmp_path / "shapes", 24)
    folder = captioned(tmp_path / "data", tmp_path / "shapes")
    longest = 1 + max(map(len, texts_of(folder).values()))
    assert stream_of(folder, longest).seq_len == longest
    what = rf"train/part-.*\.tar, \d+\.png: a caption of {longest} tokens, its end included, exceeds batch\.seq_len=20"
    with pytest.raises(DataError, match=f"{what}; use batch.seq_len={longest}, or shorten it"):
        stream_of(folder, 20)


def test_a_folder_behind_an_address_reads_the_same_rows(tmp_path):
    write_shapes(tmp_path / "shapes", 24)
    folder = captioned(tmp_path / "data", tmp_path / "shapes")
    expected = stream_of(folder, 60).read(range(6))
    with serve_folder(folder) as server:
        store = open_store(server.url, tmp_path / "cache", 2**30)
        store.check()
        found = stream_of(folder, 60, store=store).read(range(6))
        for name in ("tokens_BT", "num_tokens_B", "sample_ids_B", "pixels_BCYX"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        with pytest.raises(DataError, match=r"exceeds batch\.seq_len=20"):
            stream_of(folder, 20, store=store).read(range(6))
        store.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"00003.txt": None}, r"shapes/00003\.png: an image without a caption; write it to 00003\.txt beside it"),
        ({"00003.txt": b" \n"}, r"shapes/00003\.txt: an empty caption; write one, or remove the image"),
        ({"00003.txt": b"\xff"}, r"shapes/00003\.txt: a caption that is not UTF-8"),
        ({"00003.png": b"x"}, r"shapes/00003\.png: not an image"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_and_leaves_nothing(tmp_path, changed, message):
    write_shapes(tmp_path / "shapes", 8)
    for name, content in changed.items():
        path = tmp_path / "shapes" / name
        path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        captioned(tmp_path / "data", tmp_path / "shapes")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.png", PNG)], r"t\.tar, sample 'a': an image without a caption \(the sample has \.png\); give it a \.txt"),
        ([("a.png", PNG), ("a.txt", b"")], r"t\.tar, sample 'a', \.txt: an empty caption"),
        ([("a.png", PNG), ("a.json", b"{")], r"t\.tar, sample 'a': \.json: .*; write it as JSON"),
        ([("a.txt", b"x")], r"t\.tar, sample 'a': no image in a sample"),
    ],
)
def test_a_tar_that_is_not_whole_is_refused_and_leaves_nothing(tmp_path, members, message):
    write(tmp_path / "t.tar", members)
    with pytest.raises(DataError, match=message):
        captioned(tmp_path / "data", tmp_path / "t.tar")
    assert not (tmp_path / "data").exists()


def test_a_tar_of_texts_as_classes_names_the_option_of_captions(tmp_path):
    write(tmp_path / "t.tar", [("a.png", PNG), ("a.txt", b"a cat on a mat"), ("b.png", PNG), ("b.txt", b"a dog")])
    with pytest.raises(DataError, match=r"has one image: .*; captions need --vocab-size N, or a --tokenizer"):
        captioned(tmp_path / "data", tmp_path / "t.tar", tokenizer="bpe")


def test_labels_and_a_tokenizer_do_not_go_together():
    with pytest.raises(ConfigError, match=re.escape("labels name classes, and tokenizer is of captions")):
        values = {"output": "data", "kind": "images", "labels": ["a", "b"], "tokenizer": {"kind": "char"}}
        parse_section(PrepareConfig, LocatedTree(values, {}), "a test")
