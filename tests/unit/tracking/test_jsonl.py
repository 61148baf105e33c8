"""Appending, tearing and rewinding rows."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.errors import DataError, DiskError
from pretrain.utils import io, jsonl
from pretrain.utils.jsonl import JsonLines, newest_rows, read_rows, rows_with
from tests.helpers.waiting import LIMIT_S, finish


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, steps) -> JsonLines:
    lines = JsonLines(path)
    for step in steps:
        lines.append({"step": step, "loss": step / 7})
    return lines


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def test_rows_are_one_json_object_a_line_with_step_first_and_readable_at_once(path):
    lines = write(path, [1, 2])
    assert path.read_text() == f'{{"step":1,"loss":{1 / 7}}}\n{{"step":2,"loss":{2 / 7}}}\n'
    lines.close()


def test_a_file_that_does_not_exist_has_no_rows(path):
    assert read_rows(path) == []
    assert JsonLines(path).last_step() is None


def test_reopening_appends(path):
    write(path, [1]).close()
    write(path, [2]).close()
    assert steps_of(path) == [1, 2]


@given(st.lists(st.integers(0, 30), max_size=20).map(sorted), st.integers(-1, 31), st.integers(0, 40))
def test_after_a_rewind_exactly_the_rows_up_to_the_step_are_left(tmp_path_factory, steps, cut, torn):
    path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    write(path, steps).close()
    with path.open("ab") as file:
        file.write(b'{"step":99,"loss":1.0,"more":"......"}'[:torn])
    lines = JsonLines(path)
    lines.rewind(cut)
    expected = [step for step in steps if step <= cut]
    assert lines.last_step() == (expected[-1] if expected else None)
    lines.append({"step": 99})
    lines.close()
    assert steps_of(path) == [*expected, 99]


@pytest.fixture
def long_file(path) -> list[bytes]:
    """Rows of 4,000 steps, two a step, in 10 times what a search reads at once; returns the lines."""
    lines = [b'{"step":%d,"loss":%d,"of":"%s"}\n' % (n // 2, n, b"-" * 60) for n in range(8000)]
    path.write_bytes(b"".join(lines))
    return lines


@pytest.mark.parametrize("cut", [-1, 0, 1, 1999, 2000, 3998, 3999, 4000])
def test_a_rewind_parses_a_few_rows_of_a_long_file(path, long_file, cut, monkeypatch):
    parsed = []
    monkeypatch.setattr(jsonl, "parse_json", lambda text: parsed.append(text) or json.loads(text))
    lines = JsonLines(path)
    lines.rewind(cut)
    assert path.read_bytes() == b"".join(long_file[: 2 * cut + 2])
    assert len(parsed) < 900, "rows of a block, and one a halving"
    assert lines.last_step() == (None if cut < 0 else min(cut, 3999))


@pytest.mark.parametrize("cut", [1999, 2000, 3998])
@pytest.mark.parametrize("damage", [b"not json\n", b"\0" * 300_000 + b"\n"])
def test_damage_behind_the_last_commit_of_a_long_file_is_cut_off_and_damage_before_it_is_named(
    path, long_file, cut, damage
):
    place = 2 * cut + 2
    path.write_bytes(b"".join([*long_file[:place], damage, *long_file[place:]]))
    JsonLines(path).rewind(cut)
    assert path.read_bytes() == b"".join(long_file[:place])
    content = b"".join([*long_file[: place - 2], damage, *long_file[place - 2 :]])
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"metrics\.jsonl:{place - 1}: this line is not a JSON object"):
        JsonLines(path).rewind(cut)
    assert path.read_bytes() == content


def test_rows_with_a_key_are_read_alone(path, long_file):
    marked = [0, 1, 700, 4000, 7999]
    for number in marked:
        long_file[number] = b'{"step":%d,"val_loss":%d}\n' % (number // 2, number)
    long_file[5] = b"not json\n"
    long_file[6] = b'{"step":3,"text":"val_loss"}\n'
    path.write_bytes(b"".join(long_file) + b'{"step":4000,"val_loss":')
    assert [row["val_loss"] for row in rows_with(path, "val_loss")] == marked
    long_file[6000] = b'{"val_loss":1}\n'
    path.write_bytes(b"".join(long_file))
    with pytest.raises(DataError, match=r"metrics\.jsonl:6001: this line is not a JSON object with a step"):
        list(rows_with(path, "val_loss"))
    assert not list(rows_with(path.with_name("none"), "val_loss"))


def test_the_newest_rows_with_a_key_are_read_from_the_end(path, long_file, monkeypatch):
    for number in (100, 7000, 7990):
        long_file[number] = b'{"step":%d,"val_loss":%d}\n' % (number // 2, number)
    long_file[7500] = b"not json\n"
    long_file[7600] = b'{"step":3800,"text":"val_loss%s"}\n' % (b"-" * 200_000)
    path.write_bytes(b"".join(long_file) + b'{"step":4000,"val_loss":')
    assert [row["val_loss"] for row in newest_rows(path, "val_loss")] == [7990, 7000, 100]
    assert not list(newest_rows(path.with_name("none"), "val_loss"))
    parsed = []
    monkeypatch.setattr(jsonl, "parse_json", lambda text: parsed.append(text) or json.loads(text))
    assert next(newest_rows(path, "loss"))["loss"] == 7999 and len(parsed) == 1


def test_a_rewind_that_removes_nothing_does_not_touch_the_file(path):
    lines = write(path, [1, 2])
    before = path.stat().st_ino
    lines.rewind(2)
    assert path.stat().st_ino == before


def test_a_torn_last_line_is_left_out_on_read_and_removed_on_open(path):
    write(path, [1, 2]).close()
    path.write_bytes(path.read_bytes()[:-5])
    assert steps_of(path) == [1]
    write(path, [3]).close()
    assert steps_of(path) == [1, 3]


def test_zero_bytes_after_a_power_cut_are_torn_too(path):
    write(path, [1]).close()
    with path.open("ab") as file:
        file.write(bytes(4096))
    write(path, [2]).close()
    assert steps_of(path) == [1, 2]


BAD = ["not json", '{"loss": 1}', "[1]", "7", '{"step": null}', '{"step": "7"}', '{"step":2,"lo\0\0\0']


@pytest.mark.parametrize("bad", BAD)
def test_a_damaged_line_in_the_middle_is_named(path, bad):
    path.write_text(f'{{"step":1}}\n{bad}\n{{"step":3}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: this line is not a JSON object with a step; restore"):
        read_rows(path)


def test_what_is_no_file_of_rows_is_refused_without_being_read_whole(path):
    path.write_text('{"step":1}\n')
    os.truncate(path, 20 * 2**30)
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot be read: a line of more than 16,777,216 bytes; rest"):
        read_rows(path)
    with pytest.raises(DataError, match=r"metrics\.jsonl: ends with more than 16,777,216 bytes without a line; resto"):
        JsonLines(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot be read: not a regular file; restore the file"):
        read_rows(path)


@pytest.mark.parametrize("bad", BAD)
def test_what_a_power_failure_has_spoilt_behind_the_last_commit_goes_with_the_rows_that_follow_it(path, bad):
    path.write_text(f'{{"step":1}}\n{{"step":2}}\n{bad}\n{{"step":4}}\n')
    lines = JsonLines(path)
    lines.rewind(2)
    lines.append({"step": 3})
    lines.close()
    assert steps_of(path) == [1, 2, 3]


def test_bytes_without_end_behind_the_last_commit_are_cut_off_unread(path):
    content = '{"step":1}\n{"step":2}\n'
    path.write_text(content)
    os.truncate(path, 20 * 2**30)
    with path.open("ab") as file:
        file.write(b'\n{"step":3}\n')
    JsonLines(path).rewind(2)
    assert path.read_text() == content


@pytest.mark.parametrize("step", [1, 3, 4])
def test_damage_before_the_row_of_the_last_commit_is_named_and_nothing_is_cut_off(path, step):
    content = '{"step":0}\nnot json\n{"step":3}\n{"step":4}\n'
    path.write_text(content)
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: this line is not a JSON object"):
        JsonLines(path).rewind(step)
    assert path.read_text() == content


@pytest.mark.parametrize("bad", ["not json", '{"step":4,"lo', '{"step": null}', "[1]"])
def test_the_last_step_is_that_of_the_last_row_that_is_whole(path, bad):
    write(path, [1, 2]).close()
    with path.open("a") as file:
        file.write(f"{bad}\n")
    assert JsonLines(path).last_step() == 2
    path.write_text(f"{bad}\n")
    assert JsonLines(path).last_step() is None


def test_last_step_reads_the_end_of_a_long_file(path):
    lines = write(path, range(5000))
    assert path.stat().st_size > 1 << 16
    assert lines.last_step() == 4999


def test_a_failed_rewind_keeps_the_rows_and_the_file_open(path):
    lines = write(path, [1, 2, 3])

    def fail(operation: str, _: Path) -> None:
        if operation == "truncate":
            raise OSError(5, "Input/output error")

    io.set_fault_hook(fail)
    try:
        with pytest.raises(DiskError, match="cannot cut: Input/output error"):
            lines.rewind(1)
    finally:
        io.set_fault_hook(None)
    lines.append({"step": 4})
    assert steps_of(path) == [1, 2, 3, 4]


def test_a_full_disk_is_a_disk_error_and_leaves_whole_lines(path):
    """RLIMIT_FSIZE stands for the full disk: the kernel cuts the write short in the same way."""
    code = f"""
import resource, signal
from pathlib import Path
from pretrain.errors import DiskError
from pretrain.utils.jsonl import JsonLines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
lines = JsonLines(Path({str(path)!r}))
lines.append({{"step": 1}})
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
for attempt in range(2):
    try:
        lines.append({{"step": 2, "text": "x" * 100}})
    except DiskError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    errors = done.stdout.splitlines()
    assert len(errors) == 2, done.stderr
    assert all(line.startswith(f"{path}: cannot append: ") for line in errors)
    assert path.read_text() == '{"step":1}\n'


def test_rows_that_a_disk_refuses_wait_and_come_before_the_next_in_their_order(path):
    lines = write(path, [1])
    file = lines._file
    with Path("/dev/full").open("ab", buffering=0) as full:
        lines._file = full
        for step in (2, 3, 4):
            with pytest.raises(DiskError, match="cannot append"):
                lines.append({"step": step})
    lines._file, lines._torn_at = file, None
    assert lines.num_waiting == 3
    lines.rewind(3)
    lines.append({"step": 5})
    assert steps_of(path) == [1, 2, 3, 5]
    assert lines.num_waiting == 0


def test_a_part_of_a_row_that_the_disk_would_not_take_back_goes_before_the_next_row(path, monkeypatch):
    """A disk that has turned read-only, or has errors, refuses to cut a file too."""
    lines = write(path, [1])

    class Torn:
        """Takes a part of what is written."""

        def __init__(self, file) -> None:
            self.fileno, self._file = file.fileno, file

        def write(self, line):
            return self._file.write(line[:5])

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    file, lines._file = lines._file, Torn(lines._file)
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        for step in (2, 3):
            with pytest.raises(DiskError, match="cannot append"):
                lines.append({"step": step})
    lines._file = file
    lines.append({"step": 4})
    assert steps_of(path) == [1, 2, 3, 4]


def test_a_killed_process_loses_no_row_that_it_wrote(path):
    code = f"""
import sys
from pathlib import Path
from pretrain.utils.jsonl import JsonLines
lines = JsonLines(Path({str(path)!r}))
step = 0
while True:
    step += 1
    lines.append({{"step": step, "loss": 1.0}})
    print(step, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    first = "".join(child.stdout.readline() for _ in range(50))
    os.kill(child.pid, signal.SIGKILL)
    printed = [int(line) for line in (first + finish(child)[0]).split()]
    steps = steps_of(path)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= printed[-1]


def test_a_folder_that_is_not_there_is_a_disk_error(tmp_path):
    with pytest.raises(DiskError, match="cannot open: No such file or directory; check the path"):
        JsonLines(tmp_path / "nowhere" / "metrics.jsonl")


def test_sync_reaches_the_disk_without_error(path):
    lines = write(path, [1])
    lines.sync()
    assert json.loads(path.read_text()) == {"step": 1, "loss": 1 / 7}
