"""A run folder has one owner: processes that race, die, are stopped and wake up."""

import errno
import os
import re
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pretrain.errors import EXIT_LOCKED, DiskError, LockedError
from pretrain.run import lease, owner
from pretrain.run.lease import Lease, refuse_if_owned
from pretrain.run.owner import find_owner, highest_number, path_of
from tests.helpers.clock import FakeClock
from tests.helpers.owners import RunClock, race_rounds, working
from tests.helpers.waiting import LIMIT_S, make_old, pass_time, wait_until


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run folder, outside of any Slurm job."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    return tmp_path / "run"


def no_loss(error: LockedError) -> None:
    """What a lease that nobody takes over calls."""
    raise AssertionError(error)


def check_one_winner(rounds: list[list[int]], num_processes: int) -> None:
    """In each round one process got the lease, with a number higher by one than in the round before."""
    for count, numbers in enumerate(rounds):
        assert len(numbers) == num_processes
        assert [number for number in numbers if number] == [count % 5 + 1], f"round {count}: {numbers}"


def test_one_of_many_that_start_at_once_becomes_the_owner(tmp_path):
    check_one_winner(race_rounds(tmp_path, 6, 20), 20)


@pytest.mark.long
def test_a_thousand_racing_starts_give_one_owner_each_time(tmp_path):
    check_one_winner(race_rounds(tmp_path, 50, 20), 20)


def test_a_second_start_is_refused_and_told_who_owns_the_folder(run):
    with working(run) as attempt:
        what = rf"run: in use by process {attempt.process.pid} on \S+ since .*; wait for it, stop it, or use another"
        with pytest.raises(LockedError, match=what):
            Lease(run / "lease")
        attempt.wait_for_rows(run, 20)  # and it goes on


def test_a_look_at_a_folder_tells_who_owns_it_and_takes_nothing(run):
    refuse_if_owned(run / "lease")
    assert not run.exists()
    with working(run) as attempt:
        with pytest.raises(LockedError, match=rf"run: in use by process {attempt.process.pid}"):
            refuse_if_owned(run / "lease")
        attempt.process.stdin.close()
        attempt.process.wait()
    refuse_if_owned(run / "lease")
    assert [path.name for path in (run / "lease").iterdir()] == ["00000001.json"]
    (run / "file").write_text("")
    with pytest.raises(DiskError, match="file: cannot read it: Not a directory"):
        refuse_if_owned(run / "file")


def test_a_slurm_job_is_named_by_what_squeue_calls_it(run):
    job = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "6", "SLURM_RESTART_COUNT": "2"}
    with working(run, **job), pytest.raises(LockedError, match=r"on \S+ \(Slurm job 70_6, restart 2\) since"):
        Lease(run / "lease")


def test_a_released_folder_is_free_and_the_number_goes_on(run):
    for number in (1, 2, 3):
        mine = Lease(run / "lease", no_loss)
        assert mine.number == number
        mine.release()
        mine.release()
        assert sorted(run.rglob("*.*")) == [path_of(run / "lease", number)]
        assert "lease" not in [thread.name for thread in threading.enumerate()]


def test_a_killed_owner_is_succeeded_at_once(run, monkeypatch, caplog):
    monkeypatch.setattr(owner, "_watch", None)  # there is nothing to wait for
    with working(run) as attempt:
        attempt.process.kill()
        attempt.process.wait()
    mine = Lease(run / "lease", no_loss)
    assert mine.number == 2
    assert f"{run} taken over: process {attempt.process.pid} on " in caplog.text and " is dead" in caplog.text
    mine.release()


def test_an_owner_that_is_dead_and_not_yet_buried_is_dead(run):
    with working(run) as attempt:
        attempt.process.kill()
        status = Path(f"/proc/{attempt.process.pid}/stat")
        wait_until(lambda: status.read_text().split()[2] == "Z", "its death")
        Lease(run / "lease", no_loss).release()


def test_another_process_with_the_number_of_a_dead_owner_does_not_hold_the_folder(run, monkeypatch):
    Lease(run / "lease", no_loss).release()
    path = path_of(run / "lease", 1)
    living = replace(find_owner(path).owner, released=False)
    path.write_bytes(living.to_json())
    with pytest.raises(LockedError):
        Lease(run / "lease")
    path.write_bytes(replace(living, process_start="1").to_json())
    monkeypatch.setattr(owner, "_watch", None)
    Lease(run / "lease", no_loss).release()


def test_a_stopped_owner_on_this_machine_is_never_robbed(run):
    with working(run) as attempt:
        attempt.stop()
        path = path_of(run / "lease", 1)
        os.utime(path, (0, 0))  # silent for half a century
        with pytest.raises(LockedError, match=rf"in use by process {attempt.process.pid}"):
            Lease(run / "lease")
        attempt.process.send_signal(signal.SIGCONT)
        attempt.wait_for_rows(run, 20)


def test_an_owner_elsewhere_that_gives_signs_of_life_is_not_robbed(run, monkeypatch):
    monkeypatch.setattr(owner, "WATCH_S", LIMIT_S)
    with working(run, machine="n2", heartbeat_s=0.02) as attempt:
        path = path_of(run / "lease", 1)
        os.utime(path, (0, 0))  # clocks differ: it is the change that counts
        with pytest.raises(
            LockedError, match=rf"in use by process {attempt.process.pid} on \S+ since \S+; wait for it"
        ):
            Lease(run / "lease")


def test_an_owner_elsewhere_is_succeeded_when_it_was_silent_for_the_time_of_a_lease(run, monkeypatch, caplog):
    clock = FakeClock()
    monkeypatch.setattr(owner, "time", clock)
    monkeypatch.setattr(owner, "LEASE_S", 3600)
    with working(run, machine="n2") as attempt:
        attempt.process.kill()
    path = path_of(run / "lease", 1)
    what = r"silent for (\d+) s; if it is dead, start again in (\d+) s; else wait for it"
    with pytest.raises(LockedError, match=what) as caught:
        Lease(run / "lease")
    assert clock.now - 1000.0 >= owner.WATCH_S, "so long it is watched"
    silent_s, left_s = map(int, re.search(what, str(caught.value)).groups())
    assert abs(silent_s + left_s - 3600) <= 1, "each is rounded"
    make_old(path, 3601)
    mine = Lease(run / "lease", no_loss)
    assert mine.number == 2
    assert int(re.search(r"has given no sign of life for (\d+) s", caplog.text)[1]) >= 3601
    mine.release()


def test_an_owner_elsewhere_that_releases_the_folder_while_it_is_watched_is_succeeded(run, monkeypatch):
    watch = owner._watch
    monkeypatch.setattr(owner, "WATCH_S", LIMIT_S)
    with working(run, machine="n2", heartbeat_s=3600) as attempt:

        def end_and_watch(*arguments: Any) -> str:
            attempt.process.stdin.close()
            return watch(*arguments)

        monkeypatch.setattr(owner, "_watch", end_and_watch)
        mine = Lease(run / "lease", no_loss)
        assert mine.number == 2
        mine.release()


@pytest.mark.parametrize("content", [b"", b'{"number": 1', b"[]", b'{"number": "1"}'])
def test_a_file_that_names_nobody_counts_as_an_owner_until_it_is_old(run, monkeypatch, content):
    monkeypatch.setattr(owner, "time", FakeClock())
    monkeypatch.setattr(owner, "LEASE_S", 3600)
    path = path_of(run / "lease", 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(LockedError, match=r"in use by another process, which is starting, silent for \d+ s"):
        Lease(run / "lease")
    os.utime(path, (0, 0))
    Lease(run / "lease", no_loss).release()


def test_a_requeue_of_the_same_job_takes_over_at_once_and_no_other_start_does(run, monkeypatch):
    monkeypatch.setattr(owner, "time", FakeClock())
    monkeypatch.setattr(owner, "LEASE_S", 3600)
    monkeypatch.setattr(owner, "_machine", lambda: "n1")
    with working(run, machine="n2", SLURM_JOB_ID="77", SLURM_RESTART_COUNT="1", SLURM_CLUSTER_NAME="east") as attempt:
        attempt.stop()
        for job, restart, cluster in (
            ("77", "1", "east"),  # a second start within the job
            ("77", "0", "east"),  # an older one, which woke up
            ("78", "2", "east"),  # another job
            ("77", "2", "west"),  # that of another cluster
            ("77", "x", "east"),
        ):
            environment = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restart, "SLURM_CLUSTER_NAME": cluster}
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            with pytest.raises(LockedError, match=r"Slurm job 77@east, restart 1\).* silent"):
                Lease(run / "lease")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
        monkeypatch.setattr(owner, "_watch", None)
        mine = Lease(run / "lease", no_loss)
        assert mine.number == 2
        mine.release()


def check_woken_attempts(run: Path, num_restarts: int, pass_by: Callable[[], None], stall_s: float = 0.0) -> None:
    """Each attempt is stopped, succeeded by a requeue of its job, and woken long after."""
    start = partial(working, run, stall_s=stall_s, SLURM_JOB_ID="77")
    with ExitStack() as stack:
        old = stack.enter_context(start())
        old.wait_for_rows(run, 50)
        for restart in range(1, num_restarts + 1):
            old.stop()
            before = (run / "rows").read_bytes().split()
            new = stack.enter_context(start(SLURM_RESTART_COUNT=str(restart)))
            assert new.first_line == f"owner {restart + 1}"
            new.wait_for_rows(run, 50)
            committed = {path.name for path in run.glob("commit-*")}
            pass_by()
            old.process.send_signal(signal.SIGCONT)
            assert old.process.wait(LIMIT_S) == EXIT_LOCKED
            what = rf"{run}: the lease of this attempt \(.*\) was taken over by process {new.process.pid} on .*"
            assert re.search(what + "; leave the run to its owner", old.process.stderr.read())
            new.wait_for_rows(run, 50)
            names = {path.name for path in run.glob("commit-*")}
            assert committed <= names
            assert not [name for name in names - committed if name.startswith(f"commit-{restart}-")]
            ours = (run / "rows").read_bytes().split()[len(before) :]
            # One row may have passed its check when the process was stopped.
            assert ours.count(b"%d" % restart) <= 1 and set(ours) <= {b"%d" % restart, b"%d" % (restart + 1)}
            assert highest_number(run / "lease") == restart + 1
            old = new


def test_an_old_attempt_that_wakes_up_ends_with_73_and_leaves_the_run_alone(run):
    check_woken_attempts(run, 3, RunClock(run).pass_minute)


@pytest.mark.long
def test_fifty_attempts_that_wake_up_leave_the_run_alone(run):
    check_woken_attempts(run, 50, partial(pass_time, 0.2), stall_s=0.1)


def test_a_lease_that_was_lost_is_not_held_and_its_release_frees_nothing(run, monkeypatch):
    lost: list[LockedError] = []
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setattr(lease, "HEARTBEAT_S", 3600)
    clock = FakeClock()
    monkeypatch.setattr(lease, "time", clock)
    old = Lease(run / "lease", lost.append)
    old.check()
    assert old.is_held()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    new = Lease(run / "lease", no_loss)
    assert (old.number, new.number) == (1, 2)
    with pytest.raises(LockedError, match=r"run: the lease of this attempt \(process .*\) was taken over by process"):
        old.check()
    clock.sleep(lease.STALL_S)
    old.check_after_stall()  # it has looked so lately
    clock.sleep(0.1)
    with pytest.raises(LockedError):
        old.check_after_stall()
    assert not old.is_held()
    content = path_of(run / "lease", 2).read_bytes()
    old.release()
    assert [(path.name, path.read_bytes()) for path in (run / "lease").iterdir()] == [("00000002.json", content)]
    assert new.is_held()
    new.release()


def test_who_looks_while_a_new_owner_tidies_up_names_that_owner(run, monkeypatch):
    """It lists the folder, and then the new owner makes its file and removes the one that was listed."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setattr(lease, "HEARTBEAT_S", 3600)
    old = Lease(run / "lease", no_loss)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    new: list[Lease] = []

    def list_slowly(folder: Path) -> int:
        number = highest_number(folder)
        if not new:
            monkeypatch.setattr(lease, "highest_number", highest_number)
            new.append(Lease(folder, no_loss))
        return number

    monkeypatch.setattr(lease, "highest_number", list_slowly)
    with pytest.raises(LockedError, match=r"was taken over by process .* \(Slurm job 77, restart 1\)"):
        old.check()
    assert [path.name for path in (run / "lease").iterdir()] == ["00000002.json"]
    new[0].release()


def test_the_heartbeat_goes_on_through_errors_and_ends_with_the_lease(run, monkeypatch):
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.01)
    failures = []

    def fail(path: Path) -> None:
        failures.append(path)
        raise OSError(errno.EIO, "Input/output error")

    lost: list[LockedError] = []
    mine = Lease(run / "lease", lost.append)
    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", fail)
        wait_until(lambda: len(failures) > 3, "heartbeats that fail")
    path = path_of(run / "lease", 1)
    os.utime(path, (0, 0))
    wait_until(lambda: path.stat().st_mtime > 0, "one that does not")
    assert not lost
    path.unlink()
    wait_until(lambda: lost, "the loss")
    assert "was removed; leave the run to its owner" in str(lost[0])
    mine.release()
    assert not list((run / "lease").iterdir())


def test_a_racer_that_was_stopped_does_not_come_between_later_owners(run, monkeypatch):
    """It saw owner 1 go, and makes number 2 when owner 3 lives and has removed the second's file."""
    Lease(run / "lease", no_loss).release()
    others: list[Lease] = []

    def look_slowly(folder: Path, number: int, us: owner.Owner) -> str:
        reason = owner.refuse_if_held(folder, number, us)
        if not others:
            monkeypatch.setattr(lease, "refuse_if_held", owner.refuse_if_held)
            for _ in range(2):
                others.append(Lease(folder, no_loss))
                if len(others) < 2:
                    others[0].release()
        return reason

    monkeypatch.setattr(lease, "refuse_if_held", look_slowly)
    with pytest.raises(LockedError, match="in use by process"):
        Lease(run / "lease", no_loss)
    assert [other.number for other in others] == [2, 3]
    assert [path.name for path in (run / "lease").iterdir()] == ["00000003.json"]
    assert others[1].is_held()
    others[1].release()


def test_a_file_system_without_hard_links_has_one_owner_too(run, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    mine = Lease(run / "lease", no_loss)
    assert [path.name for path in (run / "lease").iterdir()] == ["00000001.json"]
    with pytest.raises(LockedError):
        Lease(run / "lease")
    assert not lease._create(run / "lease", replace(owner.this_process(), number=1))
    mine.check()
    mine.release()


def test_an_answer_of_nfs_that_was_lost_is_not_a_lost_race(run, monkeypatch):
    link = os.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    mine = Lease(run / "lease", no_loss)
    assert mine.number == 1
    mine.release()


def test_a_folder_that_cannot_be_written_or_read_is_a_disk_error(run, monkeypatch):
    (run / "file").parent.mkdir()
    (run / "file").write_text("")
    with pytest.raises(DiskError, match="file: cannot create the folder"):
        Lease(run / "file")
    mine = Lease(run / "lease", no_loss)

    def fail(folder: Path) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(lease, "highest_number", fail)
    with pytest.raises(DiskError, match="lease: cannot read it: Input/output error; see to the file system"):
        mine.check()
    with pytest.raises(DiskError, match="lease: cannot claim it: Input/output error"):
        Lease(run / "lease")
    monkeypatch.undo()
    mine.release()
