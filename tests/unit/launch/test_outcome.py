"""Which rank a job failed of, and what is kept of it."""

import os
import socket

import pytest

from pretrain.run.folder import RunDir, begin_attempt, end_attempt
from pretrain_launch.exits import describe_failure, find_cause, job_code, note_outcome, reason_of


@pytest.mark.parametrize(
    ("ended", "cause", "code"),
    [
        ({0: 0, 1: 0}, None, 0),
        ({1: 0}, None, 0),
        ({0: 75, 1: 0}, None, 75),
        ({0: 76, 1: -9}, (1, -9), 137),
        ({0: 76, 1: 143}, (1, 143), 143),
        ({0: 143, 1: -9}, (1, -9), 137),
        ({1: 65, 0: 70}, (1, 65), 65),
        ({1: 70, 0: 65}, (1, 70), 70),
        ({0: 76, 1: 74}, (1, 74), 74),
        ({1: 76, 0: 76}, (1, 76), 76),
        ({1: 75, 0: 76}, None, 75),
        ({1: 75, 0: 69}, None, 75),
        ({1: 0, 0: 69}, (0, 69), 69),
        ({2: 69, 0: -6, 1: -6}, (2, 69), 69),
        ({2: -6, 0: 69, 1: 76}, (2, -6), 134),
        ({0: 76, 2: -6}, (2, -6), 134),
        ({1: 75, 0: 74}, (0, 74), 74),
    ],
)
def test_the_cause_is_what_failed_first_and_never_who_only_noticed(ended, cause, code):
    assert find_cause(ended) == cause
    assert job_code(cause, ended) == code


def test_a_signal_is_named_with_what_it_mostly_means():
    host = socket.gethostname()
    assert describe_failure(3, 65) == f"rank 3 on {host} failed with exit code 65"
    assert describe_failure(3, -9).startswith(
        f"rank 3 on {host} was killed by SIGKILL (exit code 137): the kernel's out-of-"
    )
    assert describe_failure(3, -10) == f"rank 3 on {host} was killed by SIGUSR1 (exit code 138)"


def test_the_reason_is_the_last_error_that_the_rank_has_printed(tmp_path):
    (tmp_path / "out").write_text(
        "error: rank 1: old\nhello\nerror: rank 1: rank 0 is frozen, at:\nerror:     a.py:1\n"
    )
    assert reason_of((1, 76), tmp_path / "out") == "rank 1: rank 0 is frozen"
    assert reason_of((1, 76), tmp_path / "absent") == describe_failure(1, 76)
    assert reason_of((1, -9), tmp_path / "out") == describe_failure(1, -9)


@pytest.fixture
def run(tmp_path):
    """A run whose attempt this process has begun."""
    run = RunDir(tmp_path)
    begin_attempt(run, "run", {})
    return run


def last(run: RunDir) -> tuple[object, object]:
    """How its last attempt ended."""
    attempt = run.read_record()["attempts"][-1]
    return attempt.get("exit_code"), attempt.get("reason")


def test_what_rank_0_could_not_write_the_launcher_does(run):
    note_outcome(run, os.getpid(), 137, "rank 0 was killed", is_known=False)
    assert last(run) == (137, "rank 0 was killed")


def test_what_rank_0_knew_better_stays(run):
    end_attempt(run, {"exit_code": 65, "reason": "a bad shard"})
    note_outcome(run, os.getpid(), 65, "rank 0 failed", is_known=True)
    assert last(run) == (65, "a bad shard")


def test_that_a_peer_was_gone_is_replaced_by_why(run):
    end_attempt(run, {"exit_code": 76, "reason": "rank 1 is gone"})
    note_outcome(run, os.getpid(), 137, "rank 1 was killed", is_known=False)
    assert last(run) == (137, "rank 1 was killed")


def test_an_attempt_of_another_process_is_left_alone(run, tmp_path):
    note_outcome(run, os.getpid() + 1, 137, "rank 0 was killed", is_known=False)
    assert last(run) == (None, None)
    note_outcome(RunDir(tmp_path / "none"), os.getpid(), 137, "killed before there was a run", is_known=False)
