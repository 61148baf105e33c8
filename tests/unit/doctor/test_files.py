"""The file system of a run folder: real ones pass, and one that breaks a promise is found out."""

import math
import os
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from pretrain.doctor import filesystem
from pretrain.doctor.filesystem import check_files, find_mount, nearest_folder
from tests.helpers.clock import FakeClock
from tests.helpers.waiting import LIMIT_S

USAGE = namedtuple("USAGE", "total used free")


def found(folder, needed=0, *, is_shared=False):
    return {check.name: check for check in check_files(folder, needed, is_shared=is_shared)}


def test_a_sound_folder_passes_and_nothing_is_left_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "SLOW_FSYNC_S", math.inf)  # a busy disk is a sound one
    monkeypatch.setattr(filesystem, "WRITTEN_WITHIN_S", LIMIT_S)
    checks = found(tmp_path / "runs" / "mine")
    assert set(checks) == {name for name, _ in filesystem._TRIALS} | {"room", "run folder"}
    assert {check.status for name, check in checks.items() if name != "run folder"} == {"pass"}
    assert list(tmp_path.iterdir()) == []


def test_the_folder_that_is_tried_is_the_nearest_that_is_there(tmp_path):
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path
    (tmp_path / "a").mkdir()
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path / "a"


def test_a_folder_that_cannot_be_written_fails_with_the_code_of_a_disk(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    (check,) = check_files(tmp_path, 0, is_shared=False)
    assert (check.status, check.exit_code) == ("fail", 74)
    assert check.detail == f"{tmp_path}: cannot be written: Read-only file system"


def test_without_hard_links_leases_are_said_to_fall_back(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    check = found(tmp_path)["exclusive link"]
    assert check.status == "warn"
    assert "leases fall back on exclusive creation" in check.detail


def test_a_file_system_that_gives_a_name_twice_fails(tmp_path, monkeypatch):
    real = os.link

    def replace(source, target):
        Path(target).unlink(missing_ok=True)
        real(source, target)

    monkeypatch.setattr(os, "link", replace)
    check = found(tmp_path)["exclusive link"]
    assert (check.status, check.exit_code) == ("fail", 74)


def test_a_rename_that_copies_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda self, target: shutil.copy(self, target))
    assert found(tmp_path)["atomic rename"].status == "fail"


def test_a_disk_that_is_slow_to_sync_is_warned_of(tmp_path, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(filesystem, "time", clock)
    monkeypatch.setattr(os, "fsync", lambda descriptor: clock.sleep(0.3))
    check = filesystem.try_fsync(tmp_path)
    assert (check.status, check.detail) == ("warn", "a small file takes 0.6 s")
    assert "raise checkpoint.every_steps" in check.fix


def test_what_another_process_writes_and_is_never_seen_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "time", FakeClock())
    monkeypatch.setattr(
        filesystem.subprocess, "run", lambda *a, **k: filesystem.subprocess.CompletedProcess(a, 0, b"", b"")
    )
    check = filesystem.try_other_process(tmp_path)
    assert (check.status, check.detail) == ("fail", "its file is not seen within 5 s")


def test_another_process_that_does_not_come_to_write_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "WRITTEN_WITHIN_S", 0.0)
    check = found(tmp_path)["another process"]
    assert (check.status, check.detail) == ("fail", "it has not written a file within 0 s")


def test_a_skewed_clock_is_told_and_does_not_fail(tmp_path, monkeypatch):
    real, begun = filesystem.write_file, 1.7e9

    def write(path, content):
        real(path, content)
        os.utime(path, (begun, begun))

    monkeypatch.setattr(filesystem, "write_file", write)
    for shift, told in ((86_400.0, "-86399"), (-86_400.0, "+86400")):  # the server may count seconds
        monkeypatch.setattr(filesystem, "time", SimpleNamespace(time=lambda shift=shift: begun + shift))
        check = filesystem.try_clock(tmp_path)
        assert check.status == "warn"
        assert f"is {told} s from this host's" in check.detail


def test_checkpoints_that_do_not_fit_fail_with_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem.shutil, "disk_usage", lambda path: USAGE(10 * 2**30, 0, 2 * 2**30))
    check = found(tmp_path, 3 * 2**30)["room"]
    assert (check.status, check.exit_code) == ("fail", 74)
    assert check.detail == "2.0 GiB free, and the checkpoints of this run take 3.0 GiB"
    assert found(tmp_path, 2**30)["room"].status == "pass"


@pytest.mark.parametrize(("is_shared", "text"), [(False, "gone with a reboot"), (True, "seen by this node only")])
def test_a_run_in_memory_is_warned_of(tmp_path, monkeypatch, is_shared, text):
    monkeypatch.setattr(filesystem, "find_mount", lambda folder: ("tmpfs", "/mnt"))
    check = found(tmp_path, is_shared=is_shared)["run folder"]
    assert (check.status, text in check.detail) == ("warn", True)


def test_the_longest_mount_point_above_a_folder_is_its_file_system():
    kind, mount = find_mount(Path("/proc/self"))
    assert (kind, mount) == ("proc", "/proc")
