"""Shards of images are plain webdataset tars, whose table leads to every file without parsing them."""

import errno
import hashlib

import pytest
import webdataset

from pretrain.errors import DataError, DiskError
from pretrain.shards.image_writer import EncodedImage, ImageShardWriter
from pretrain.shards.index import DataIndex, build_split, load_index, write_index
from pretrain.shards.reader import ShardReader, ShardSet
from pretrain.utils.io import set_fault_hook
from tests.helpers.images import encode, noise

# In a tar, "bmp" comes before "cls" and the others after; sizes around a block of 512 bytes.
IMAGES = [
    EncodedImage(encode(noise(8, 8, 1)), "png", 8, 8, 2),
    EncodedImage(b"x" * 512, "bmp", 4, 5, 0),
    EncodedImage(b"y" * 513, "jpg", 6, 7, 1),
]


def write(folder, name="part-00000-0000.tar"):
    (folder / "train").mkdir(exist_ok=True)
    writer = ImageShardWriter(folder / "train" / name)
    for image in IMAGES:
        writer.add(image)
    return writer.close()


def index_of(folder):
    splits = {"train": build_split([write(folder)], 0)}
    return DataIndex("", vocab_size=1, dtype="uint16", eos_id=0, splits=splits, kind="images", labels=("a", "b", "c"))


def test_the_table_leads_to_every_image(tmp_path):
    shard = write(tmp_path)
    reader = ShardReader(tmp_path, shard, "uint16")
    for number, image in enumerate(IMAGES):
        content, label = reader.image(number)
        assert (bytes(content), label) == (image.content, image.label)
    content = (tmp_path / shard.name).read_bytes()
    assert (shard.num_bytes, shard.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_webdataset_reads_the_same(tmp_path):
    shard = write(tmp_path)
    samples = list(webdataset.WebDataset(str(tmp_path / shard.name), shardshuffle=False, empty_check=False))
    assert [(sample["cls"], sample[image.suffix]) for sample, image in zip(samples, IMAGES, strict=True)] == [
        (str(image.label).encode(), image.content) for image in IMAGES
    ]


def test_the_bytes_are_a_function_of_the_images(tmp_path):
    first, second = write(tmp_path), write(tmp_path, "part-00001-0000.tar")
    assert first.sha256 == second.sha256


def test_sizes_are_known_without_the_tar(tmp_path):
    index = index_of(tmp_path)
    write_index(tmp_path, index)
    assert load_index(tmp_path) == index
    assert ShardSet(tmp_path, index, "train")._load_lengths(0).tolist() == [[1, 8, 8], [1, 4, 5], [1, 6, 7]]


def test_a_damaged_image_is_named(tmp_path):
    shard = write(tmp_path)
    path = tmp_path / shard.name
    content = path.read_bytes()
    path.write_bytes(content.replace(b"y" * 513, b"z" * 513))
    reader = ShardReader(tmp_path, shard, "uint16")
    reader.image(0)
    assert reader.image(0)[0] == IMAGES[0].content  # checked once
    with pytest.raises(DataError, match=r"train/part-00000-0000\.tar: 00000002\.jpg is damaged: CRC32 of the 513 byt"):
        reader.image(2)


def test_nothing_appears_before_the_end(tmp_path):
    writer = ImageShardWriter(tmp_path / "a.tar")
    writer.add(IMAGES[0])
    assert not (tmp_path / "a.tar").exists()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path):
    def refuse(name, path):
        if name == "write":
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = ImageShardWriter(tmp_path / "a.tar")
    set_fault_hook(refuse)
    try:
        with pytest.raises(DiskError, match=r"a\.tar: cannot write: No space left on device; free"):
            writer.add(EncodedImage(bytes(20_000), "png", 8, 8, 2))  # more than a tar buffers
        writer.discard()
    finally:
        set_fault_hook(None)
    assert list(tmp_path.iterdir()) == []
