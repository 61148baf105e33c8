"""`prepare` that was ended and is started again: the same bytes, and nothing done twice or by two at a time."""

import fcntl
import logging
import random
from pathlib import Path

import pytest

from pretrain.errors import DiskError, LockedError
from pretrain.preparation.output import ORPHAN_WAIT_S, PREPARE_LOCK, WORKERS_LOCK
from pretrain.tokenizer.file import dump_tokenizer
from tests.helpers.clock import FakeClock
from tests.helpers.corpus import digests
from tests.helpers.killed import count_writes, run_killed
from tests.helpers.tables import alternating
from tests.helpers.tokenizers import train_bpe
from tests.unit.data.prepared import draw_nothing, options, prepare


def test_second_run_does_nothing(tmp_path, corpus, caplog):
    first = prepare(options(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.name[0] != "."}
    with caplog.at_level(logging.INFO):
        assert prepare(options(tmp_path, processes=2)) == first
    assert "is complete: nothing to do" in caplog.text
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.name[0] != "."}


def prepare_folder(folder: str, name: str) -> None:
    """What a process does that is killed."""
    draw_nothing()
    prepare(options(Path(folder), name))


def test_killed_at_any_write_and_started_again_it_gives_the_same_bytes(tmp_path, corpus):
    num_writes = count_writes(prepare_folder, tmp_path, "whole")
    assert num_writes > 100
    for kill_at in (2, *random.Random(0).sample(range(3, num_writes), 4), num_writes):
        out = tmp_path / f"killed{kill_at}"
        run_killed(prepare_folder, tmp_path, out.name, kill_at=kill_at)
        assert not (out / "index.json").exists() or kill_at == num_writes
        prepare(options(tmp_path, out.name))
        assert digests(out) == digests(tmp_path / "whole")


def test_finished_parts_are_not_done_again(tmp_path, corpus, fault_hook):
    def fail(operation, path):
        if operation == "rename" and path.name == "part-00003.json":
            raise OSError(28, "No space left on device")

    fault_hook(fail)
    with pytest.raises(DiskError, match="No space left on device"):
        prepare(options(tmp_path))
    fault_hook(None)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/parts").iterdir()}
    assert len(kept) == 3
    seen = []
    prepare(options(tmp_path), lambda *args: seen.append(args))
    assert all(path.stat().st_mtime_ns == mtime for path, mtime in kept.items())
    assert seen[0][1] > 1500 * 3
    prepare(options(tmp_path, "whole"))
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.parametrize(
    "victim",
    [*(f"train/part-00002-0000.{suffix}" for suffix in ("tar", "idx.npy", "lengths.npy")), "tokenizer.json"],
)
def test_a_file_that_went_missing_is_made_again(tmp_path, corpus, victim):
    prepare(options(tmp_path))
    before = digests(tmp_path / "out")
    (tmp_path / "out" / victim).unlink()
    prepare(options(tmp_path))
    assert digests(tmp_path / "out") == before


def test_a_tokenizer_that_was_replaced_is_made_again(tmp_path, corpus, caplog):
    prepare(options(tmp_path))
    before = digests(tmp_path / "out")
    (tmp_path / "out/tokenizer.json").write_bytes(b"{}")
    prepare(options(tmp_path))
    assert digests(tmp_path / "out") == before
    assert "tokenizer.json is not the one that made the shards; making what is missing again" in caplog.text


@pytest.mark.usefixtures("pictures")
def test_parts_of_another_tokenizer_are_not_reused(tmp_path, corpus):
    prepare(options(tmp_path))
    before = digests(tmp_path / "out")
    (tmp_path / "out/index.json").unlink()
    (tmp_path / "out/tokenizer.json").write_bytes(dump_tokenizer(train_bpe(["x"], 257)))
    index = prepare(options(tmp_path))
    assert index.vocab_size == 257
    assert not before.items() & digests(tmp_path / "out").items() - {("prepare.json", before["prepare.json"])}


def test_ctrl_c_passes_through_and_leaves_nothing_that_is_trusted(tmp_path, corpus, fault_hook):
    def interrupt(operation, path):
        if operation == "write" and path.name.startswith("part-00002-0000.tar"):
            raise KeyboardInterrupt

    fault_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(options(tmp_path))
    assert not list((tmp_path / "out").rglob("*.tmp-*"))
    assert not (tmp_path / "out/index.json").exists()
    fault_hook(None)
    prepare(options(tmp_path))
    prepare(options(tmp_path, "whole"))
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "operation"),
    alternating(
        ["prepare.json", "tokenizer.json", "part-00001-0000", "part-00001.json", "index.json"],
        ["open", "write", "fsync", "rename"],
    ),
)
def test_full_disk_leaves_nothing_that_is_trusted(tmp_path, corpus, fault_hook, operation, name):
    def fail(what, path):
        if what == operation and path.name.startswith(name):
            raise OSError(28, "No space left on device")

    fault_hook(fail)
    with pytest.raises(DiskError, match="No space left on device; free space"):
        prepare(options(tmp_path))
    assert not (tmp_path / "out/index.json").exists()
    assert not list((tmp_path / "out").rglob("*.tmp-*"))
    fault_hook(None)
    prepare(options(tmp_path))
    prepare(options(tmp_path, "whole"))
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_second_prepare_of_a_folder_is_refused_while_the_first_runs(tmp_path, corpus):
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / PREPARE_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711\n")
        lock.flush()
        with pytest.raises(LockedError, match=r"another `pretrain prepare` \(process 4711\) is writing.*; wait for it"):
            prepare(options(tmp_path))
    prepare(options(tmp_path))


def test_workers_of_a_killed_run_are_waited_for(tmp_path, corpus, monkeypatch):
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / WORKERS_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with monkeypatch.context() as patch:
            clock = FakeClock()
            patch.setattr("pretrain.utils.io.time", clock)
            what = "workers of an earlier `pretrain prepare` are still running; end them"
            with pytest.raises(LockedError, match=what):
                prepare(options(tmp_path))
        assert clock.now - 1000.0 >= ORPHAN_WAIT_S
    prepare(options(tmp_path))
