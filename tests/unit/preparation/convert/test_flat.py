"""nanoGPT, llm.c and OLMo: arrays with a header or none."""

import numpy as np
import pytest

from pretrain.errors import ConfigError, DataError
from pretrain.preparation.convert.flat import open_nanogpt, open_olmo
from pretrain.preparation.convert.token_file import ReadOptions
from tests.unit.preparation.convert import writers
from tests.unit.preparation.convert.writers import EOS_ID, VOCAB_SIZE

TOKENS = [5, 6, EOS_ID, 7, EOS_ID, 299]


def options(vocab_size=VOCAB_SIZE, **changes):
    return ReadOptions(vocab_size, EOS_ID, **changes)


def read(opened):
    return [document.tolist() for document in opened.documents(0, opened.file.size)]


def test_nanogpt_has_no_header(tmp_path):
    writers.write_flat(tmp_path / "train.bin", TOKENS)
    [opened] = open_nanogpt([str(tmp_path)], options())
    assert read(opened) == [[5, 6, 0], [7, 0], [299]]


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")])
def test_llmc_says_its_dtype_in_a_header(tmp_path, magic, version, dtype):
    writers.write_llmc(tmp_path / "a.bin", TOKENS, magic, version, dtype)
    [opened] = open_nanogpt([str(tmp_path)], options())
    assert read(opened) == [[5, 6], [0, 7], [0, 299]]


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_olmo_may_have_the_header_of_numpy(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.array(TOKENS, dtype))
    [opened] = open_olmo([str(tmp_path / "a.npy")], options())
    assert opened.dtype == dtype
    assert read(opened) == [[5, 6, 0], [7, 0], [299]]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(VOCAB_SIZE, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_olmo_without_header_is_as_wide_as_the_vocabulary_asks_for(tmp_path, vocab_size, dtype):
    writers.write_flat(tmp_path / "a.npy", TOKENS, dtype)
    [opened] = open_olmo([str(tmp_path)], options(vocab_size))
    assert (opened.dtype, opened.options.shard_dtype) == (dtype, dtype)
    assert read(opened) == [[5, 6, 0], [7, 0], [299]]


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 65536])
@pytest.mark.parametrize(("open_files", "name"), [(open_nanogpt, "a.bin"), (open_olmo, "a.npy")])
def test_32_bits_are_not_taken_for_16(tmp_path, open_files, name, vocab_size):
    writers.write_flat(tmp_path / name, [*range(1, 100), EOS_ID], "uint32")
    message = r": its tokens look 32 bits wide: the upper half of every one is empty; give --dtype uint32, or"
    with pytest.raises(DataError, match=message):
        open_files([str(tmp_path)], options(vocab_size))
    [opened] = open_files([str(tmp_path)], options(vocab_size, dtype="uint32"))
    assert read(opened) == [[*range(1, 100), EOS_ID]]
    [opened] = open_files([str(tmp_path)], options(vocab_size, dtype="uint16"))
    assert opened.num_tokens == 200


def test_32_bits_of_a_large_vocabulary_are_not_taken_for_16(tmp_path):
    writers.write_flat(tmp_path / "a.bin", [*range(65500, 65600), EOS_ID], "uint32")
    with pytest.raises(DataError, match="its tokens look 32 bits wide"):
        open_nanogpt([str(tmp_path)], options(100_000))


@pytest.mark.parametrize(("open_files", "name"), [(open_nanogpt, "a.bin"), (open_olmo, "a.npy")])
def test_half_a_token_is_refused(tmp_path, open_files, name):
    (tmp_path / name).write_bytes(bytes(7))
    message = r"truncated, or not of uint16: its 7 bytes of tokens are no whole number of them; copy the file again, or"
    with pytest.raises(DataError, match=message):
        open_files([str(tmp_path)], options())


def test_a_header_that_contradicts_the_file_is_refused(tmp_path):
    path = tmp_path / "a.bin"
    writers.write_llmc(path, TOKENS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=r"a\.bin: has 1034 bytes, but 6 tokens as its header says are 1036; copy the"):
        open_nanogpt([str(path)], options())
    path.write_bytes(whole[:100])
    with pytest.raises(DataError, match=r"a\.bin: truncated: its header has 100 of 1024 bytes"):
        open_nanogpt([str(path)], options())
    writers.write_llmc(path, TOKENS, version=2)
    with pytest.raises(
        DataError, match="version 2 of magic 20240520 is not known; give one of version 1 of magic 2024"
    ):
        open_nanogpt([str(path)], options())
    writers.write_llmc(path, TOKENS, magic=20240522)
    with pytest.raises(DataError, match="holds questions of an evaluation, not text; leave the file out"):
        open_nanogpt([str(path)], options())
    writers.write_llmc(path, TOKENS)
    with pytest.raises(DataError, match="its header says uint16, not uint32; leave out --dtype"):
        open_nanogpt([str(path)], options(dtype="uint32"))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3), np.uint16), r"its array has the shape \(2, 3\); give arrays with one axis"),
        (
            np.zeros(3, np.float32),
            "its array is of <f4, which is not one of tokens; give little-endian arrays of uint8",
        ),
        (np.zeros(3, ">u2"), "its array is of >u2, which is not one of tokens"),
    ],
)
def test_arrays_that_are_not_tokens_are_refused(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=message):
        open_olmo([str(tmp_path)], options())


def test_npy_files_that_are_damaged_are_refused(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.array(TOKENS, np.uint16))
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=r"a\.npy: has 138 bytes, but 6 tokens as its header says are 140; copy the"):
        open_olmo([str(path)], options())
    for damaged in (whole[:50], whole[:6] + b"\x09" + whole[7:], whole.replace(b"descr", b"xxxxx")):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.npy: its header cannot be read: .*; copy it again"):
            open_olmo([str(path)], options())
    path.write_bytes(whole)
    with pytest.raises(DataError, match="its header says uint16, not int64; leave out --dtype"):
        open_olmo([str(path)], options(dtype="int64"))


def test_an_object_array_is_refused_unread(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], object))
    with pytest.raises(DataError, match=r"its array is of \|O, which is not one of tokens"):
        open_olmo([str(tmp_path)], options())


def test_a_token_outside_the_vocabulary_is_named_with_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.preparation.convert.token_file.CHUNK_TOKENS", 2)
    writers.write_flat(tmp_path / "a.bin", [1, 2, 3, 300, 4])
    [opened] = open_nanogpt([str(tmp_path)], options(dtype="uint16"))
    message = r"a\.bin: token 300 at position 3 is not below the vocabulary size, 300; give the --tokenizer that made"
    with pytest.raises(DataError, match=message):
        read(opened)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    writers.write_flat(tmp_path / "a.bin", TOKENS)
    [opened] = open_nanogpt([str(tmp_path)], options())
    writers.write_flat(tmp_path / "a.bin", TOKENS[:3])
    with pytest.raises(DataError, match=r"a\.bin: truncated while it was read; copy the file again"):
        read(opened)


def test_a_dtype_that_is_not_one_of_tokens_is_refused():
    with pytest.raises(ConfigError, match="dtype='float32' is not one of tokens; use one of uint8, uint16,"):
        options(dtype="float32")


def test_files_are_found_in_folders_and_globs_in_order(tmp_path):
    for name in ("b/2.bin", "b/1.bin", "a/3.bin", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        writers.write_flat(tmp_path / name, TOKENS)

    def names(*sources):
        paths = [opened.file.path for opened in open_nanogpt([str(tmp_path / source) for source in sources], options())]
        return [path.removeprefix(f"{tmp_path}/") for path in paths]

    assert names("") == ["a/3.bin", "b/1.bin", "b/2.bin"]
    assert names("b", "a/3.bin", "a") == ["b/1.bin", "b/2.bin", "a/3.bin"]
    assert names("*/*") == names("*") == ["a/3.bin", "b/1.bin", "b/2.bin"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "nowhere: no such file or folder; correct the path"),
        ("no*where", r"no\*where: holds no \*\.bin; correct the path"),
        ("empty", r"empty: holds no \*\.bin"),
        ("notes.txt", r"notes\.txt: not a \*\.bin; give files that end in \.bin, or their folder"),
    ],
)
def test_sources_that_name_nothing_are_refused(tmp_path, source, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=message):
        open_nanogpt([str(tmp_path / source)], options())


def test_urls_are_refused():
    with pytest.raises(DataError, match=r"^https://host/a\.bin: token data are read from local files only; copy them"):
        open_nanogpt(["https://user:secret@host/a.bin"], options())
