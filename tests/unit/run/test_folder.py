"""A run folder's record."""

import json
import sys
import threading

import pytest

from pretrain.errors import ConfigError
from pretrain.run import folder
from pretrain.run.folder import RunDir, begin_attempt, change_record, end_attempt, package_versions
from pretrain.utils.io import set_fault_hook
from tests.helpers.waiting import wait_until


def test_attempts_are_appended_to_one_record(tmp_path):
    run = RunDir(tmp_path)
    assert not run.exists()
    first = begin_attempt(run, "night", {"world_size": 2})
    assert run.exists()
    end_attempt(run, {"exit_code": 75, "reason": "stopped by SIGTERM"})
    second = begin_attempt(run, "renamed", {"world_size": 4})
    assert second["id"] == first["id"]
    assert (second["name"], second["created"]) == ("night", first["created"])
    assert [attempt["number"] for attempt in second["attempts"]] == [1, 2]
    assert [attempt["world_size"] for attempt in second["attempts"]] == [2, 4]
    assert second["attempts"][0]["reason"] == "stopped by SIGTERM"
    assert "reason" not in second["attempts"][1]
    assert run.read_record() == second


def test_ids_of_runs_differ(tmp_path):
    records = [begin_attempt(RunDir(tmp_path / name), name, {}) for name in "ab" if (tmp_path / name).mkdir() is None]
    assert records[0]["id"] != records[1]["id"]


def test_versions_of_what_results_depend_on_are_noted():
    versions = package_versions()
    assert versions["python"] == sys.version.split()[0]
    assert {"pretrain", "torch", "deepspeed", "numpy"} <= versions.keys()


def test_there_is_no_record_before_a_run_has_begun(tmp_path):
    with pytest.raises(ConfigError, match=r"no run here \(no run.json\); check the path"):
        RunDir(tmp_path).read_record()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"3", b"{}"])
def test_a_record_that_is_damaged_is_named(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"run.json: .*(cannot be read|not the record of a run).*; restore it"):
        RunDir(tmp_path).read_record()


def test_a_record_without_attempts_is_damaged(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"id": "x", "name": "x", "created": "x", "attempts": []}))
    with pytest.raises(ConfigError, match="not the record of a run"):
        RunDir(tmp_path).read_record()


class Lock:
    """A lock that says whether it holds a thread back."""

    def __init__(self) -> None:
        self.holds_back, self._lock = False, threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.holds_back = True
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("change", ["attempt", "rollback"])
def test_a_signal_that_notes_the_end_while_the_record_is_changed_loses_nothing(tmp_path, monkeypatch, change):
    run = RunDir(tmp_path)
    begin_attempt(run, "mine", {})
    signals = threading.Thread(target=end_attempt, args=(run, {"exit_code": 75}))
    lock = Lock()
    monkeypatch.setattr(folder, "_CHANGING", lock)

    def hook(operation, path):
        if operation == "rename" and threading.current_thread() is threading.main_thread():
            signals.start()
            wait_until(lambda: lock.holds_back or not signals.is_alive(), "it is held back, or has written")

    set_fault_hook(hook)
    try:
        if change == "attempt":
            begin_attempt(run, "mine", {})
        else:
            change_record(run, lambda record: record.update(skips=[[3, 5]]))
    finally:
        set_fault_hook(None)
    signals.join()
    record = run.read_record()
    assert record["attempts"][-1]["exit_code"] == 75
    assert len(record["attempts"]) == 2 or record["skips"] == [[3, 5]]
