"""Durable writes: whatever fails, or whenever the process dies, a reader sees the old state or the new one."""

import errno
import fcntl
import json
import multiprocessing
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.errors import DiskError
from pretrain.utils import io
from tests.helpers.waiting import LIMIT_S

OLD, NEW = b"old content\n", b"new content, which is longer\n"


@pytest.fixture(autouse=True)
def _no_hook_left_behind():
    yield
    io.set_fault_hook(None)


def record_operations(action) -> list[str]:
    """Returns the names of the operations that `action` consists of."""
    seen: list[str] = []
    io.set_fault_hook(lambda operation, _: seen.append(operation))
    action()
    io.set_fault_hook(None)
    return seen


def fail_at(number: int) -> None:
    """Makes the operation of this number (from 0) fail as on a full disk."""
    count = iter(range(1_000_000))

    def hook(operation: str, path: Path) -> None:
        if next(count) == number:
            raise OSError(28, "No space left on device")

    io.set_fault_hook(hook)


def die_at(number: int, action) -> None:
    """Runs `action` in a child that is gone, without any clean-up, before the operation of this number."""

    def child() -> None:
        count = iter(range(1_000_000))
        io.set_fault_hook(lambda operation, path: os._exit(9) if next(count) == number else None)
        action()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 9


def atomic_writes(path: Path) -> dict[str, object]:
    """The ways to replace a file, each with the same content."""

    def by_writer() -> None:
        writer = io.AtomicWriter(path)
        writer.write(NEW[:5])
        writer.write(NEW[5:])
        writer.commit()

    return {"write_file": lambda: io.write_file(path, NEW), "AtomicWriter": by_writer}


@pytest.mark.parametrize("way", ["write_file", "AtomicWriter"])
@pytest.mark.parametrize("existed", [False, True])
def test_any_single_failure_is_a_disk_error_that_keeps_a_whole_file_and_no_rubbish(tmp_path, way, existed):
    path = tmp_path / "file"
    action = atomic_writes(path)[way]
    operations = record_operations(action)
    assert operations.index("fsync") < operations.index("rename") < operations.index("fsync_dir")
    for number, operation in enumerate(operations):
        path.unlink(missing_ok=True)
        if existed:
            path.write_bytes(OLD)
        fail_at(number)
        with pytest.raises(DiskError, match=r"cannot write: No space left on device; free space$"):
            action()
        io.set_fault_hook(None)
        # The folder's fsync comes after the rename: by then the new file is there.
        expected = NEW if operation == "fsync_dir" else (OLD if existed else None)
        assert (path.read_bytes() if path.exists() else None) == expected, operation
        assert [entry for entry in tmp_path.iterdir() if entry != path] == []


@pytest.mark.parametrize("way", ["write_file", "AtomicWriter"])
def test_a_process_that_dies_before_any_operation_leaves_a_whole_file(tmp_path, way):
    path = tmp_path / "file"
    action = atomic_writes(path)[way]
    for number, operation in enumerate(record_operations(action)):
        path.write_bytes(OLD)
        die_at(number, action)
        assert path.read_bytes() == (NEW if operation == "fsync_dir" else OLD), operation


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    """As `--output /dev/null` by root, where a rename would leave a file for every program of the machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert io.write_file(pipe, b"text").num_bytes == 4
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_record_describes_the_file(tmp_path):
    record = io.write_file(tmp_path / "file", NEW)
    assert record == io.FileRecord("file", len(NEW), [zlib.crc32(NEW)])
    assert io.check_file(tmp_path / "file", record) is None


def test_an_empty_file_has_no_chunks(tmp_path):
    assert io.write_file(tmp_path / "file", b"") == io.FileRecord("file", 0, [])


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 16))
def test_chunks_are_concatenated_and_crcs_do_not_depend_on_how_they_are_cut(tmp_path_factory, pieces, chunk_bytes):
    path = tmp_path_factory.mktemp("chunks") / "file"
    content = b"".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "CRC_CHUNK_BYTES", chunk_bytes)
        record = io.write_chunks(path, [memoryview(piece) for piece in pieces])
        starts = range(0, len(content), chunk_bytes)
        assert record.crc32s == [zlib.crc32(content[start : start + chunk_bytes]) for start in starts]
        assert path.read_bytes() == content
        assert io.check_file(path, record) is None


def test_chunks_of_other_types_are_written_as_their_bytes(tmp_path):
    values = memoryview(b"\x01\x00\x02\x00").cast("H")
    assert io.write_chunks(tmp_path / "file", [values]).num_bytes == 4
    assert (tmp_path / "file").read_bytes() == b"\x01\x00\x02\x00"


@given(st.binary(min_size=1, max_size=60), st.data())
def test_any_flipped_bit_is_found_and_its_chunk_named(tmp_path_factory, content, data):
    path = tmp_path_factory.mktemp("flip") / "file"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "CRC_CHUNK_BYTES", 8)
        record = io.write_file(path, content)
        place = data.draw(st.integers(0, len(content) - 1))
        damaged = bytearray(content)
        damaged[place] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(damaged)
        chunk = place // 8
        assert io.check_file(path, record) == f"file: CRC32 of chunk {chunk} (at byte {chunk * 8}) does not match"


def test_every_bad_chunk_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "CRC_CHUNK_BYTES", 8)
    record = io.write_file(tmp_path / "file", bytes(40))
    content = bytearray(40)
    content[9] = content[39] = 1
    (tmp_path / "file").write_bytes(content)
    expected = [f"file: CRC32 of chunk {n} (at byte {8 * n}) does not match" for n in (1, 4)]
    assert list(io.find_damage(tmp_path / "file", record)) == expected


def test_a_record_without_a_crc_for_every_chunk_vouches_for_nothing(tmp_path):
    record = io.write_file(tmp_path / "file", NEW)
    short = io.FileRecord(record.name, record.num_bytes, [])
    problem = f"file: the manifest has 0 CRC32s for {len(NEW)} bytes"
    assert io.check_file(tmp_path / "file", short) == problem


def test_a_truncated_and_a_missing_file_are_told_apart(tmp_path):
    record = io.write_file(tmp_path / "file", NEW)
    (tmp_path / "file").write_bytes(NEW[:-1])
    assert io.check_file(tmp_path / "file", record) == f"file has {len(NEW) - 1} bytes, the manifest says {len(NEW)}"
    (tmp_path / "file").unlink()
    assert io.check_file(tmp_path / "file", record) == "file: No such file or directory"


@pytest.mark.parametrize(("times", "problem"), [(1, None), (2, None), (3, "file: Input/output error")])
def test_a_file_that_cannot_be_read_for_a_moment_is_no_damaged_one(tmp_path, monkeypatch, times, problem):
    record, real, tries = io.write_file(tmp_path / "file", NEW), Path.open, []

    def refuse(path: Path, *arguments: str):
        tries.append(path)
        if len(tries) <= times:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *arguments)

    monkeypatch.setattr(io, "READ_AGAIN_S", (0.0, 0.0))
    monkeypatch.setattr(Path, "open", refuse)
    assert io.check_file(tmp_path / "file", record) == problem


def test_a_folder_below_one_that_may_not_be_entered_is_an_error_of_the_disk(tmp_path, monkeypatch):
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(DiskError, match="cannot create the folder: Permission denied"):
        io.make_dir(tmp_path / "new")


def test_json_is_sorted_indented_and_ends_with_a_newline(tmp_path):
    io.write_json(tmp_path / "file", {"b": 1, "a": [2]})
    text = (tmp_path / "file").read_text()
    assert text == '{\n  "a": [\n    2\n  ],\n  "b": 1\n}\n'
    assert json.loads(text) == {"a": [2], "b": 1}


def test_a_folder_is_published_whole_or_not_at_all(tmp_path):
    temporary, final = tmp_path / ".tmp-step", tmp_path / "step"
    temporary.mkdir()
    (temporary / "weights").write_bytes(NEW)
    fail_at(1)
    with pytest.raises(DiskError, match="step: cannot commit: No space left on device"):
        io.publish_dir(temporary, final)
    assert (temporary / "weights").exists()
    assert not final.exists()
    io.set_fault_hook(None)
    assert record_operations(lambda: io.publish_dir(temporary, final)) == ["fsync_dir", "rename", "fsync_dir"]
    assert (final / "weights").read_bytes() == NEW
    assert not temporary.exists()


def test_publishing_never_replaces_what_is_there(tmp_path):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    with pytest.raises(DiskError, match="cannot commit: Directory not empty"):
        io.publish_dir(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "weights").read_text() == "old"
    assert (tmp_path / "new" / "weights").read_text() == "new"


def test_a_removal_that_is_cut_short_leaves_no_half_of_a_folder_under_its_name(tmp_path):
    folder = tmp_path / "step"
    make_tree(folder)
    operations = record_operations(lambda: io.remove_dir(folder))
    assert operations == ["rename", "fsync_dir", "unlink", "rmdir", "unlink", "unlink", "rmdir"]
    for number in range(len(operations)):
        make_tree(folder)
        die_at(number, lambda: io.remove_dir(folder))
        assert folder.exists() == (number == 0)
        if folder.exists():
            assert len(list(folder.rglob("*"))) == 4
        else:
            make_tree(folder)
        io.remove_dir(folder)  # what the dead one has left is no obstacle
        assert list(tmp_path.iterdir()) == []


def make_tree(path: Path) -> None:
    """A folder with a folder in it, two files, and a link to what is not to be touched."""
    if not path.exists():
        (path / "below").mkdir(parents=True)
        (path / "below" / "file").write_bytes(OLD)
        (path / "weights").write_bytes(NEW)
        (path / "link").symlink_to(Path.cwd())


def test_removing_a_folder_removes_links_and_not_what_they_lead_to(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_bytes(OLD)
    folder = tmp_path / "leftover"
    folder.mkdir()
    (folder / "link").symlink_to(kept)
    (folder / "dangling").symlink_to(tmp_path / "absent")
    io.remove_tree(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept / "file").read_bytes() == OLD


def test_a_folder_that_cannot_be_removed_is_a_disk_error(tmp_path):
    make_tree(tmp_path / "leftover")
    fail_at(2)
    with pytest.raises(DiskError, match=r"leftover: cannot remove: No space left on device"):
        io.remove_tree(tmp_path / "leftover")


def test_a_folder_never_takes_the_name_of_another(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(DiskError, match="one: cannot rename: Directory not empty"):
        io.rename_dir(tmp_path / "one", tmp_path / "other")
    assert record_operations(lambda: io.rename_dir(tmp_path / "one", tmp_path / "two")) == ["rename", "fsync_dir"]
    assert (tmp_path / "two" / "file").read_text() == "one"


def test_a_new_folder_and_its_parents_are_durable_or_an_error_says_so(tmp_path):
    assert record_operations(lambda: io.make_dir(tmp_path / "a" / "b")) == ["mkdir", "fsync_dir", "fsync_dir"]
    assert record_operations(lambda: io.make_dir(tmp_path / "a" / "b")) == ["mkdir"]
    for number in range(3):
        fail_at(number)
        with pytest.raises(DiskError, match="cannot create the folder: No space left on device"):
            io.make_dir(tmp_path / str(number) / "d")


def test_folders_that_cannot_be_made_are_a_disk_error(tmp_path):
    (tmp_path / "file").write_bytes(OLD)
    with pytest.raises(DiskError, match=r"file/below: cannot create the folder: Not a directory; check the path"):
        io.make_dir(tmp_path / "file" / "below")
    assert io.make_dir(tmp_path / "a" / "b").is_dir()


def test_a_file_discarded_half_way_leaves_nothing(tmp_path):
    writer = io.AtomicWriter(tmp_path / "file")
    writer.write(NEW)
    writer.discard()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_file_left_by_a_dead_process_of_the_same_pid_is_no_obstacle(tmp_path):
    (tmp_path / f"file.tmp-{os.getpid()}").write_bytes(OLD)
    io.write_file(tmp_path / "file", NEW)
    assert (tmp_path / "file").read_bytes() == NEW


def test_chunks_are_not_written_over_a_file_and_it_survives(tmp_path):
    (tmp_path / "file").write_bytes(OLD)
    with pytest.raises(DiskError, match="cannot write: File exists"):
        io.write_chunks(tmp_path / "file", [memoryview(NEW)])
    assert (tmp_path / "file").read_bytes() == OLD


def test_a_folder_whose_name_was_removed_before_by_a_process_that_died_can_be_removed(tmp_path):
    for name in (".trash-step", "step"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(OLD)
    io.remove_dir(tmp_path / "step")
    assert list(tmp_path.iterdir()) == []


def append_many(path: Path, name: str) -> None:
    for number in range(20):
        io.append_line(path, json.dumps({"who": name, "number": number, "fill": name * 20_000}).encode())


def test_lines_of_several_at_once_are_whole_and_all_there(tmp_path):
    path = tmp_path / "lines"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_many, args=(path, name)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    for name in "abcd":
        assert [row["number"] for row in rows if row["who"] == name] == list(range(20))


def test_a_torn_line_takes_no_other_with_it(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b'{"whole":1}\n{"torn":')
    io.append_line(path, b'{"next":2}')
    assert path.read_bytes() == b'{"whole":1}\n{"torn":\n{"next":2}\n'


def test_a_line_that_the_disk_takes_a_part_of_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    path.write_bytes(b'{"whole":1}\n')
    write = os.write
    monkeypatch.setattr(io.os, "write", lambda descriptor, content: write(descriptor, content[:5]))
    with pytest.raises(DiskError, match=f"{path}: cannot append: No space left on device"):
        io.append_line(path, b'{"next":2}')
    assert path.read_bytes() == b'{"whole":1}\n'


def test_an_append_that_the_disk_refuses_at_any_operation_is_an_error(tmp_path):
    operations = record_operations(lambda: io.append_line(tmp_path / "first", b"1"))
    assert operations == ["append", "fsync", "fsync_dir"]
    for number in range(len(operations)):
        fail_at(number)
        with pytest.raises(DiskError, match="cannot append: No space left on device"):
            io.append_line(tmp_path / str(number), b"1")


def test_a_lock_that_somebody_keeps_is_not_waited_for_forever(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    monkeypatch.setattr(io, "LOCK_WAIT_S", 0.1)
    with path.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        io.append_line(path, b"{}")
    assert path.read_bytes() == b"{}\n"


def test_where_there_are_no_locks_none_is_waited_for(tmp_path, monkeypatch):
    tries = []

    def refuse(descriptor: int, operation: int) -> None:
        tries.append(operation)
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    io.append_line(tmp_path / "lines", b"{}")
    assert (tmp_path / "lines").read_bytes() == b"{}\n"
    assert len(tries) == 1


def test_a_file_is_cut_in_place_and_synced(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(b"0123456")
    assert record_operations(lambda: io.cut_file(path, 3)) == ["truncate", "fsync"]
    assert path.read_bytes() == b"012"


def test_a_file_that_is_written_over_has_the_new_bytes_alone(tmp_path):
    path = tmp_path / "copy"
    first = io.write_chunks(path, [memoryview(b"x" * 100)])
    number = path.stat().st_ino
    second = io.write_chunks(path, [memoryview(b"ab"), memoryview(b"c")], over=True)
    assert path.read_bytes() == b"abc" and path.stat().st_ino == number
    assert (first.num_bytes, second.num_bytes) == (100, 3)
    with pytest.raises(DiskError):
        io.write_chunks(path, [memoryview(b"d")])
    assert path.read_bytes() == b"abc"
