"""Every byte of a shard folder counts: whatever is damaged is found and named."""

import random
import tarfile
from dataclasses import replace

import pytest

from pretrain.datacheck.shard_files import check_files, check_with_webdataset
from pretrain.errors import DataError
from pretrain.shards.index import load_index
from pretrain.shards.store import LocalStore
from tests.unit.report.data_folders import make_folder, make_texts


@pytest.fixture(scope="module", params=["text", "pairs", "records"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / request.param
    texts = make_texts(60)
    documents = {
        "text": texts,
        "pairs": list(zip(texts, make_texts(60, 1), strict=True)),
        "records": [[(text, False), (text[::-1], True)] for text in texts],
    }[request.param]
    make_folder(path, documents, kind=request.param, validation=documents[:5], per_shard=20)
    return path


def check(path, **changes):
    return check_files(LocalStore(path), replace(load_index(path), **changes), lambda amount: None)


def test_every_byte_of_an_intact_folder_is_read_twice(folder):
    index = load_index(folder)
    amounts = []
    found = check_files(LocalStore(folder), index, amounts.append)
    num_bytes = sum(shard.num_bytes for split in index.splits.values() for shard in split.shards)
    assert sum(amounts) == pytest.approx(2 * num_bytes)
    assert found.keys() == {"train", "validation"} and all(found.values())


def test_webdataset_reads_the_first_shard_of_each_split_alike(folder):
    index = load_index(folder)
    first = [split.shards[0] for split in index.splits.values()]
    assert check_with_webdataset(LocalStore(folder), index) == sum(shard.num_members for shard in first)


def test_a_name_that_groups_members_otherwise_is_found(folder):
    """Our reader goes by offsets; other tools go by names, up to the first dot."""
    index = load_index(folder)
    path = folder / index.splits["train"].shards[0].name
    whole = path.read_bytes()
    header = tarfile.TarInfo.frombuf(whole[:512], "utf-8", "strict")
    header.name = "another" + header.name[header.name.index(".") :]
    path.write_bytes(header.tobuf(tarfile.USTAR_FORMAT) + whole[512:])
    with pytest.raises(DataError, match="webdataset reads another"):
        check_with_webdataset(LocalStore(folder), index)
    path.write_bytes(whole)


@pytest.mark.long
def test_a_flipped_bit_anywhere_in_any_file_is_found(folder):
    """Padding between members too: no CRC32 covers it, the sha256 of the tar does."""
    rng = random.Random(5)
    for path in sorted(file for file in folder.rglob("*") if file.suffix in (".tar", ".npy")):
        whole = path.read_bytes()
        for place in [0, len(whole) - 1, *rng.choices(range(len(whole)), k=12)]:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(DataError) as raised:
                check(folder)
            assert raised.value.where.endswith((f"{path.parent.name}/{path.name}", path.name))
        path.write_bytes(whole)
    check(folder)


def test_damage_within_a_member_is_named_by_shard_and_member(folder):
    path = folder / "train/part-00001-0000.tar"
    whole = path.read_bytes()
    # The first array of the first member lies behind two headers.
    damaged = bytearray(whole)
    damaged[512 + 128] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"^train/part-00001-0000\.tar: 00000000\.tokens\.npy is damaged: CRC32 of"):
        check(folder)
    path.write_bytes(whole)


def test_damaged_shards_are_all_named_in_one_line(folder):
    paths = sorted((folder / "train").glob("*.tar"))
    whole = [path.read_bytes() for path in paths]
    for path, content in zip(paths, whole, strict=True):
        path.write_bytes(content[:640] + bytes([content[640] ^ 1]) + content[641:])
    with pytest.raises(DataError) as raised:
        check(folder)
    line = str(raised.value)
    assert line.startswith("3 shards are damaged: train/part-00000-0000.tar: 00000000.tokens.npy is damaged")
    assert line.count(".tokens.npy is damaged") == 3 and "\n" not in line
    for path, content in zip(paths, whole, strict=True):
        path.write_bytes(content)


def test_bytes_between_members_are_told_apart_from_members(folder):
    path = folder / "train/part-00000-0000.tar"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"x")
    with pytest.raises(DataError, match=r"sha256 is \w{12}, the index says \w{12}, although every member is intact"):
        check(folder)
    path.write_bytes(whole)


def test_a_token_beyond_the_vocabulary_is_found(folder):
    with pytest.raises(DataError, match=r"holds token \d+, the vocabulary 20 ids"):
        check(folder, vocab_size=20)
