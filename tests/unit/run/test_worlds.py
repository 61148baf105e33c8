"""Which loss of a rank another world follows, of how many ranks, and which ends the job."""

import json
import signal

import pytest

from pretrain.run.folder import RunDir
from pretrain.run.recovery import Recovery
from pretrain.run.worlds import Worlds

MAIN = 4711


@pytest.fixture
def run(tmp_path) -> RunDir:
    """A run in its second attempt, whose rank 0 is `MAIN`."""
    attempts = [{"number": 1, "pid": 1}, {"number": 2, "pid": MAIN}]
    record = {"id": "a", "name": "run", "created": "2026-11-28T12:00:00+00:00", "attempts": attempts}
    (tmp_path / "run.json").write_text(json.dumps(record))
    return RunDir(tmp_path)


def write_step(run: RunDir, step: int, attempt: int = 2) -> None:
    """The ledger's last row."""
    run.audit.write_text(json.dumps({"step": step, "attempt": attempt}) + "\n")


def worlds(run: RunDir, mode: str = "spare", sizes: tuple[int, ...] = (1, 2, 3, 4)) -> Worlds:
    """Decisions on a config that fits `sizes`."""
    return Worlds(run, mode, lambda ranks: ranks in sizes)


@pytest.mark.parametrize(
    ("code", "before", "after"),
    [
        (-signal.SIGKILL, True, True),
        (-signal.SIGSEGV, True, True),
        (-signal.SIGABRT, True, True),
        (76, True, True),
        (70, False, True),
        (69, False, True),
        (-signal.SIGTERM, False, False),
        (-signal.SIGINT, False, False),
        (143, False, False),
        *((code, False, False) for code in (64, 65, 66, 73, 74, 77)),
    ],
)
def test_a_lost_rank_is_followed_and_what_would_fail_again_is_not(run, code, before, after):
    """`before` its world has done a step: the ledger's last row is of the attempt before."""
    write_step(run, 20, attempt=1)
    assert worlds(run).may_follow(code, MAIN) is before
    write_step(run, 21)
    assert worlds(run).may_follow(code, MAIN) is after


def test_three_recoveries_within_ten_steps_are_followed_by_none(run, capsys):
    decisions = worlds(run)
    for number, step in enumerate((20, 25, 29), start=1):
        write_step(run, step)
        assert decisions.may_follow(-9, MAIN)
        assert decisions.follow([0, 1], 1, "rank 1", 2.0) == [0, 1]
        assert decisions.recovery == Recovery(number, "rank 1", 2.0)
    assert not decisions.may_follow(-9, MAIN)
    assert capsys.readouterr().err == "launch: 3 recoveries within 10 steps: the job ends\n"
    write_step(run, 30)
    assert decisions.may_follow(-9, MAIN)


@pytest.mark.parametrize(
    ("mode", "sizes", "lost", "places"),
    [
        ("spare", (4,), 1, [0, 1, 2, 3]),
        ("shrink", (1, 2, 3, 4), 1, [0, 2, 3]),
        ("shrink", (1, 2, 4), 0, [1, 2]),
        ("shrink", (4,), 0, []),
    ],
)
def test_a_world_is_as_large_or_the_next_smaller_that_fits_without_the_lost_place(run, mode, sizes, lost, places):
    decisions = worlds(run, mode, sizes)
    assert decisions.follow([0, 1, 2, 3], lost, "a rank", 1.0) == places
    assert decisions.recovery.number == bool(places)
