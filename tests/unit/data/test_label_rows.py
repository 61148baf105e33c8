"""Rows of labelled texts keep each label at its token, through packing, cutting and mixing."""

import json
from itertools import pairwise

import numpy as np
import pytest
import safetensors.numpy

from pretrain.config.data import DataConfig, SourceConfig
from pretrain.data.bin_stream import BinStream
from pretrain.data.bins import BinStore, pack_documents
from pretrain.data.mixture import MixtureOrder, MixtureStream
from pretrain.datacheck.shard_files import check_files
from pretrain.errors import DataError
from pretrain.preparation.prepare import prepare
from pretrain.preparation.split import TRAIN
from pretrain.rows import IGNORE_INDEX, crop_rows, select_rows
from pretrain.shards.dataset import open_dataset
from pretrain.shards.index import DataIndex, data_hash, load_index
from pretrain.shards.reader import ShardReader, ShardSet
from pretrain.shards.store import LocalStore
from tests.helpers.corpus import write_rows
from tests.helpers.prepare_config import labels_config


def tagged_folder(tmp_path, name="out", rows=40, seed=0, labels=("x", "y", "z")):
    rng = np.random.default_rng(seed)
    made = [
        {"tokens": [str(rng.integers(10)) for _ in range(size)], "tags": rng.choice(labels, size).tolist()}
        for size in rng.integers(1, 14, rows)
    ]
    path = write_rows(tmp_path / f"{name}.jsonl", made)
    tokenizer = {"kind": "given", "path": str(tmp_path / "tokenizer.json")}
    if not (tmp_path / "tokenizer.json").exists():
        tokenizer = {"kind": "char"}
    config = labels_config(tmp_path / name, path, "tags", tokenizer=tokenizer, labels=list(labels))
    index = prepare(config, processes=1)
    if not (tmp_path / "tokenizer.json").exists():
        (tmp_path / "tokenizer.json").write_bytes((tmp_path / name / "tokenizer.json").read_bytes())
    return tmp_path / name, index


def split_rows(rows):
    """Returns the pieces of documents in rows, as (tokens, labels)."""
    width, found = rows.tokens_BT.shape[1], []
    for number in range(len(rows.tokens_BT)):
        starts = [start % width for start in rows.starts.tolist() if start // width == number]
        filled = min(int(rows.num_tokens_B[number]), width - 1)
        bounds = [start for start in starts if start < filled] + [filled]
        for a, b in pairwise(bounds):
            found.append((rows.tokens_BT[number, a:b].tolist(), rows.labels_BT[number, a:b].tolist()))
        assert (rows.labels_BT[number, rows.num_tokens_B[number] :] == IGNORE_INDEX).all()
    return found


@pytest.mark.parametrize("bucket_rows", [None, 4])
def test_labels_stay_with_their_tokens_in_every_packing(tmp_path, bucket_rows):
    folder, index = tagged_folder(tmp_path)
    stream = BinStream(
        ShardSet(folder, index, TRAIN), seq_len=32, seed=3, lanes=2, block_samples=4, bucket_rows=bucket_rows
    )
    num_samples = stream.order.num_tokens
    rows = stream.read(range(-(-num_samples // 256) * 256))  # groups of batches of similar length are whole
    rows = select_rows(rows, rows.sample_ids_B < num_samples)
    reader = ShardReader(folder, index.split(TRAIN).shards[0], index.dtype)
    (tokens, starts), labels = reader.member(0), reader.labels(0)
    stored = zip(np.split(tokens, starts[1:]), np.split(labels, starts[1:]), strict=True)
    expected = sorted((ids.tolist(), marks.tolist()) for ids, marks in stored)
    assert sorted(split_rows(rows)) == expected
    cropped = crop_rows(rows)
    assert (cropped.labels_BT == rows.labels_BT[:, : cropped.tokens_BT.shape[1]]).all()


@pytest.mark.parametrize("layout", ["bins", "padded", "validation"])
def test_a_class_is_of_the_beginning_of_a_text_whose_rest_is_in_no_row(tmp_path, layout):
    texts = [(str(n % 10) * size, "xyz"[n % 3]) for n, size in enumerate([3, 21, 6, 5, 7, 12, 4, 13] * 5)]
    path = write_rows(tmp_path / "in.jsonl", [{"text": text, "label": label} for text, label in texts])
    tokenizer = {"kind": "char"}
    index = prepare(labels_config(tmp_path / "out", path, "classes", tokenizer=tokenizer), processes=1)
    shards = ShardSet(tmp_path / "out", index, TRAIN)
    stream = BinStream(shards, seq_len=6, seed=3, bucket_rows=4 if layout == "padded" else None)
    if layout == "validation":
        rows = stream.read_windows(range(stream.num_windows()))
    else:
        rows = stream.read(range(-(-stream.order.num_tokens // 256) * 256))
        rows = select_rows(rows, rows.sample_ids_B < stream.order.num_tokens)
    reader = ShardReader(tmp_path / "out", index.split(TRAIN).shards[0], index.dtype)
    (tokens, starts), labels = reader.member(0), reader.labels(0)
    stored = zip(np.split(tokens, starts[1:]), np.split(labels, starts[1:]), strict=True)
    whole = [(ids.tolist(), marks.tolist()) for ids, marks in stored]
    assert sorted(split_rows(rows)) == sorted((ids[:6], marks[:6]) for ids, marks in whole)
    assert all((row != IGNORE_INDEX).any() for row in rows.labels_BT[:, :-1]), "a row without a label teaches nothing"
    assert stream.num_too_long == sum(len(ids) > 6 for ids, _ in whole) > 0


def test_bins_of_classes_that_an_earlier_version_has_cut_are_made_again(tmp_path):
    path = write_rows(tmp_path / "in.jsonl", [{"text": "1" * size, "label": size % 2} for size in range(3, 30)])
    index = prepare(labels_config(tmp_path / "out", path, "classes", tokenizer={"kind": "char"}), processes=1)
    shards = ShardSet(tmp_path / "out", index, TRAIN)
    store = BinStore(shards, 6)
    kept = store.load(0)
    cut = pack_documents(shards.lengths(0, "tokens"), 6)
    assert len(cut) > len(kept)
    (file,) = (tmp_path / "out/bins").iterdir()
    content = file.read_bytes()
    file.write_bytes(
        safetensors.numpy.save({name: getattr(cut, name) for name in ("starts", "document", "offset", "length")})
    )
    assert len(BinStore(shards, 6).load(0)) == len(kept)
    assert file.read_bytes() == content


def test_a_document_that_is_longer_than_a_row_is_cut_with_its_labels(tmp_path):
    folder, index = tagged_folder(tmp_path)
    stream = BinStream(ShardSet(folder, index, TRAIN), seq_len=5)
    rows = stream.read_windows(range(stream.num_windows()))
    reader = ShardReader(folder, index.split(TRAIN).shards[0], index.dtype)
    found = np.concatenate([marks for _, marks in split_rows(rows)])
    assert sorted(found.tolist()) == sorted(reader.labels(0).tolist())


def test_mixtures_keep_labels_with_their_rows(tmp_path):
    streams, rows = [], []
    for seed, name in enumerate(("one", "two")):
        folder, index = tagged_folder(tmp_path, name, seed=seed)
        streams.append(BinStream(ShardSet(folder, index, TRAIN), seq_len=32, seed=seed))
    mixed = MixtureStream(streams, MixtureOrder([(0, [0.5, 0.5])])).read(range(8))
    for stream in streams:
        rows += split_rows(stream.read(range(4)))
    assert sorted(split_rows(mixed)) == sorted(rows)


def test_sources_of_a_mixture_need_the_same_labels(tmp_path):
    folders = [
        tagged_folder(tmp_path, name, labels=labels)[0] for name, labels in (("a", ("x", "y")), ("b", ("y", "x")))
    ]
    mixture = [SourceConfig(name=path.name, path=str(path), weight=1) for path in folders]
    message = (
        r"data\.mixture: the labels of 'b' are not those of 'a', in their order; prepare all sources with one list"
    )
    with pytest.raises(DataError, match=message):
        open_dataset(DataConfig(mixture=mixture))


def test_names_of_labels_are_part_of_what_the_data_are(tmp_path):
    _, index = tagged_folder(tmp_path)
    assert data_hash(index) != data_hash(DataIndex(**{**vars_of(index), "labels": ("z", "y", "x")}))


def vars_of(index):
    return {name: getattr(index, name) for name in index.__slots__}


@pytest.mark.parametrize("labels", [[], ["a", "a"], "ab", [1]])
def test_an_index_with_labels_that_cannot_be_is_refused(tmp_path, labels):
    folder, _ = tagged_folder(tmp_path)
    raw = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(raw | {"labels": labels}))
    message = r"field 'labels(.0)?'( must list different texts|: Input should be a valid (tuple|string))"
    with pytest.raises(DataError, match=message):
        load_index(folder)


def test_a_label_beyond_the_names_is_damage(tmp_path):
    folder, index = tagged_folder(tmp_path)

    def check(found):
        return check_files(LocalStore(folder), found, lambda amount: None)

    assert check(index).keys() == {"train"}
    fewer = DataIndex(**{**vars_of(index), "labels": ("x", "y")})
    with pytest.raises(DataError, match=r"00000000\.labels\.npy holds labels that are none of 2"):
        check(fewer)
