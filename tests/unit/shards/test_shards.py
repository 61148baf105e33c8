"""One shard: what is written is what is read, by us and by plain webdataset, and damage is always found."""

import os
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.errors import DataError, DiskError
from pretrain.shards.ragged import TokenDocuments, ragged_of
from pretrain.shards.reader import ShardReader, load_lengths
from pretrain.shards.writer import MAX_DOCUMENT_TOKENS, ShardWriter, npy_bytes
from pretrain.utils import io
from tests.helpers.shards import add_document, make_documents, write_shard
from tests.helpers.warm_python import run_python

NAME = "part-00000-0000.tar"


@pytest.fixture
def shard(tmp_path):
    """A shard of 500 tokens in 8 or so members."""
    return write_shard(tmp_path / "train" / NAME, make_documents(500))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=40), member_tokens=st.integers(1, 100))
def test_documents_are_read_back_whole_and_in_order(tmp_path_factory, dtype, sizes, member_tokens):
    folder = tmp_path_factory.mktemp("shard")
    top = np.iinfo(dtype).max
    documents = [np.arange(top - size, top, dtype=np.int64) for size in sizes]
    shard = write_shard(folder / "train" / NAME, documents, dtype, member_tokens)
    reader = ShardReader(folder, shard, dtype)
    got = []
    for member in range(shard.num_members):
        tokens, docs = reader.member(member)
        assert docs[0] == 0 and docs[-1] < member_tokens  # the last document to start reaches the limit
        assert len(tokens) >= member_tokens or member == shard.num_members - 1
        got += np.split(tokens, docs[1:].tolist())
    assert [part.tolist() for part in got] == [document.tolist() for document in documents]
    assert (shard.num_tokens, shard.num_documents) == (sum(sizes), len(sizes))


def test_plain_webdataset_reads_a_shard_in_secure_mode(tmp_path, shard):
    code = f"""
import numpy as np, webdataset as wds
samples = list(wds.WebDataset({str(tmp_path / shard.name)!r}, shardshuffle=False).decode())
np.savez({str(tmp_path / "seen.npz")!r}, keys=[s["__key__"] for s in samples],
         tokens=np.concatenate([s["tokens.npy"] for s in samples]), docs=[len(s["docs.npy"]) for s in samples])
"""
    done = run_python(code, anew=["webdataset"], WDS_SECURE="1")
    assert done.code == 0, done.stderr
    seen = np.load(tmp_path / "seen.npz")
    assert seen["tokens"].dtype == np.uint16
    assert seen["tokens"].tolist() == np.concatenate(make_documents(500)).tolist()
    assert seen["keys"].tolist() == [f"{member:08d}" for member in range(shard.num_members)]
    assert seen["docs"].sum() == shard.num_documents


def test_a_shard_holds_regular_files_without_time_or_owner(tmp_path, shard):
    with tarfile.open(tmp_path / shard.name) as tar:
        for entry in tar:
            assert entry.isreg() and (entry.mtime, entry.uid, entry.gid, entry.mode) == (0, 0, 0, 0o444)


def test_the_bytes_of_a_shard_depend_on_its_documents_only(tmp_path, shard):
    again = write_shard(tmp_path / "other" / "train" / NAME, make_documents(500))
    assert again == shard
    for name, size in shard.sizes.items():
        assert (tmp_path / "other" / name).read_bytes() == (tmp_path / name).read_bytes()
        assert (tmp_path / name).stat().st_size == size


def test_documents_given_together_make_the_same_shard_as_one_by_one(tmp_path, shard):
    (tmp_path / "other/train").mkdir(parents=True)
    writer = ShardWriter(tmp_path / "other/train" / NAME, "uint16", 64)
    writer.add(TokenDocuments(ragged_of(make_documents(500))))
    assert writer.close() == shard
    assert (tmp_path / "other" / shard.name).read_bytes() == (tmp_path / shard.name).read_bytes()


def test_the_lengths_of_documents_lie_beside_a_shard_for_any_reader_of_npy(tmp_path, shard):
    lengths = np.load(tmp_path / shard.lengths.name)
    assert lengths.dtype == np.uint32
    assert lengths.tolist() == [[len(document)] for document in make_documents(500)]


def test_a_document_is_found_by_its_number(tmp_path, shard):
    reader = ShardReader(tmp_path, shard, "uint16")
    for number, document in enumerate(make_documents(500)):
        member, first, length = reader.locate(number)
        assert reader.member(member)[0][first : first + length].tolist() == document.tolist()


def test_arrays_are_views_of_the_file(tmp_path, shard):
    reader = ShardReader(tmp_path, shard, "uint16")
    tokens, _ = reader.member(3)
    assert not tokens.flags.owndata and not tokens.flags.writeable
    del reader
    assert tokens.sum() > 0  # a view outlives its reader


def test_many_threads_read_the_same_shard(tmp_path, shard):
    reader = ShardReader(tmp_path, shard, "uint16")
    with ThreadPoolExecutor(8) as pool:
        members = list(range(shard.num_members)) * 50
        sums = list(pool.map(lambda member: int(reader.member(member)[0].sum()), members))
    assert sum(sums) == 50 * int(np.concatenate(make_documents(500)).sum())


def test_nothing_is_visible_before_close_and_nothing_is_left_by_discard(tmp_path):
    writer = ShardWriter(tmp_path / NAME, "uint16", 10)
    add_document(writer, np.arange(30))
    assert not (tmp_path / NAME).exists()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_file_left_by_a_crash_is_no_obstacle(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / f"{NAME}.tmp-{os.getpid()}").write_bytes(bytes(10**6))
    shard = write_shard(tmp_path / "train" / NAME, make_documents(100))
    assert (tmp_path / shard.name).stat().st_size == shard.num_bytes


@pytest.mark.parametrize("operation", ["open", "write", "fsync", "rename"])
def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path, operation):
    def refuse(name, path):
        if name == operation:
            raise OSError(28, "No space left on device")

    io.set_fault_hook(refuse)
    try:
        with pytest.raises(DiskError, match="No space left on device"):
            write_shard(tmp_path / "train" / NAME, make_documents(100))
    finally:
        io.set_fault_hook(None)
    assert not list((tmp_path / "train").glob("*.tar*"))


def test_a_document_beyond_the_limit_is_refused(tmp_path):
    writer = ShardWriter(tmp_path / NAME, "uint16")
    huge = np.broadcast_to(np.uint16(1), MAX_DOCUMENT_TOKENS + 1)  # one element in memory
    with pytest.raises(DataError, match=r"document 0 has 1073741825 tokens, more than 1073741824"):
        add_document(writer, huge)


@pytest.mark.parametrize("which", ["tar", "sidecar"])
def test_a_missing_file_is_named(tmp_path, shard, which):
    name = shard.name if which == "tar" else shard.table.name
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"{name}: cannot be read: No such file"):
        ShardReader(tmp_path, shard, "uint16")


def test_a_truncated_shard_is_named_with_both_sizes(tmp_path, shard):
    with (tmp_path / shard.name).open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(DataError, match=rf"{NAME}: has 5000 bytes, the index says {shard.num_bytes}"):
        ShardReader(tmp_path, shard, "uint16")


def test_a_flipped_bit_is_found_by_shard_member_and_byte_and_nothing_else_is_blamed(tmp_path, shard):
    path = tmp_path / shard.name
    good = path.read_bytes()
    clean = ShardReader(tmp_path, shard, "uint16")
    for kind, member in (("tokens", 0), ("tokens", 4), ("docs", 2)):
        array = clean.member(member)[kind == "docs"]
        offset = good.index(array.tobytes())
        damaged = bytearray(good)
        damaged[offset + array.nbytes - 1] ^= 0x10
        path.write_bytes(damaged)
        reader = ShardReader(tmp_path, shard, "uint16")
        message = rf"{NAME}: {member:08d}\.{kind}\.npy is damaged: .* at byte {offset} "
        for _ in range(2):
            with pytest.raises(DataError, match=message):
                reader.member(member)
        assert reader.member(member + 1)[0].size
        path.write_bytes(good)
        clean = ShardReader(tmp_path, shard, "uint16")


@pytest.mark.parametrize("change", [0, 1])
def test_lengths_that_contradict_the_index_are_refused(tmp_path, shard, change):
    path = tmp_path / shard.lengths.name
    lengths = np.load(path)
    lengths[3] = lengths[3] + 1 if change else 0
    path.write_bytes(npy_bytes(lengths))
    resealed = replace(shard, lengths=replace(shard.lengths, crc32=zlib.crc32(path.read_bytes())))
    with pytest.raises(DataError, match=r"lengths\.npy: its lengths contradict the index; copy this file again"):
        load_lengths(tmp_path, resealed)
    with pytest.raises(DataError, match=r"lengths\.npy: its CRC32 or its shape differs from the index"):
        load_lengths(tmp_path, shard)
    path.unlink()
    with pytest.raises(DataError, match=r"lengths\.npy: cannot be read: No such file"):
        load_lengths(tmp_path, shard)


@pytest.mark.parametrize("place", [3, 130, -1])
def test_a_damaged_sidecar_is_refused(tmp_path, shard, place):
    path = tmp_path / shard.table.name
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"idx\.npy: its CRC32 or its shape differs from the index"):
        ShardReader(tmp_path, shard, "uint16")


def test_a_sidecar_read_under_the_wrong_dtype_is_refused(tmp_path):
    shard = write_shard(tmp_path / "train" / NAME, [np.arange(5000)], "uint16", 10_000)
    with pytest.raises(DataError, match=r"idx\.npy: its offsets or counts contradict the index"):
        ShardReader(tmp_path, shard, "uint32")


@given(sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=30))
def test_pairs_are_read_back_side_by_side(tmp_path_factory, sizes):
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "train").mkdir()
    writer = ShardWriter(folder / "train" / NAME, "uint16", member_tokens=50, kind="pairs")
    pairs = [(np.full(s, n + 1), np.full(t, n + 100)) for n, (s, t) in enumerate(sizes)]
    for source, target in pairs:
        add_document(writer, target, source=source)
    shard = writer.close()
    reader, sources, targets = ShardReader(folder, shard, "uint16"), [], []
    for member in range(shard.num_members):
        for found, (values, docs) in ((sources, reader.source(member)), (targets, reader.member(member))):
            found += np.split(values, docs[1:].tolist())
    assert [part.tolist() for part in sources] == [source.tolist() for source, _ in pairs]
    assert [part.tolist() for part in targets] == [target.tolist() for _, target in pairs]
    assert shard.num_tokens == sum(target for _, target in sizes)
    assert load_lengths(folder, shard).tolist() == [[target, source] for source, target in sizes]
    for number, (source, target) in enumerate(pairs):
        for side, read, expected in (("source", reader.source, source), ("tokens", reader.member, target)):
            member, first, length = reader.locate(number, side)
            assert read(member)[0][first : first + length].tolist() == expected.tolist()


def test_what_is_learned_of_records_is_read_back(tmp_path):
    (tmp_path / "train").mkdir()
    writer = ShardWriter(tmp_path / "train" / NAME, "uint16", member_tokens=64, kind="records")
    documents, rng = make_documents(500), np.random.default_rng(0)
    losses = [rng.integers(2, size=len(document)) for document in documents]
    for document, loss in zip(documents, losses, strict=True):
        add_document(writer, document, loss=loss)
    shard = writer.close()
    reader = ShardReader(tmp_path, shard, "uint16")
    assert shard.num_members > 3
    found = np.concatenate([reader.loss(member) for member in range(shard.num_members)])
    assert found.tolist() == np.concatenate(losses).tolist()
    content = bytearray((tmp_path / shard.name).read_bytes())
    place = content.index(b"00000002.loss.npy") + 512 + 128
    content[place] ^= 1
    (tmp_path / shard.name).write_bytes(content)
    with pytest.raises(DataError, match=r"00000002\.loss\.npy is damaged"):
        ShardReader(tmp_path, shard, "uint16").loss(2)
