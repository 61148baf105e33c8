"""What is in a bucket and cannot be: damaged objects, objects of other runs, listings that contradict owner.json."""

import contextlib
import json
import os
import subprocess
from dataclasses import asdict, replace

import pytest
import s3fs

from pretrain.checkpoint import objects
from pretrain.checkpoint.bucket import upload
from pretrain.checkpoint.format import seal
from pretrain.errors import CheckpointError, LaunchError, LockedError
from pretrain.run.owner import this_process
from pretrain.utils.io import json_bytes
from tests.helpers.lying import HTML, KINDS, serve_lies
from tests.unit.checkpoint.test_upload import (
    URL,
    assert_whole,
    bucket,
    job,
    quiet,
    run,
    save,
    send,
    store,
    take,
    whole_steps,
)

__all__ = ["run", "store"]
DEEP = b"[" * 100_000
ROOT = "lab/runs/run"


@pytest.fixture
def files(store):
    return s3fs.S3FileSystem(use_listings_cache=False)


def change(files, name: str, content: bytes | None) -> None:
    """Replaces or removes an object."""
    files.rm_file(f"{ROOT}/{name}") if content is None else files.pipe_file(f"{ROOT}/{name}", content)


def owned(files, **facts: object) -> None:
    """Changes facts of owner.json; None removes one."""
    found = json.loads(files.cat_file(f"{ROOT}/owner.json")) | facts
    change(files, "owner.json", json_bytes({key: value for key, value in found.items() if value is not None}))


def test_a_checkpoint_with_any_damaged_record_is_passed_over(files, run, tmp_path):
    run.tokenizer.write_text('{"version": "1.0"}')
    send(run, 10, 20)
    newest = "step-00000020/"
    there = files.find(f"{ROOT}/{newest}")
    kept = {name.removeprefix(f"{ROOT}/{newest}"): files.cat_file(name) for name in there}
    wrong = {
        "records/run.json": [b"[]", DEEP, b'{"rollbacks": 5}', None],
        "records/tokenizer.json": [kept["records/tokenizer.json"].replace(b"1.0", b"1.1")],
        "records/config.yaml": [b""],
        "records.json": [
            *(HTML, DEEP, json_bytes(seal({"files": 5})), json_bytes(seal({"files": [], "manifest": 1}))),
            json_bytes(seal({"files": [{"name": "../x", "num_bytes": 0, "crc32s": []}], "manifest": 1})),
        ],
        "manifest.json": [b"{", DEEP, kept["manifest.json"].replace(b"20", b"21")],
    }
    for name, contents in wrong.items():
        for number, content in enumerate(contents):
            change(files, newest + name, content)
            assert take(tmp_path / f"{number}-{name}") == 10, (name, content)
            assert json.loads((tmp_path / f"{number}-{name}/run.json").read_bytes())["id"] == run.read_record()["id"]
            change(files, newest + name, kept[name])
    # All records at once, and their table.
    for name in kept:
        if name.startswith("records"):
            change(files, newest + name, None)
    assert take(tmp_path / "none") == 10
    # A checkpoint of an older version has no table.
    for name in kept:
        if name.startswith("records/"):
            change(files, newest + name, kept[name])
    assert take(tmp_path / "old") == 20
    assert_whole(tmp_path / "old", 20)
    change(files, newest + "records/run.json", DEEP)
    assert take(tmp_path / "old-damaged") == 10


def test_an_owner_that_cannot_be_read_is_an_error(files, run, tmp_path):
    send(run, 10)
    named = [b"{}", b'{"run": 5}', b'{"run": "a", "step": "x"}', b'{"run": "a", "step": -1}']
    for content in (b"{", b"[]", HTML, DEEP, b"\xff", *named):
        change(files, "owner.json", content)
        with pytest.raises(LaunchError, match=r"owner\.json: cannot be read \(.*; if the file is damaged, remove it"):
            take(tmp_path / "other")
        with pytest.raises(LaunchError, match="cannot be read"):
            upload(bucket(), job(run, None), quiet)
    change(files, "owner.json", None)
    assert take(tmp_path / "other") == 10
    upload(bucket(), job(run, None), quiet)
    assert bucket().owner()["step"] == 10


def test_absence_is_proved(files, run, tmp_path):
    assert take(tmp_path / "new") is None, "no owner, and two empty listings"
    send(run, 10, 20)
    owned(files, step=30)
    with pytest.raises(LaunchError, match=r"owner\.json names step 30, and the listing has step-00000020; start again"):
        take(tmp_path / "other")
    assert take(tmp_path / "other", step=30, run=run.read_record()["id"]) is None, "this machine has it"
    owned(files, step=None)
    assert take(tmp_path / "other") == 20, "an owner of an older version"
    files.rm([f"{ROOT}/step-00000010", f"{ROOT}/step-00000020"], recursive=True)
    with pytest.raises(LaunchError, match="and the listing has no checkpoint of it; start again"):
        take(tmp_path / "another")


def test_no_wrong_answer_about_what_is_there_makes_a_run_start_over(files, run, tmp_path):
    send(run, 10, 20)
    with serve_lies() as lying:
        for kind in KINDS:
            for number in range(2):
                lying.forget()
                lying.lie = lambda request, wrong=(kind, number): wrong[0] if request.number == wrong[1] else None
                with contextlib.suppress(LaunchError, FileNotFoundError):
                    assert take(tmp_path / f"{kind}-{number}") == 20, "asked again"


def test_a_listing_that_is_empty_once_is_an_error(files, run, tmp_path, monkeypatch):
    send(run, 10, 20)
    answers = [{}]
    listed = objects.Bucket.list
    monkeypatch.setattr(objects.Bucket, "list", lambda self: answers.pop() if answers else listed(self))
    with pytest.raises(
        LaunchError, match=r"two listings differ \(no checkpoint and step-00000020\); see whether a proxy"
    ):
        take(tmp_path / "other")


def test_another_run_neither_takes_the_folder_nor_removes_from_it(files, run, tmp_path):
    send(run, 10)
    before = {name: files.cat_file(name) for name in files.find(ROOT)}
    stranger = {"run": "ffffffff", "attempt": "two", "host": "there"}
    (path,) = save(run.checkpoints, 20, keep=9)
    for checkpoint in (None, path):
        with pytest.raises(CheckpointError, match="has the checkpoints of another run"):
            upload(bucket(), job(run, checkpoint) | {"owner": stranger}, quiet)
    with pytest.raises(LockedError, match=r"another run, .*, on here, writes there since then"):
        upload(bucket(), job(run, path, is_first=False) | {"owner": stranger}, quiet)
    change(files, "owner.json", None)
    with pytest.raises(CheckpointError, match="has the checkpoints of another run"):
        upload(bucket(), job(run, path) | {"owner": stranger}, quiet)
    assert {name: files.cat_file(name) for name in files.find(ROOT)} == {
        name: content for name, content in before.items() if not name.endswith("owner.json")
    }


def test_what_is_not_known_to_be_of_this_run_stays(files, run):
    send(run, 10, 20)
    told = []
    for step, record in ((10, b'{"id": "ffffffff"}'), (20, DEEP)):
        change(files, f"step-{step:08d}/records/run.json", record)
    change(files, "step-00000020/records.json", None)
    change(files, "step-00000005/rank-00000.safetensors", b"cut off")
    change(files, "step-00000006/records/run.json", b'{"id": "ffffffff"}')
    for name in ("records/run.json", "manifest.json"):
        change(files, f"step-00000098/{name}", b'{"id": "ffffffff"}')
    for path in save(run.checkpoints, 30, 40, keep=9):
        upload(bucket(), job(run, path), lambda **facts: told.append(facts.get("note")))
    assert whole_steps() == [10, 20, 30, 40, 98] and bucket().owner()["step"] == 40
    assert bucket().list().keys() & {"step-00000005", "step-00000006"} == {"step-00000006"}
    assert f"{URL}/step-00000010 is not known to be of this run, and stays" in told


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("records/run.json", b"{"),
        pytest.param("records/run.json", None, marks=pytest.mark.long),
        pytest.param("records/config.yaml", b"", marks=pytest.mark.long),
        ("records.json", HTML),
    ],
)
def test_a_checkpoint_with_a_damaged_record_is_replaced_by_the_run_that_continued_before_it(
    files, run, name, content, tmp_path
):
    send(run, 10, 20)
    change(files, f"step-00000020/{name}", content)
    assert take(tmp_path / "other") == 10
    send(run, 20)
    assert take(tmp_path / "third") == 20
    change(files, f"step-00000020/{name}", content)
    change(files, "step-00000020/manifest.json", HTML)  # of other bytes than the one here
    upload(bucket(), job(run, run.checkpoints / "step-00000020", is_first=False), quiet)
    assert take(tmp_path / "fourth") == 20


def test_what_may_be_of_another_run_is_named_with_all_that_has_to_go(files, run):
    send(run, 10, 20)
    for name, content in (("records/run.json", DEEP), ("records.json", HTML), ("manifest.json", HTML)):
        change(files, f"step-00000020/{name}", content)
    path = run.checkpoints / "step-00000020"
    with pytest.raises(CheckpointError, match=r"is not known to be of this run; if no other run needs it, remove it a"):
        upload(bucket(), job(run, path), quiet)
    files.rm(f"{ROOT}/step-00000020", recursive=True)
    change(files, "owner.json", None)
    upload(bucket(), job(run, path), quiet)
    assert whole_steps() == [10, 20] and bucket().owner()["step"] == 20


def test_newer_checkpoints_of_the_same_course_stay(files, run):
    send(run, 10, 30)
    upload(bucket(), job(run, save(run.checkpoints, 20, keep=9)[0], "two"), quiet)
    assert whole_steps() == [10, 20, 30] and bucket().owner()["step"] == 30
    upload(bucket(), job(run, run.checkpoints / "step-00000030", "two", is_first=False), quiet)
    assert whole_steps() == [20, 30]


def test_a_live_process_keeps_the_folder_and_a_dead_one_does_not(files, run, tmp_path):
    upload(bucket(), job(run, None), quiet)
    us, mine = this_process(), run.read_record()["id"]
    dead = subprocess.Popen(["true"])
    dead.wait()
    other = {"folder": tmp_path / "other", "process": asdict(us)}
    for step in (0, 10):
        owned(files, step=step, process=asdict(replace(us, pid=os.getppid(), process_start="")))
        with pytest.raises(
            LockedError, match=rf"in use by process {os.getppid()} on .*; wait for it, stop it, or give"
        ):
            take(**other, step=10, run=mine)
    owned(files, step=0, process=asdict(replace(us, machine="elsewhere", pid=12)))
    with pytest.raises(
        LockedError, match=r"in use by process 12 on .*, which has saved nothing yet; end one of the two"
    ):
        take(**other)
    assert take(**other, begun=mine) is None, "an earlier start of this run"
    owned(files, process=asdict(replace(us, pid=dead.pid)))
    assert take(**other) is None


@pytest.mark.long
def test_answers_without_end_are_cut(files, run, tmp_path, monkeypatch):
    send(run, 10)
    monkeypatch.setattr(objects, "MAX_ANSWER_BYTES", 2**20)
    monkeypatch.setattr(objects, "MIN_PAGE_BYTES", 2**21)
    with serve_lies() as lying:
        for lie in ("endless", "endless list"):
            lying.forget()
            lying.lie = lambda request, lie=lie: lie
            with pytest.raises(OSError, match=r"an answer without end, and no answer for 0\.2 s"):
                take(tmp_path / "other")
            assert len(lying.requests) < 200
        assert lying.num_sent < 2**26
    assert not (tmp_path / "other").exists()
