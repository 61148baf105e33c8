"""`prepare --part i/n`: several processes fill one folder, and it is the folder of a single run."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pretrain.errors import ConfigError, DataError, LockedError
from pretrain.preparation import output as lock
from pretrain.preparation import steps
from pretrain.preparation.input_parts import Share, parse_share
from pretrain.preparation.output import claim_lock, lock_folder
from pretrain.preparation.prepare import prepare
from pretrain.shards.index import load_index
from pretrain.utils import io
from tests.helpers.clock import FakeClock
from tests.helpers.corpus import digests
from tests.helpers.killed import NEVER, start_child
from tests.helpers.waiting import LIMIT_S, poll_pause, wait_until
from tests.unit.data.prepared import draw_nothing
from tests.unit.preparation.test_prepare_kinds import config_of, write_twice


def prepare_part(folder: str, name: str, share: str, processes: str) -> None:
    """What a share does."""
    draw_nothing()
    index = prepare(config_of(Path(folder), name), share=parse_share(share), processes=int(processes))
    print("index" if index else "others")


@pytest.fixture
def start(tmp_path):
    """Starts a share as a process."""
    started = []

    def start(name, share, kill_at=NEVER, processes=1):
        started.append(start_child(prepare_part, tmp_path, name, share, processes, kill_at=kill_at))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.end()


@pytest.fixture
def whole(tmp_path):
    """The digests of a single run; its corpus has duplicates across parts."""
    write_twice(tmp_path / "in")
    prepare(config_of(tmp_path, "whole"), processes=1)
    return digests(tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize(("of", "processes"), [(3, 1), (2, 2)])
def test_shares_that_run_together_write_the_folder_of_a_single_run(tmp_path, whole, start, of, processes):
    children = [start("out", f"{number}/{of}", processes=processes) for number in range(of, 0, -1)]
    results = [child.end() for child in children]
    assert [code for code, _, _ in results] == [0] * of, results
    assert "index" in [output.splitlines()[0] for _, output, _ in results]
    assert digests(tmp_path / "out") == whole


@pytest.mark.long
def test_shares_that_are_killed_and_started_again_write_the_folder_of_a_single_run(tmp_path, whole, start):
    rng = random.Random(0)
    for _ in range(3):
        children = [start("out", f"{number}/2", kill_at=rng.randint(5, 70)) for number in (1, 2)]
        wait_until(lambda pair=children: any(child.poll() is not None for child in pair), "the end of a share")
        for child in children:  # the other one may wait for what the killed one has not done
            child.kill()
            child.end()
    children = [start("out", f"{number}/2") for number in (2, 1)]
    results = [child.end() for child in children]
    assert [code for code, _, _ in results] == [0, 0], results
    assert digests(tmp_path / "out") == whole


def test_without_duplicates_to_find_shares_may_run_one_after_another(tmp_path):
    write_twice(tmp_path / "in")
    config = config_of(tmp_path, "out", filter={})
    assert [prepare(config, share=Share(number, 3), processes=1) is None for number in (1, 2)] == [True, True]
    assert not (tmp_path / "out/index.json").exists()
    index = prepare(config, share=Share(3, 3), processes=1)
    assert index == load_index(tmp_path / "out")
    prepare(config_of(tmp_path, "whole", filter={}), processes=1)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert prepare(config, share=Share(2, 3), processes=1) == index


def test_a_share_leaves_the_parts_of_others_alone(tmp_path):
    write_twice(tmp_path / "in")
    config = config_of(tmp_path, "out", filter={})
    prepare(config, share=Share(1, 2), processes=1)
    stray = tmp_path / "out/train/part-00001-0000.tar.tmp-1"
    stray.write_bytes(b"being written")
    own = tmp_path / "out/train/part-00002-0009.tar.tmp-1"
    own.write_bytes(b"left by a killed run")
    prepare(config, share=Share(1, 2), processes=1)
    assert stray.exists() and not own.exists()
    prepare(config, processes=1)
    assert not stray.exists()


@pytest.mark.parametrize(
    ("filters", "number", "what"),
    [
        ({}, 2, "timed out after 0 s waiting for the tokenizer, which --part 1 makes"),
        ({"deduplicate": True}, 1, "timed out after 0 s waiting for the hashes of the other parts"),
        ({"deduplicate": True}, 2, "timed out after 0 s waiting for what --part 1 makes of the hashes of all parts"),
    ],
)
def test_a_share_that_waits_for_others_in_vain_says_for_what(tmp_path, monkeypatch, filters, number, what):
    write_twice(tmp_path / "in")
    monkeypatch.setattr(steps, "WAIT_S", 0.0)
    config = config_of(tmp_path, "out", filter=filters)
    with pytest.raises(LockedError, match=f"{what}.*; start the other parts and run this command again"):
        prepare(config, share=Share(number, 2), processes=1)
    assert not list((tmp_path / "out").glob("index.json*"))


def test_a_folder_has_one_run_or_the_shares_of_one_n(tmp_path):
    with lock_folder(tmp_path, Share(1, 2)), lock_folder(tmp_path, Share(2, 2)):
        for share, what in (
            (Share(2, 2), r"another `--part 2/2` \(process \d+\) is writing"),
            (Share(3, 3), "`--part 3/3` does not go with the parts of 2 that are being prepared here; use the same n"),
            (Share(), r"another `pretrain prepare` \(parts of 2\) is writing"),
        ):
            with pytest.raises(LockedError, match=what), lock_folder(tmp_path, share):
                pass
    what = r"another `pretrain prepare` \(process \d+\)"
    with lock_folder(tmp_path), pytest.raises(LockedError, match=what), lock_folder(tmp_path, Share(1, 2)):
        pass
    with lock_folder(tmp_path, Share(3, 3)):
        pass


def test_a_share_waits_until_the_one_that_came_first_has_said_its_n(tmp_path, monkeypatch):
    write, (first_has_it, waits, go) = lock._write_owner, (threading.Event() for _ in range(3))

    def write_slowly(descriptor, owner):
        first_has_it.set()
        assert go.wait(LIMIT_S)
        write(descriptor, owner)

    def hold(share):
        with lock_folder(tmp_path, share):
            return share

    class Clock(FakeClock):
        def sleep(self, seconds):
            waits.set()
            poll_pause()

    monkeypatch.setattr(lock, "_write_owner", write_slowly)
    monkeypatch.setattr(io, "time", Clock())  # no time passes for the one that waits
    with ThreadPoolExecutor() as pool:
        first = pool.submit(hold, Share(1, 2))
        assert first_has_it.wait(LIMIT_S)
        second = pool.submit(hold, Share(2, 2))
        assert waits.wait(LIMIT_S)
        assert not second.done()
        go.set()
        assert [first.result(), second.result()] == [Share(1, 2), Share(2, 2)]


def test_what_is_written_in_common_is_written_by_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "time", FakeClock())
    what = r"\.claim\.lock"
    with claim_lock(tmp_path), pytest.raises(LockedError, match=what), claim_lock(tmp_path):
        pass


def test_a_damaged_folder_is_repaired_by_a_single_run_only(tmp_path):
    write_twice(tmp_path / "in")
    config = config_of(tmp_path, "out", filter={})
    prepare(config, processes=1)
    before = digests(tmp_path / "out")
    (tmp_path / "out/train/part-00001-0000.tar").unlink()
    with pytest.raises(
        DataError, match=r"the folder was complete, and is damaged: .*; repair it by the command without"
    ):
        prepare(config, share=Share(1, 2), processes=1)
    prepare(config, processes=1)
    assert digests(tmp_path / "out") == before


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/b", "1/2/3", "-1/2"])
def test_what_is_not_a_part_is_refused(text):
    with pytest.raises(ConfigError, match=r"part='.*' is not a part; use i/n with 1 <= i <= n, such as 1/4"):
        parse_share(text)


def test_a_complete_folder_keeps_no_lock_file_and_can_be_opened_again(tmp_path):
    write_twice(tmp_path / "in")
    config = config_of(tmp_path, "out", filter={})
    for number in (1, 2):
        prepare(config, share=Share(number, 2), processes=1)
        assert any((tmp_path / "out").glob(".*.lock")) == (number == 1)
    assert prepare(config, processes=2) is not None
    assert not list((tmp_path / "out").glob(".*"))


def test_a_lock_file_that_its_owner_removes_guards_nothing_to_the_next_one(tmp_path, monkeypatch):
    flock, name = lock._flock, tmp_path / lock.PREPARE_LOCK
    removed = []

    def take_after_removal(descriptor, operation, wait_s):
        if not removed and name.exists() and os.fstat(descriptor).st_ino == name.stat().st_ino:
            removed.append(name.unlink())  # by the owner before, between the opening and the lock
        return flock(descriptor, operation, wait_s)

    monkeypatch.setattr(lock, "_flock", take_after_removal)
    what = r"another `pretrain prepare` \(process \d+\)"
    with lock_folder(tmp_path), pytest.raises(LockedError, match=what), lock_folder(tmp_path):
        pass
    assert removed
