import gzip
import json

import pytest

from pretrain.errors import DataError
from pretrain.preparation.convert.mds import open_mds
from pretrain.preparation.convert.token_file import ReadOptions
from tests.unit.preparation.convert import writers
from tests.unit.preparation.convert.writers import EOS_ID, VOCAB_SIZE

SAMPLES = [[5, 6, EOS_ID], [7, EOS_ID], [299, 8, EOS_ID], [9], [EOS_ID, 10]]

# What MDSWriter of mosaicml-streaming 0.13.0 writes of the first three, as ndarray:uint16 with zstd.
REAL_SHARD = (
    "28b52ffd20f4cd0500620a252a80c5e9d3c3644f511445511cf80751db56a02d37ba25b2bbed3e9229d0088dd06e0179606bf1dffe9f02"
    "ff1bc16169fe1b06cc5f386161fe3795047d92658e028a22c4b380a084717a17eca7555d75abdac9da249d8e65cebadad7326979c2ee47"
    "2332468b2fd8cd0f32eb938d99d358e8a90c2d69d2286d8e97c1a4ed074337297e134b2b4e6a29ff07fe0bfc0ff80ff07f090d002d61ec"
    "f79b422aa676ae68240b4e68eeb8e61a57e10c86f19397a306e9452828"
)
REAL_INDEX = (
    '{"shards": [{"column_encodings": ["ndarray:uint16"], "column_names": ["tokens"], "column_sizes": [null], '
    '"compression": "zstd", "format": "mds", "hashes": ["sha1"], "raw_data": {"basename": "shard.00000.mds", '
    '"bytes": 244, "hashes": {"sha1": "665528d853abfefad094ceddb271b53a473d5489"}}, "samples": 3, '
    '"size_limit": 67108864, "version": 2, "zip_data": {"basename": "shard.00000.mds.zstd", "bytes": 194, '
    '"hashes": {"sha1": "e58639f13d9d3d09d05542ecbefb38c6d921581f"}}}], "version": 2}'
)


def options(**changes):
    return ReadOptions(VOCAB_SIZE, EOS_ID, **changes)


def read(folder, **changes):
    return [
        document.tolist()
        for opened in open_mds([str(folder)], options(**changes))
        for document in opened.documents(0, opened.file.size)
    ]


def change_index(folder, change):
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_what_the_real_writer_wrote(tmp_path):
    (tmp_path / "index.json").write_text(REAL_INDEX)
    (tmp_path / "shard.00000.mds.zstd").write_bytes(bytes.fromhex(REAL_SHARD))
    assert read(tmp_path) == SAMPLES[:3]


@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [("bytes", "int64"), ("ndarray", "int32"), ("ndarray:uint32", "uint32"), ("ndarray", "int64")],
)
@pytest.mark.parametrize("compression", [None, "zstd:3"])
@pytest.mark.parametrize("neighbours", [("id", "note"), ("u", "v"), ("id", "v")])
def test_every_way_to_write_tokens(tmp_path, encoding, dtype, compression, neighbours):
    long = [list(range(1, 290)) * 2, *SAMPLES]
    how = {"encoding": encoding, "dtype": dtype, "compression": compression}
    writers.write_mds(tmp_path / "in", long, neighbours=neighbours, **how)
    assert read(tmp_path / "in") == long


def test_a_fixed_shape_has_no_sizes(tmp_path):
    samples = [[1, 2, 3], [4, 5, 6]]
    writers.write_mds(tmp_path / "in", samples, encoding="ndarray:uint16:3", dtype="uint16")
    assert read(tmp_path / "in") == samples


def test_bytes_are_of_the_dtype_that_is_said(tmp_path):
    writers.write_mds(tmp_path / "in", SAMPLES, dtype="uint16")
    assert read(tmp_path / "in", dtype="uint16") == SAMPLES
    message = (
        r"00000\.mds: sample 0 is damaged: buffer size .*; copy the shard again, or give the --dtype of its tokens"
    )
    with pytest.raises(DataError, match=message):
        read(tmp_path / "in")


def test_gzip_is_read_as_well(tmp_path):
    writers.write_mds(tmp_path / "in", SAMPLES)

    def change(index):
        for shard in index["shards"]:
            path = tmp_path / "in" / shard["raw_data"]["basename"]
            content = gzip.compress(path.read_bytes())
            path.with_name(path.name + ".gz").write_bytes(content)
            path.unlink()
            shard |= {"compression": "gz:9", "zip_data": writers.describe(path.name + ".gz", content)}

    change_index(tmp_path / "in", change)
    assert read(tmp_path / "in") == SAMPLES


def test_a_shard_that_was_decompressed_is_read_as_it_is(tmp_path):
    writers.write_mds(tmp_path / "raw", SAMPLES)
    writers.write_mds(tmp_path / "in", SAMPLES, compression="zstd")
    for path in (tmp_path / "in").glob("*.zstd"):
        path.unlink()
        path.with_suffix("").write_bytes((tmp_path / "raw" / path.stem).read_bytes())
    # Only the length of the configuration differs.
    with pytest.raises(DataError, match=r"00000\.mds: truncated or damaged: has \d+ bytes, its index says \d+"):
        read(tmp_path / "in")
    (tmp_path / "raw/index.json").rename(tmp_path / "in/index.json")
    assert read(tmp_path / "in") == SAMPLES


def test_indexes_at_any_depth_but_the_parts_of_a_merged_one_once(tmp_path):
    writers.write_mds(tmp_path / "in/b", SAMPLES[:2])
    writers.write_mds(tmp_path / "in/a", SAMPLES[2:])
    assert read(tmp_path / "in") == SAMPLES[2:] + SAMPLES[:2]
    assert read(tmp_path / "in/a/index.json") == SAMPLES[2:]
    shards = []
    for name in ("b", "a"):
        for shard in json.loads((tmp_path / "in" / name / "index.json").read_text())["shards"]:
            shard["raw_data"]["basename"] = f"{name}/{shard['raw_data']['basename']}"
            shards.append(shard)
    (tmp_path / "in/index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    assert read(tmp_path / "in") == SAMPLES


@pytest.mark.parametrize("hashes", [("sha1",), ("md5", "sha256"), ("xxh64", "sha1")])
def test_a_byte_that_flipped_is_found_by_the_hash(tmp_path, hashes):
    known = tuple(name for name in hashes if name != "xxh64")
    writers.write_mds(tmp_path / "in", SAMPLES, hashes=known)
    if "xxh64" in hashes:
        change_index(tmp_path / "in", lambda index: index["shards"][0]["raw_data"]["hashes"].update(xxh64="0"))
    flip(tmp_path / "in/shard.00000.mds", -1)
    with pytest.raises(DataError, match=r"00000\.mds: damaged: its (sha1|md5) is not what its index says; copy the"):
        read(tmp_path / "in")


def flip(path, byte):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("byte", "message"),
    [
        (0, r"has 2 samples, its index says 3"),
        (3, r"has 16777219 samples, its index says 3"),
        (4, r"sample 0 is damaged: its columns take up \d+ bytes, not \d+; copy the shard again, or give the --dtype"),
        (7, r"the offsets of its samples contradict its size"),
        (17, r"the offsets of its samples contradict its size"),
    ],
)
def test_offsets_that_are_damaged_are_refused(tmp_path, byte, message):
    writers.write_mds(tmp_path / "in", SAMPLES, hashes=())
    flip(tmp_path / "in/shard.00000.mds", byte)
    with pytest.raises(DataError, match=rf"00000\.mds: {message}"):
        read(tmp_path / "in")


@pytest.mark.parametrize(
    ("byte", "value", "message"),
    [
        (-7, 2, r"6 bytes are not uint16 of the shape \[2\]"),
        (-8, 5, r"5 bytes are not uint16 of the shape \[259\]"),
        (-9, 18, "dtype code 18 is not one of tokens"),
    ],
)
def test_a_shape_or_dtype_that_is_damaged_is_refused(tmp_path, byte, value, message):
    writers.write_mds(tmp_path / "in", [[1, 2, 3]], encoding="ndarray", dtype="uint16", hashes=())
    path = tmp_path / "in/shard.00000.mds"
    content = bytearray(path.read_bytes())
    content[byte] = value
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"00000\.mds: sample 0 is damaged: {message}"):
        read(tmp_path / "in")


def test_compressed_shards_that_are_damaged_are_refused(tmp_path):
    writers.write_mds(tmp_path / "in", SAMPLES[:3], compression="zstd")
    path = tmp_path / "in/shard.00000.mds.zstd"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(
        DataError, match=r"mds\.zstd: truncated or damaged: has \d+ bytes, its index says \d+; copy the"
    ):
        read(tmp_path / "in")
    path.write_bytes(b"\0" + whole[1:])
    with pytest.raises(DataError, match=r"mds\.zstd, byte 0 \(uncompressed\): truncated or damaged zstd"):
        read(tmp_path / "in")
    path.write_bytes(whole)
    change_index(tmp_path / "in", lambda index: index["shards"][0]["raw_data"].update(bytes=10))
    with pytest.raises(DataError, match=r"mds\.zstd: its index says 10 bytes uncompressed, it has 11 or more"):
        read(tmp_path / "in")


def test_a_missing_shard_is_named(tmp_path):
    writers.write_mds(tmp_path / "in", SAMPLES)
    (tmp_path / "in/shard.00001.mds").unlink()
    with pytest.raises(DataError, match=r"shard\.00001\.mds: cannot be read: No such file"):
        read(tmp_path / "in")


def set_shard(**values):
    return lambda index: index["shards"][0].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(version=3), "version 3 is not known; give version 2"),
        (lambda index: index.pop("shards"), "no index of MDS shards: KeyError 'shards'"),
        (set_shard(format="json"), "holds shards of 'json'; give shards of mds"),
        (set_shard(compression="br:11"), "compression 'br' is not read; write the shards again with zstd, gz or none"),
        (
            set_shard(column_names=["a", "b", "c"]),
            "there is no column 'tokens'; columns: a, b, c; write the shards again with",
        ),
        (set_shard(column_sizes=[1]), "its columns have no sizes"),
        (set_shard(column_encodings=["int", "str", "pkl"]), "column 'tokens' is of 'pkl', which is not one of tokens"),
        (
            set_shard(column_encodings=["int", "str", "ndarray:float32"]),
            "column 'tokens' is of 'ndarray:float32', which is not",
        ),
        (set_shard(raw_data={"basename": "../x", "bytes": 1, "hashes": {}}), "names a file outside its folder: '../x'"),
        (set_shard(raw_data=None), "no index of MDS shards: TypeError"),
    ],
)
def test_an_index_that_is_not_one_is_refused(tmp_path, change, message):
    writers.write_mds(tmp_path / "in", SAMPLES)
    change_index(tmp_path / "in", change)
    with pytest.raises(DataError, match=rf"in/index\.json: {message}"):
        read(tmp_path / "in")


def test_an_index_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(DataError, match=r"index\.json: no index of MDS shards: JSONDecodeError"):
        read(tmp_path)


def test_a_dtype_that_contradicts_the_source_is_refused(tmp_path):
    writers.write_mds(tmp_path / "in", SAMPLES, encoding="ndarray:uint16", dtype="uint16")
    with pytest.raises(DataError, match=r"index\.json: its index says uint16, not int64; leave out --dtype"):
        read(tmp_path / "in", dtype="int64")
    writers.write_mds(tmp_path / "any", SAMPLES, encoding="ndarray", dtype="uint16")
    with pytest.raises(DataError, match="sample 0 is damaged: dtype code 16 is not one of int64"):
        read(tmp_path / "any", dtype="int64")


def test_a_token_outside_the_vocabulary_is_named_with_its_sample(tmp_path):
    writers.write_mds(tmp_path / "in", [[1], [2, 300]])
    with pytest.raises(DataError, match=r"00000\.mds, sample 1: token 300 at position 1 is not below the vocabulary"):
        read(tmp_path / "in")
