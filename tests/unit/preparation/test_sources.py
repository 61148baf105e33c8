import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.preparation.input_parts import (
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    InputFile,
    Slice,
    plan_part_bytes,
    plan_parts,
)


def test_part_size_is_a_64th_within_bounds():
    sizes = [10, MIN_PART_BYTES * 640, MAX_PART_BYTES * 6400]
    expected = [MIN_PART_BYTES, MIN_PART_BYTES * 10, MAX_PART_BYTES]
    assert [plan_part_bytes([InputFile("a.txt", size, "0")]) for size in sizes] == expected


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50))), st.integers(1, 20))
def test_parts_cover_every_byte_once_in_order(rows, part_bytes):
    files = [InputFile(str(number), size, "0", is_cuttable=cuttable) for number, (cuttable, size) in enumerate(rows)]
    parts = plan_parts(files, part_bytes)
    assert [part.number for part in parts] == list(range(len(parts)))
    covered = [(piece.file, byte) for part in parts for piece in part.slices for byte in range(piece.start, piece.stop)]
    assert covered == [(file, byte) for file in files for byte in range(file.size)]
    for part in parts:
        assert part.num_bytes - part.slices[-1].num_bytes < part_bytes
        assert all(piece.file.is_cuttable or piece.num_bytes == piece.file.size for piece in part.slices)


def test_a_pair_counts_with_the_bytes_of_both_files():
    file = InputFile("a.en", 30, "0", format="paired", pair=InputFile("a.de", 40, "0"))
    assert plan_part_bytes([file, InputFile("b", MIN_PART_BYTES * 64, "0")]) == MIN_PART_BYTES + 70 // 64
    (part,) = plan_parts([file], 1)
    assert (part.num_bytes, part.slices) == (70, (Slice(file, 0, 30),))


@pytest.mark.parametrize(
    ("path", "shown", "is_remote"),
    [
        ("a/b.txt", "a/b.txt", False),
        ("s3://bucket/a?b", "s3://bucket/a?b", True),
        ("https://user:secret@host:1/a.txt?X-Signature=secret#part", "https://host:1/a.txt", True),
    ],
)
def test_what_may_be_secret_in_a_url_is_not_shown(path, shown, is_remote):
    file = InputFile(path, 0, "0")
    assert (file.shown, file.is_remote) == (shown, is_remote)
