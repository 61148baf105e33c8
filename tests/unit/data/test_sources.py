import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.data.sources import (
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    InputFile,
    list_inputs,
    list_stdlib,
    plan_part_bytes,
    plan_parts,
)
from pretrain.errors import DataError


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def listed(folder, *inputs):
    return [Path(file.path).relative_to(folder).as_posix() for file in list_inputs(inputs)]


def test_folder_is_read_recursively_sorted_without_hidden_or_unsupported_files(tmp_path):
    touch(tmp_path, "b.txt", "a/z.md", "a/y.py", "a.jsonl", "c.jsonl.gz", ".x.txt", ".git/x.txt", "d.csv", "e.gz")
    assert listed(tmp_path, str(tmp_path)) == ["a/y.py", "a/z.md", "a.jsonl", "b.txt", "c.jsonl.gz"]


def test_inputs_keep_their_order_and_a_file_named_twice_is_read_once(tmp_path):
    touch(tmp_path, "a.txt", "b.txt", "sub/c.txt")
    names = [str(tmp_path / "b.txt"), str(tmp_path), f"{tmp_path}/*.txt"]
    assert listed(tmp_path, *names) == ["b.txt", "a.txt", "sub/c.txt"]


def test_glob_matches_supported_files_and_folders(tmp_path):
    touch(tmp_path, "x1/a.txt", "x2.txt", "x3.csv", "y.txt")
    assert listed(tmp_path, f"{tmp_path}/x*") == ["x1/a.txt", "x2.txt"]
    assert listed(tmp_path, f"{tmp_path}/**/*.txt") == ["x1/a.txt", "x2.txt", "y.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path):
    touch(tmp_path, "a[1].txt")
    assert listed(tmp_path, f"{tmp_path}/a[1].txt") == ["a[1].txt"]


def test_linked_folders_are_followed_once(tmp_path):
    touch(tmp_path, "in/a.txt", "elsewhere/b.txt")
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    (tmp_path / "in/out").symlink_to(tmp_path / "elsewhere")
    assert listed(tmp_path, str(tmp_path / "in")) == ["in/a.txt", "in/out/b.txt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.txt", r"none\.txt: no such file or folder; correct the path"),
        ("*.txt", r"\*\.txt: nothing to read; give files of \.txt \.py \.md \.jsonl \.jsonl\.gz"),
        ("", r": nothing to read; give files of"),
        ("a.csv", r"a\.csv: unsupported file type; give one of \.txt"),
    ],
)
def test_input_that_names_nothing_readable_is_refused(tmp_path, name, message):
    touch(tmp_path, "a.csv")
    with pytest.raises(DataError, match=message):
        list_inputs([str(tmp_path / name)])


def test_dangling_link_is_named(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"a\.txt: cannot be read: No such file"):
        list_inputs([str(tmp_path)])


def test_default_corpus_is_the_standard_library_without_installed_packages():
    files = list_stdlib()
    root = Path(sysconfig.get_path("stdlib"))
    names = [Path(file.path).relative_to(root).parts for file in files]
    assert ("os.py",) in names and ("json", "decoder.py") in names
    assert names == sorted(names)
    assert not any("site-packages" in parts or "__pycache__" in parts for parts in names)


def test_part_size_is_a_64th_within_bounds():
    sizes = [10, MIN_PART_BYTES * 640, MAX_PART_BYTES * 6400]
    expected = [MIN_PART_BYTES, MIN_PART_BYTES * 10, MAX_PART_BYTES]
    assert [plan_part_bytes([InputFile("a.txt", size, 0)]) for size in sizes] == expected


@given(st.lists(st.tuples(st.sampled_from(["a.txt", "b.jsonl", "c.jsonl.gz"]), st.integers(0, 50))), st.integers(1, 20))
def test_parts_cover_every_byte_once_in_order(rows, part_bytes):
    files = [InputFile(f"{number}{name}", size, 0) for number, (name, size) in enumerate(rows)]
    parts = plan_parts(files, part_bytes)
    assert [part.number for part in parts] == list(range(len(parts)))
    covered = [(piece.file, byte) for part in parts for piece in part.slices for byte in range(piece.start, piece.stop)]
    assert covered == [(file, byte) for file in files for byte in range(file.size)]
    for part in parts:
        assert part.num_bytes - part.slices[-1].num_bytes < part_bytes
        assert all(piece.file.path.endswith(".jsonl") or piece.num_bytes == piece.file.size for piece in part.slices)
