"""Whether a job goes on after its ranks have ended, and how restarts without progress are counted."""

import json

import pytest

from pretrain.run.folder import RunDir
from pretrain_launch.job import FINAL, Outcome, decide
from pretrain_launch.job_start import is_at_limit, is_requeued, was_cancelled
from pretrain_launch.journal import append_row, count_idle_restarts, journal_path, last_end, read_journal


def outcome(code: int, **facts) -> Outcome:
    return Outcome(**({"code": code, "reason": "why", "has_progressed": False, "idle_restarts": 0} | facts))


@pytest.mark.parametrize("code", [75, 76, 1, 128 + 9, 128 + 11, 128 + 15])
def test_what_a_restart_can_help_is_requeued(code):
    assert decide(outcome(code), 3).kind == "requeue"
    assert decide(outcome(code, idle_restarts=2), 3).kind == "requeue"
    assert decide(outcome(code, may_requeue=False), 3).kind == "next"


@pytest.mark.parametrize("code", sorted(FINAL))
def test_what_a_restart_cannot_help_ends_with_its_code(code):
    decision = decide(outcome(code, has_progressed=True), 3)
    assert (decision.kind, decision.code, decision.reason) == ("end", code, "why")


def test_a_bug_is_met_again_unless_there_was_a_checkpoint_since():
    assert decide(outcome(70), 3).kind == "end"
    assert decide(outcome(70, has_progressed=True), 3).kind == "requeue"


def test_a_run_that_is_done_ends_well_even_when_it_was_cancelled_meanwhile():
    assert decide(outcome(0, is_cancelled=True), 3) == decide(outcome(0), 3)
    assert decide(outcome(0), 3).kind == "end"


@pytest.mark.parametrize("code", [75, 76, 137])
def test_what_the_user_has_cancelled_does_not_come_back(code):
    decision = decide(outcome(code, is_cancelled=True, has_progressed=True), 3)
    assert (decision.kind, decision.code) == ("end", code)
    assert decision.reason == "cancelled by the user (why)"


def test_restarts_in_a_row_without_a_checkpoint_end_the_chain_and_say_so():
    decision = decide(outcome(137, idle_restarts=3), 3)
    assert (decision.kind, decision.code) == ("end", 137)
    assert decision.reason == "3 restarts in a row without a new checkpoint: why"
    assert decide(outcome(137, idle_restarts=1), 1).kind == "end"
    short = decide(outcome(75, idle_restarts=3, reason="stopped at the time limit before the first rank"), 3).reason
    assert short.endswith(
        "limit before the first rank: the time limit is too short to start; submit it with a longer --time"
    )
    preempted = decide(outcome(75, idle_restarts=3, reason="stopped by SIGUSR1"), 3).reason
    assert preempted == "3 restarts in a row without a new checkpoint: stopped by SIGUSR1"


def starts(*steps: int, chain: str = "a") -> list[dict]:
    return [{"event": "start", "chain": chain, "step": step} for step in steps]


@pytest.mark.parametrize(
    ("steps", "now", "idle"),
    [
        ((), 0, 0),  # nothing has started
        ((0,), 0, 0),  # the first start is no restart
        ((0, 0), 0, 1),
        ((0, 0, 0, 0), 0, 3),
        ((0, 0, 0, 0), 20, 0),  # the last one has saved
        ((0, 20, 20, 20), 20, 3),  # the first has saved, three have not
        ((0, 20, 20), 20, 2),
        ((0, 0, 20, 20), 20, 2),
        ((40,), 40, 0),  # another chain has brought it here
    ],
)
def test_idle_restarts_are_those_in_a_row_up_to_now(steps, now, idle):
    assert count_idle_restarts(starts(*steps), "a", now) == idle


@pytest.mark.parametrize(
    ("limit", "run", "near"),
    [
        ("00:30:00", "00:27:00", True),
        ("00:30:00", "00:25:30", True),  # its end may have been moved, and the limit be rounded up
        ("00:30:00", "00:25:29", False),
        ("1-00:00:00", "23:58:00", True),
        ("1-00:00:00", "1-00:00:20", True),  # Slurm is about to end it
        ("UNLIMITED", "23:58:00", False),
    ],
)
def test_a_job_is_at_its_limit_from_the_earliest_signal_of_slurm_on(limit, run, near):
    assert is_at_limit({"TimeLimit": limit, "RunTime": run}, 120) is near
    assert not is_at_limit({"JobState": "RUNNING"}, 120)
    assert not is_at_limit(None, 120)


def test_a_new_submission_is_a_new_beginning():
    assert count_idle_restarts([*starts(0, 0, 0, 0, chain="old"), *starts(0, chain="new")], "new", 0) == 0


def test_a_journal_is_read_back_without_what_a_crash_has_torn(tmp_path):
    run = RunDir(tmp_path)
    assert read_journal(run) == []
    append_row(run, {"event": "start", "chain": "a", "step": 0})
    with journal_path(run).open("a") as file:
        file.write('{"event": "end", "chain"')
    append_row(run, {"event": "end", "chain": "a", "decision": "requeue"})
    rows = read_journal(run)
    assert [row["event"] for row in rows] == ["start", "end"]
    assert all("at" in row for row in rows)
    assert last_end(rows, "a") == rows[1]
    assert last_end(rows, "b") is None
    assert [json.loads(line) for line in journal_path(run).read_text().splitlines()[::2]] == rows


def test_only_committed_checkpoints_count_as_progress(tmp_path):
    run = RunDir(tmp_path)
    assert run.newest_step() == 0
    for name in ("step-00000020", "step-00000040", ".tmp-step-00000060", "step-00000080.bad-damaged"):
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "manifest.json").touch()
    (run.checkpoints / "step-00000100").mkdir()
    assert run.newest_step() == 40


@pytest.mark.parametrize(
    ("job", "cancelled", "requeued"),
    [
        (None, False, False),  # the controller is away
        ({"JobState": "RUNNING", "Reason": "None", "Restarts": "1"}, False, False),
        ({"JobState": "CANCELLED", "Reason": "None", "Restarts": "1"}, True, False),
        ({"JobState": "COMPLETING", "Reason": "None", "Restarts": "1"}, True, False),
        ({"JobState": "COMPLETING", "Reason": "TimeLimit", "Restarts": "1"}, False, False),
        ({"JobState": "COMPLETING", "Reason": "None", "Restarts": "2"}, False, True),
        ({"JobState": "PENDING", "Reason": "BeginTime", "Restarts": "2"}, False, True),
    ],
)
def test_a_cancelled_job_is_told_from_one_that_slurm_requeues_or_ends_at_its_limit(job, cancelled, requeued):
    assert was_cancelled(job, 1) is cancelled
    assert is_requeued(job, 1) is requeued
