import pytest

from pretrain.errors import DataError
from pretrain.preparation.convert.megatron import open_megatron
from pretrain.preparation.convert.token_file import ReadOptions
from tests.unit.preparation.convert import writers
from tests.unit.preparation.convert.writers import EOS_ID, VOCAB_SIZE

DOCUMENTS = [[[5, 6], [EOS_ID]], [[7, EOS_ID]], [[299, 8, EOS_ID]]]
JOINED = [[5, 6, 0], [7, 0], [299, 8, 0]]

# What IndexedDatasetBuilder of megatron-core 0.16.1 writes of DOCUMENTS.
REAL_BIN = "050006000000070000002b0108000000"
REAL_IDX = (
    "4d4d4944494458000001000000000000000804000000000000000400000000000000"
    "02000000010000000200000003000000"
    "0000000000000000040000000000000006000000000000000a00000000000000"
    "0000000000000000020000000000000003000000000000000400000000000000"
)


def options(**changes):
    return ReadOptions(VOCAB_SIZE, EOS_ID, **changes)


def read(opened):
    return [document.tolist() for document in opened.documents(0, opened.file.size)]


@pytest.fixture
def pair(tmp_path):
    writers.write_megatron(tmp_path / "a", DOCUMENTS)
    return tmp_path / "a.idx"


def test_what_the_real_writer_wrote(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes.fromhex(REAL_BIN))
    (tmp_path / "a.idx").write_bytes(bytes.fromhex(REAL_IDX))
    [opened] = open_megatron([str(tmp_path / "a")], options())
    assert read(opened) == JOINED
    assert [file.path for file in opened.companions] == [str(tmp_path / "a.idx")]


@pytest.mark.parametrize("name", ["a", "a.bin", "a.idx", "", "*.bin", "*.idx"])
def test_a_pair_is_named_in_any_way(tmp_path, pair, name):
    [opened] = open_megatron([str(tmp_path / name)], options())
    assert (opened.file.path, read(opened)) == (str(tmp_path / "a.bin"), JOINED)


def test_checks_go_on_past_the_first_piece_of_the_index(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.preparation.convert.megatron.CHECK_SEQUENCES", 2)
    writers.write_megatron(tmp_path / "a", DOCUMENTS)
    assert read(open_megatron([str(tmp_path / "a")], options())[0]) == JOINED
    damage(tmp_path / "a.idx", 34 + 4 * 3, 4)
    with pytest.raises(DataError, match=r"a\.bin: truncated, or of another dataset: has 16 bytes, its index says 18;"):
        open_megatron([str(tmp_path / "a")], options())


def damage(path, byte, value):
    content = bytearray(path.read_bytes())
    content[byte] = value
    path.write_bytes(content)


LENGTHS, POINTERS, STARTS = 34, 34 + 4 * 4, 34 + 12 * 4


@pytest.mark.parametrize(
    ("byte", "value", "message"),
    [
        (0, 0, r"a\.idx: wrong magic b'\\x00MIDIDX\\x00\\x00': no index of Megatron; give files of its mmap kind"),
        (9, 2, r"a\.idx: version 2 is not known"),
        (17, 9, r"a\.idx: dtype code 9 \(unknown\) is not one of tokens"),
        (17, 7, r"a\.idx: dtype code 7 \(float32\) is not one of tokens"),
        (18, 3, r"a\.idx: has 114 bytes, but 3 sequences and 4 document entries are 102; copy NAME\.bin and"),
        (LENGTHS + 15, 255, r"a\.idx: sequence 3 has the length -16777213"),
        (LENGTHS, 3, r"a\.idx: sequence 1 is at byte 4, not where the one before it ends"),
        (POINTERS + 8, 5, r"a\.idx: sequence 1 is at byte 5, not where the one before it ends"),
        (STARTS, 1, r"a\.idx: its 4 document entries do not go from 0 to the 4 sequences"),
        (STARTS + 24, 3, r"a\.idx: its 4 document entries do not go from 0 to the 4 sequences"),
        (STARTS + 8, 4, r"a\.idx: document 2 begins before the one before it"),
    ],
)
def test_an_index_that_is_damaged_is_refused(pair, byte, value, message):
    damage(pair, byte, value)
    with pytest.raises(DataError, match=message):
        open_megatron([str(pair)], options())


@pytest.mark.parametrize("size", [0, 8, 20, 33])
def test_an_index_that_ends_in_its_header_is_refused(pair, size):
    pair.write_bytes(pair.read_bytes()[:size])
    with pytest.raises(DataError, match=r"a\.idx: (wrong magic|truncated: its header has \d+ of 34 bytes)"):
        open_megatron([str(pair)], options())


@pytest.mark.parametrize("size", [0, 14, 15])
def test_a_bin_that_is_truncated_is_refused(pair, size):
    path = pair.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:size])
    message = rf"a\.bin: truncated, or of another dataset: has {size} bytes, its index says 16; copy NAME\.bin and"
    with pytest.raises(DataError, match=message):
        open_megatron([str(pair)], options())


def test_a_bin_of_another_dataset_is_refused(pair):
    pair.with_suffix(".bin").write_bytes(bytes(18))
    with pytest.raises(DataError, match=r"a\.bin: of another dataset: has 18 bytes, its index says 16"):
        open_megatron([str(pair)], options())


def test_a_bin_that_is_missing_is_refused(pair):
    pair.with_suffix(".bin").unlink()
    with pytest.raises(DataError, match=r"a\.idx: there is no a\.bin in its folder"):
        open_megatron([str(pair)], options())


def test_modes_of_sequences_are_refused(pair):
    pair.write_bytes(pair.read_bytes() + bytes(4))
    with pytest.raises(DataError, match=r"a\.idx: has a mode of every sequence: multimodal"):
        open_megatron([str(pair)], options())


def test_a_token_outside_the_vocabulary_is_refused(pair):
    [opened] = open_megatron([str(pair)], ReadOptions(299, EOS_ID))
    message = r"a\.bin: token 299 at position 5 is not below the vocabulary size, 299; give the --tokenizer that made"
    with pytest.raises(DataError, match=message):
        list(opened.tokens())


def test_a_negative_token_is_refused(tmp_path):
    writers.write_megatron(tmp_path / "a", [[[3, -1, 2]]], "int32")
    [opened] = open_megatron([str(tmp_path / "a")], options())
    with pytest.raises(DataError, match="token -1 at position 1 is not below the vocabulary size, 300"):
        read(opened)


def test_a_dtype_that_contradicts_the_index_is_refused(pair):
    with pytest.raises(DataError, match=r"a\.idx: its header says uint16, not int32; leave out --dtype"):
        open_megatron([str(pair)], options(dtype="int32"))
