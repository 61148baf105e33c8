"""What the watchdogs of three ranks find, on a clock that the test turns: one is frozen, hangs,
fails, is killed ..."""

import re
import socket
from collections.abc import Callable

import pytest

from pretrain.run import heartbeat
from pretrain.run.heartbeat import LONG_FACTOR
from pretrain.run.watchdog import LAST_WORDS_S, OBSERVE_S, STORE_GONE_S, STORE_STAYS_S, TICK_S
from tests.unit.run.simulated import Rank, SimulatedJob

RANKS = 3
PHASE_S = 60.0
"""`engine.timeout_s`."""
STEPS, BAD_STEP = 40, 20
FOUND_S = OBSERVE_S + 2.0
"""So long after the limit the rank is named, and all have heard of it."""
HOST = socket.gethostname()


@pytest.fixture
def job(monkeypatch, tmp_path) -> SimulatedJob:
    """Three ranks."""
    return SimulatedJob(monkeypatch, RANKS, tmp_path)


def in_data(culprit: int, does: Callable[[Rank], object]) -> Callable[[Rank], None]:
    """A loop like the trainer's, whose ranks meet once a step; one of them does something else
    while it reads data."""
    return taking_steps(lambda rank, phase: does(rank) if (rank.number, phase) == (culprit, "data") else None)


def taking_steps(at_bad_step: Callable[[Rank, str], object]) -> Callable[[Rank], None]:
    """The same, with what each rank does in each phase of one step."""

    def program(rank: Rank) -> None:
        for step in range(1, STEPS + 1):
            for phase in ("data", "update"):
                rank.progress.enter(phase, step)
                rank.sleep(0.4)
                if step == BAD_STEP:
                    at_bad_step(rank, phase)
            rank.all_reduce()
        rank.progress.enter("close")

    return program


def hang_in_data(rank: Rank) -> None:
    """What a source of data does that hangs."""
    rank.hang()


def codes(job: SimulatedJob) -> list[int | None]:
    """The exit code of each rank; None: it is frozen."""
    return [rank.code for rank in job.ranks]


def said(job: SimulatedJob) -> list[str]:
    """What each rank has printed."""
    return [rank.log.read_text() if rank.log.exists() else "" for rank in job.ranks]


@pytest.mark.parametrize("culprit", [1, 0])
def test_a_frozen_rank_is_named_by_the_others_with_phase_step_and_stack(job, culprit):
    job.run(in_data(culprit, Rank.freeze), PHASE_S)
    others = [rank for rank in range(RANKS) if rank != culprit]
    assert codes(job) == [None if rank == culprit else 76 for rank in range(RANKS)]
    for rank in others:
        assert f"rank {culprit} ({HOST}, process " in said(job)[rank]
        assert "is frozen or gone: no heartbeat for" in said(job)[rank]
        assert [farewell[0] for farewell in job.ranks[rank].farewells] == [76]
        assert PHASE_S < job.ranks[rank].ended_at - began_to_wait(job.ranks[rank]) < PHASE_S + FOUND_S
    told = said(job)[others[0]] + said(job)[others[1]]
    seen = [int(step) for step in re.findall("it was last seen in [a-z]+ of step ([0-9]+) for [0-9]+ s, at:", told)]
    assert seen and set(seen) <= {BAD_STEP - 1, BAD_STEP}, "the last heartbeat may be of a second before"
    assert " program\n" in told, "the stack of its last heartbeat"


def began_to_wait(rank: Rank) -> float:
    """When a rank began the phase in which it has ended."""
    return rank.progress.now.since


@pytest.mark.parametrize("culprit", [2, 0])
def test_a_hung_rank_is_named_and_shows_all_of_its_threads_and_those_that_wait_are_not_blamed(job, culprit):
    job.run(in_data(culprit, hang_in_data), PHASE_S)
    assert codes(job) == [76] * RANKS
    for rank in range(RANKS):
        line = next(line for line in said(job)[rank].splitlines() if "hangs:" in line)
        assert f"rank {culprit} ({HOST}, process " in line
        assert f"hangs: in data of step {BAD_STEP} for " in line
        assert f"(limit {PHASE_S:.0f} s), while 2 ranks wait for it, at:" in line
        shown = " in hang_in_data\n" in said(job)[rank]
        assert shown == (rank == culprit), "faulthandler's stack, of the hung rank only"
        assert PHASE_S < job.ranks[rank].ended_at - began_to_wait(job.ranks[culprit]) < PHASE_S + FOUND_S
    assert " hang_in_data\n" in said(job)[0]


@pytest.mark.parametrize(("culprit", "fault"), [(1, "freeze"), (2, "hang"), (1, "exit")])
def test_one_rank_that_reads_all_heartbeats_finds_the_culprit_for_all(job, monkeypatch, culprit, fault):
    """As in a job of many ranks."""
    faults = {"freeze": Rank.freeze, "hang": hang_in_data, "exit": lambda rank: rank.exit(-9)}
    monkeypatch.setattr(heartbeat, "TURNS", 1)
    job.run(in_data(culprit, faults[fault]), PHASE_S)
    for rank in job.ranks:
        if rank.number != culprit:
            assert rank.code == 76 and f"rank {culprit} ({HOST}, process " in said(job)[rank.number]


def test_of_ranks_in_the_same_phase_the_one_that_has_not_begun_the_collective_is_named(job):
    hangs = {(1, "update"): hang_in_data}
    job.run(taking_steps(lambda rank, phase: hangs.get((rank.number, phase), id)(rank)), PHASE_S)
    assert codes(job) == [76] * RANKS
    assert f"rank 1 ({HOST}, process " in said(job)[0].partition("hangs: in update")[0]


def test_where_all_wait_at_the_same_place_no_rank_is_named(job):
    """As when the network is down."""
    job.run(taking_steps(lambda rank, phase: hang_in_data(rank) if phase == "update" else None), PHASE_S)
    assert codes(job) == [76] * RANKS
    assert "all 3 ranks stand still at the same place: none can be named" in said(job)[0]


@pytest.mark.parametrize("culprit", [1, 0])
def test_survivors_say_at_once_which_rank_is_gone(job, culprit):
    job.run(in_data(culprit, lambda rank: rank.exit(-9)), PHASE_S)
    assert codes(job) == [-9 if rank == culprit else 76 for rank in range(RANKS)]
    for rank in job.ranks:
        if rank.number != culprit:
            assert f"rank {culprit} ({HOST}, process " in said(job)[rank.number]
            what = "is gone: the store" if culprit == 0 else "is frozen or gone: no heartbeat"
            assert what in said(job)[rank.number]
            assert not rank.farewells, "it is the lost connection that tells, not a limit"
            stays_s = STORE_STAYS_S if rank.number == 0 else 0.0
            assert rank.ended_at - job.ranks[culprit].ended_at < OBSERVE_S + 1.0 + stays_s


@pytest.mark.parametrize(("slow", "answer_s"), [(2, 0.25), (0, 0.25), (0, 0.6)])
def test_a_busy_survivor_names_the_rank_that_is_gone_too(job, slow, answer_s):
    """Its questions to the store take so long that a missed heartbeat shows late."""
    job.answer_s = {slow: answer_s}
    job.run(in_data(1, lambda rank: rank.exit(-9)), PHASE_S)
    assert codes(job) == [76, -9, 76]
    for rank in (0, 2):
        assert f"rank 1 ({HOST}, process " in said(job)[rank]
        assert "is frozen or gone: no heartbeat" in said(job)[rank]


def test_a_survivor_that_loses_its_connection_late_hears_the_same_from_the_one_with_the_store(job):
    """Alone it would take the rank with the store, which has ended by then, for the lost one."""
    job.ranks[2].late_s = OBSERVE_S / 2
    job.run(in_data(1, lambda rank: rank.exit(-9)), PHASE_S)
    assert codes(job) == [76, -9, 76]
    assert f"rank 1 ({HOST}, process " in said(job)[2]


def test_a_rank_that_is_not_in_a_collective_leaves_a_job_whose_store_is_gone(job):
    """Rank 2 would read data for long: nothing but the store tells it that rank 0 was killed."""
    does = {(0, "data"): lambda rank: rank.exit(-9), (2, "data"): hang_in_data}
    job.run(taking_steps(lambda rank, phase: does.get((rank.number, phase), id)(rank)), PHASE_S)
    assert codes(job) == [-9, 76, 76]
    assert "rank 0 (" in said(job)[2] and "is gone: the store of the job, which it keeps at n0:29500" in said(job)[2]
    assert job.ranks[2].ended_at - job.ranks[0].ended_at < STORE_GONE_S + 2.0


@pytest.mark.parametrize(("culprit", "answer_s"), [(1, {}), (1, {2: 0.7}), (0, {})])
def test_the_first_error_is_told_to_all_and_they_end_with_its_code(job, culprit, answer_s):
    """Also where a rank hears of it late, and where it is the store's keeper that fails."""
    job.answer_s = answer_s

    def fail(rank: Rank) -> None:
        rank.dog.tell(65, "shard 7 is damaged")
        rank.exit(65)

    job.run(in_data(culprit, fail), PHASE_S)
    assert codes(job) == [65] * RANKS
    assert all(rank.dog.is_failing for rank in job.ranks)
    for rank in range(RANKS):
        assert (f"rank {culprit} failed first: shard 7 is damaged" in said(job)[rank]) == (rank != culprit)


def test_a_rank_that_fails_of_the_same_a_moment_later_says_so_itself(job):
    def fail(rank: Rank, phase: str) -> None:
        if phase == "update":
            rank.sleep(0.4 * rank.number)
            rank.dog.tell(65, f"rank {rank.number} has no space left")
            rank.exit(65)

    job.run(taking_steps(fail), PHASE_S)
    assert codes(job) == [65] * RANKS
    assert said(job) == [""] * RANKS, "no watchdog has ended any"


def test_a_rank_that_leaves_early_is_named(job):
    def leave(rank: Rank) -> None:
        rank.progress.enter("close")
        rank.sleep(2.0)  # a heartbeat says so
        rank.exit(0)

    job.run(in_data(2, leave), PHASE_S)
    assert codes(job) == [76, 76, 0]
    for rank in (0, 1):
        assert f"rank 2 left at step {BAD_STEP}" in said(job)[rank]


def test_ranks_that_never_come_up_are_named_and_are_no_hang(job):
    def meet(rank: Rank) -> None:
        rank.progress.enter("meet")
        rank.all_reduce()

    job.run(meet, PHASE_S, absent=(2,))
    assert codes(job) == [69, 69, None]
    # Both wait for it, and either may be the one that says so.
    assert f"rank 2 never came up; rank {'0' if 'rank 0 (' in said(job)[0] else '1'} ({HOST}" in said(job)[0]


def test_a_store_that_never_comes_up_is_told(job):
    def meet(rank: Rank) -> None:
        rank.progress.enter("meet")
        rank.all_reduce()

    job.run(meet, PHASE_S, absent=(0,))
    assert codes(job) == [None, 69, 69]
    assert "the rank that keeps the store at n0:29500 never came up, or cannot be reached" in said(job)[1]


@pytest.mark.parametrize("phase", ["data", "save"])
def test_a_rank_may_take_as_long_as_its_phase_allows(job, phase):
    """Also where the others wait in one whose limit is shorter."""
    limit_s = PHASE_S * (LONG_FACTOR if phase == "save" else 1)

    def take_long(rank: Rank) -> None:
        rank.progress.enter(phase)
        rank.sleep(limit_s - 1.0)

    job.run(in_data(1, take_long), PHASE_S)
    assert codes(job) == [0] * RANKS
    assert said(job) == [""] * RANKS


@pytest.mark.parametrize("culprit", [1, 0])
def test_a_rank_that_was_stopped_and_goes_on_within_the_limit_is_no_hang(job, culprit):
    def stop(rank: Rank) -> None:
        job.later(PHASE_S - 2.0, rank.go_on)
        rank.freeze()

    job.run(in_data(culprit, stop), PHASE_S)
    assert codes(job) == [0] * RANKS
    assert said(job) == [""] * RANKS


def test_a_job_that_was_stopped_as_a_whole_goes_on_however_long_that_was(job):
    """As where a scheduler suspends it."""
    job.run(in_data(1, lambda rank: job.stop_all(3600.0)), PHASE_S)
    assert codes(job) == [0] * RANKS
    assert said(job) == [""] * RANKS


def test_a_job_that_was_stopped_while_its_ranks_were_looked_at_is_looked_at_anew(job):
    """Two ranks have waited beyond their own limit, and so read all heartbeats: these are old when
    they wake."""

    def save(rank: Rank) -> None:
        rank.progress.enter("save")
        rank.sleep(2 * PHASE_S)
        job.stop_all(3600.0)
        rank.sleep(OBSERVE_S - 1.0)

    job.run(in_data(1, save), PHASE_S)
    assert codes(job) == [0] * RANKS
    assert said(job) == [""] * RANKS


def test_a_rank_that_closes_is_not_ended_because_the_others_have_left(job):
    def program(rank: Rank) -> None:
        in_data(0, lambda rank: None)(rank)
        rank.sleep(PHASE_S if rank.number == 2 else 0.0)

    job.run(program, PHASE_S)
    assert codes(job) == [0] * RANKS
    assert job.ranks[2].ended_at > job.ranks[0].ended_at + STORE_GONE_S


def test_a_rank_that_never_closes_is_named(job):
    def program(rank: Rank) -> None:
        in_data(0, lambda rank: None)(rank)
        if rank.number == 2:
            rank.hang()

    job.run(program, PHASE_S)
    assert codes(job) == [0, 0, 76]
    assert f"rank 2 ({HOST}, process " in said(job)[2] and f"in close of step {STEPS}" in said(job)[2]


def test_one_process_alone_that_hangs_is_named(monkeypatch, tmp_path):
    job = SimulatedJob(monkeypatch, 1, tmp_path)
    job.run(in_data(0, hang_in_data), PHASE_S)
    assert codes(job) == [76]
    assert f"rank 0 ({HOST}, process " in said(job)[0] and " in hang_in_data\n" in said(job)[0]
    assert PHASE_S < job.ranks[0].ended_at - began_to_wait(job.ranks[0]) <= PHASE_S + OBSERVE_S + 2 * TICK_S


def test_a_farewell_that_never_returns_does_not_hold_a_process(job):
    def program(rank: Rank) -> None:
        rank.dog.farewell = lambda code, reason: rank.hang()
        in_data(2, hang_in_data)(rank)

    job.run(program, PHASE_S)
    assert codes(job) == [76] * RANKS
    late_s = FOUND_S + LAST_WORDS_S
    assert all(rank.ended_at - began_to_wait(job.ranks[2]) < PHASE_S + late_s for rank in job.ranks)
