"""Checkpoints in a bucket: a real S3 server on the loopback, an upload killed at each of its requests."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import s3fs
from pydantic import ValidationError

from pretrain.checkpoint import objects
from pretrain.checkpoint import upload as upload_module
from pretrain.checkpoint.bucket import Bucket, fetch, upload
from pretrain.checkpoint.format import load_manifest, step_of
from pretrain.checkpoint.upload import Uploads, fetch_newest
from pretrain.config.train import CheckpointConfig
from pretrain.dist import World
from pretrain.errors import CheckpointError, DiskError, LaunchError, LockedError
from pretrain.run.folder import RunDir, begin_attempt
from pretrain.utils.io import check_file
from pretrain.utils.remote import Waits
from tests.helpers.lying import Asked, serve_lies
from tests.helpers.servers import serve_s3
from tests.helpers.waiting import LIMIT_S, wait_until
from tests.unit.checkpoint.stand_in import StandIn, manager, save, state_of

ALONE = World(0, 1, 0)
URL = "s3://lab/runs/run"
WHOLE_S = 0.2


@pytest.fixture
def store(tmp_path):
    (tmp_path / "empty").mkdir()
    with serve_s3({"lab": tmp_path / "empty"}):
        yield


@pytest.fixture
def run(tmp_path) -> RunDir:
    found = RunDir(tmp_path / "runs/run")
    found.checkpoints.mkdir(parents=True)
    begin_attempt(found, "run", {})
    found.config.write_text("run: {name: run}\n")
    found.audit.write_text('{"step": 1}\n')
    return found


def bucket(url: str = URL) -> Bucket:
    return Bucket(url, Waits(first_s=0.01, total_s=WHOLE_S))


def quiet(**facts) -> None:
    pass


def job(run: RunDir, checkpoint: Path | None, attempt: str = "one", **changes) -> dict:
    run_id = run.read_record()["id"]
    owner = {"run": run_id, "attempt": attempt, "host": "here"}
    kept = {"keep": 2, "keep_every_steps": 0, "best": [], "is_first": True}
    return {"checkpoint": checkpoint and str(checkpoint), "owner": owner, **kept, **changes}


def send(run: RunDir, *steps: int, **changes) -> None:
    for path in save(run.checkpoints, *steps, keep=9):
        upload(bucket(), job(run, path, **changes), quiet)


def take(folder: Path, step: int = 0, run: str | None = None, rollbacks: tuple = (), **facts: object) -> int | None:
    asked = {"folder": str(folder), "step": step, "run": run, "rollbacks": list(rollbacks), **facts}
    return fetch(bucket(), asked, quiet)["step"]


def whole_steps() -> list[int]:
    return sorted(step_of(Path(name)) for name, names in bucket().list().items() if "manifest.json" in names)


def assert_whole(folder: Path, step: int) -> None:
    path = folder / "checkpoints" / f"step-{step:08d}"
    records = load_manifest(path).files
    assert [check_file(path / record.name, record) for record in records] == [None] * len(records)
    loaded = StandIn(0)
    manager(folder / "checkpoints").load_newest(loaded)
    assert loaded.values() == {float(step)}


def test_a_machine_that_has_nothing_gets_the_newest_checkpoint_and_the_records(store, run, tmp_path):
    send(run, 10, 20)
    (run.checkpoints / "step-00000020/notes.txt").write_text("not of the checkpoint")
    assert take(tmp_path / "other") == 20
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == [
        "audit.jsonl", "checkpoints", "config.yaml", "run.json",
    ]  # fmt: skip
    for file in ("config.yaml", "run.json", "audit.jsonl", "checkpoints/step-00000020/manifest.json"):
        assert (tmp_path / "other" / file).read_bytes() == (run.path / file).read_bytes()
    assert_whole(tmp_path / "other", 20)
    assert take(tmp_path / "other", step=20) is None


def test_the_manifest_is_written_last_and_removed_first(store, run, monkeypatch):
    done: list[tuple[str, str]] = []
    call = s3fs.S3FileSystem._call_s3

    async def note(self, method, *arguments, **keys):
        if method in ("put_object", "delete_object"):
            done.append((method, keys["Key"].partition("runs/run/")[2]))
        return await call(self, method, *arguments, **keys)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", note)
    send(run, 10, 20, 30)
    last = [name for method, name in done if method == "put_object" and name.startswith("step-00000030")]
    assert last[-1] == "step-00000030/manifest.json" and len(last) > 3
    removed = [name for method, name in done if method == "delete_object"]
    assert removed[0] == "step-00000010/manifest.json" and len(removed) == len(last)
    assert done.index(("put_object", last[-1])) < done.index(("delete_object", removed[0]))


def die_at(number: int, run: RunDir, path: Path) -> bool:
    """Uploads in a fork that is killed at its request of that number; returns whether it was."""
    pid = os.fork()
    if not pid:
        left = number
        call = s3fs.S3FileSystem._call_s3

        async def count(self, *arguments, **keys):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return await call(self, *arguments, **keys)

        s3fs.S3FileSystem._call_s3 = count
        try:
            upload(bucket(), job(run, path), quiet)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.long
def test_an_upload_killed_at_each_of_its_requests_leaves_the_old_checkpoint_or_the_new_one(
    store, run, tmp_path, monkeypatch
):
    monkeypatch.setattr(objects, "PART_BYTES", 5 * 2**20)
    large = {"embed": (2**20,), "norm": (5,)}  # three tensors of 4 MiB: several parts
    for step in (10, 20, 30):
        manager(run.checkpoints, 9).save(StandIn(step, large, cut=2**20), state_of(step))
    for step in (10, 20):
        upload(bucket(), job(run, run.checkpoints / f"step-{step:08d}"), quiet)
    new = run.checkpoints / "step-00000030"
    number, found = 0, []
    while die_at(number, run, new):
        other = tmp_path / f"other-{number}"
        found.append(take(other))
        assert whole_steps() in ([10, 20], [10, 20, 30], [20, 30])
        path = other / f"checkpoints/step-{found[-1]:08d}"
        assert all(check_file(path / record.name, record) is None for record in load_manifest(path).files)
        assert (path / "manifest.json").read_bytes() == (run.checkpoints / path.name / "manifest.json").read_bytes()
        shutil.rmtree(other)
        if found[-1] == 30:  # from here on an upload finds it, and only removes what is old
            s3fs.S3FileSystem().rm(["lab/runs/run/step-00000030", "lab/runs/run/owner.json"], recursive=True)
            for step in (10, 20):
                upload(bucket(), job(run, run.checkpoints / f"step-{step:08d}", keep=9), quiet)
        number += 1
    assert found == sorted(found) and set(found) == {20, 30}
    assert number > 20
    assert whole_steps() == [20, 30]


def test_old_ones_go_but_for_the_best_and_those_kept_for_good(store, run):
    send(run, 10, 20, 30, 40, 50, 60, keep_every_steps=20, best=[30, 10])
    assert whole_steps() == [20, 30, 40, 50, 60]


def test_after_a_rollback_the_abandoned_course_goes(store, run, tmp_path):
    send(run, 10, 20, 30)
    for step in (20, 30):
        shutil.rmtree(run.checkpoints / f"step-{step:08d}")
    assert take(tmp_path / "a", step=10, rollbacks=({"to": 10},)) is None
    run.record.write_text(json.dumps({**run.read_record(), "rollbacks": [{"to": 10}]}))
    old = bucket().read("step-00000020/manifest.json")
    run.config.write_text("another")
    manager(run.checkpoints, 9).save(StandIn(20, cut=4), state_of(20))
    upload(bucket(), job(run, run.checkpoints / "step-00000020"), quiet)
    assert whole_steps() == [20] and bucket().read("step-00000020/manifest.json") != old
    assert take(tmp_path / "b", step=10, rollbacks=({"to": 10},)) == 20


def test_an_attempt_that_was_replaced_uploads_nothing(store, run):
    send(run, 10, attempt="old")
    upload(bucket(), job(run, None, "new"), quiet)
    (path,) = save(run.checkpoints, 20, keep=9)
    with pytest.raises(LockedError, match="another attempt of the run, on here, writes there since then; end one of"):
        upload(bucket(), job(run, path, "old", is_first=False), quiet)
    assert whole_steps() == [10]


def test_the_checkpoints_of_another_run_are_refused(store, run, tmp_path):
    send(run, 10)
    with pytest.raises(
        CheckpointError, match=r"has the checkpoints of another run, .*; give another checkpoint\.upload"
    ):
        take(tmp_path / "other", run="ffffffff")


def test_a_damaged_checkpoint_is_passed_over_and_a_run_never_starts_over(store, run, tmp_path):
    send(run, 10, 20)
    files = s3fs.S3FileSystem()
    for step in (20, 10):
        (name,) = [name for name in files.find(f"lab/runs/run/step-{step:08d}") if name.endswith(".safetensors")]
        content = bytearray(files.cat_file(name))
        content[-1] ^= 1
        files.pipe_file(name, bytes(content))
        if step == 20:
            assert take(tmp_path / "other") == 10
            assert_whole(tmp_path / "other", 10)
    with pytest.raises(CheckpointError, match=r"none can be used .*is not what was written"):
        take(tmp_path / "third")
    assert not list((tmp_path / "third/checkpoints").glob("step-*"))


def uploads(run: RunDir, prefix: str = "s3://lab/runs") -> Uploads:
    retention = manager(run.checkpoints).retention
    return Uploads(upload=prefix, run=run, world=ALONE, keep=2, keep_every_steps=0, retention=retention)


@pytest.mark.long
def test_a_failed_upload_says_why_and_the_next_save_tries_again(store, run, tmp_path, caplog):
    sent = uploads(run, "s3://nowhere/runs")
    first, second = save(run.checkpoints, 10, 20)
    sent.offer(first)
    texts: list[str] = []
    sent.finish(texts.append, must=False)
    assert "step-00000010 is not uploaded: s3://nowhere/runs/run/: " in caplog.text
    assert "; the next save tries again" in caplog.text
    with pytest.raises(DiskError, match=r"the last checkpoint is not uploaded: .*; the same command tries again"):
        sent.finish(texts.append, must=True)
    s3fs.S3FileSystem().mkdir("nowhere")
    sent.offer(second)
    sent.finish(texts.append, must=True)
    assert [step for step, _ in sent.take_finished()] == [20] and sent.take_finished() == []
    assert any(text.startswith("uploading") for text in texts)
    other = RunDir(tmp_path / "elsewhere/run")
    assert fetch_newest("s3://nowhere/runs", other, ALONE, lambda: None) == 20


@pytest.mark.long
def test_what_the_end_waits_for_has_the_priority_of_the_run_and_is_the_newest(store, run):
    sent, go, found = uploads(run), threading.Event(), {}
    first, second, third = save(run.checkpoints, 10, 20, 30, keep=9)

    def note(request: Asked) -> None:
        pid = sent._work._process.pid
        found.setdefault(pid, os.getpriority(os.PRIO_PROCESS, pid))
        if len(found) == 1:
            go.wait(LIMIT_S)

    with serve_lies() as lying:
        lying.lie = note
        sent.offer(first)
        wait_until(lambda: found, "the first upload asks")
        sent.hurry()
        sent.offer(second)
        sent.finish(str, must=True)
        go.set()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert list(found.values()) == [19, before] and whole_steps() == [20]
    assert [step for step, _ in sent.take_finished()] == [20]
    upload(bucket(), job(run, None, "later"), quiet)
    sent.offer(third)
    with pytest.raises(LockedError, match="another attempt of the run, on here, writes there since then"):
        sent.finish(str, must=False)
    with pytest.raises(LockedError, match="another attempt of the run"):
        sent.take_finished()


@pytest.mark.long
def test_a_start_without_a_checkpoint_needs_the_store(run, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setattr(upload_module, "PATIENCE_S", WHOLE_S)
    with pytest.raises(LaunchError, match=r"s3://lab/runs/run.*: .*; start again when the store answers"):
        fetch_newest("s3://lab/runs", run, ALONE, lambda: None)
    save(run.checkpoints, 10)
    assert fetch_newest("s3://lab/runs", run, ALONE, lambda: None) is None
    assert "not asked for a newer checkpoint" in caplog.text


def test_the_checkpoint_under_way_is_not_removed(run):
    retention = manager(run.checkpoints, 2).retention
    paths = save(run.checkpoints, 10, 20, 30, keep=9)
    retention.uploading = paths[0]
    retention.apply()
    assert paths[0].exists()
    retention.uploading = None
    retention.apply()
    assert not paths[0].exists()


@pytest.mark.parametrize("value", ["bucket/runs", "s3://", "http://host/a", "s3://key:secret@bucket/a", "s3://b/a?x=1"])
def test_another_address_is_refused(value):
    with pytest.raises(ValidationError, match="write s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, without credentials"):
        CheckpointConfig(upload=value)
