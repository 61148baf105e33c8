"""The watchdogs of three real ranks over gloo and real seconds, where one is frozen, hangs, fails or is killed."""

import json
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.waiting import LIMIT_S
from tests.unit.run.watched import BAD_STEP, PHASE_S

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
SCENARIOS = ["freeze-1", "freeze-0", "hang-2", "hang-0", "hangmiddle-1", "kill-1", "kill-0", "fail-1", "leave-2"]
HOST = socket.gethostname()


@dataclass
class Ended:
    """How the ranks of a scenario ended by themselves: exit codes, and what each printed."""

    codes: dict[int, int]
    said: dict[int, str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, Ended]:
    """All scenarios, at the same time: their processes sleep mostly."""
    folder = tmp_path_factory.mktemp("watched")
    command = [sys.executable, "-m", "tests.unit.run.watched", str(folder), *SCENARIOS]
    job = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    found = {}
    for scenario, outcomes in json.loads(job.stdout).items():
        said = {int(path.name): path.read_text() for path in (folder / scenario).iterdir()}
        found[scenario] = Ended({int(rank): code for rank, code in outcomes.items()}, said)
    return found


@pytest.mark.parametrize("culprit", [1, 0])
def test_a_frozen_rank_is_named_by_the_others_with_phase_step_and_stack(ended, culprit):
    job = ended[f"freeze-{culprit}"]
    others = [rank for rank in range(3) if rank != culprit]
    assert job.codes == dict.fromkeys(others, 76)
    for rank in others:
        assert f"rank {culprit} ({HOST}, process " in job.said[rank]
        assert "is frozen or gone: no heartbeat for" in job.said[rank]
    told = job.said[others[0]] + job.said[others[1]]
    seen = [int(step) for step in re.findall("it was last seen in [a-z]+ of step ([0-9]+) for [0-9]+ s, at:", told)]
    assert seen, told
    assert all(0 < step <= BAD_STEP for step in seen), "the last heartbeat may be of a moment before"
    assert "take_steps" in told, "the stack of its last heartbeat"
    assert told.count("farewell 76: rank") == 2


@pytest.mark.parametrize("culprit", [2, 0])
def test_a_hung_rank_is_named_and_shows_all_of_its_threads_and_those_that_wait_are_not_blamed(ended, culprit):
    job = ended[f"hang-{culprit}"]
    assert job.codes == dict.fromkeys(range(3), 76)
    for rank in range(3):
        line = next(line for line in job.said[rank].splitlines() if "hangs:" in line)
        assert f"rank {culprit} ({HOST}, process " in line
        assert f"hangs: in data of step {BAD_STEP} for " in line
        assert f"(limit {PHASE_S:.0f} s), while 2 ranks wait for it, at:" in line
        assert (" in sleep_in_data" in job.said[rank]) == (rank == culprit), (
            "faulthandler's stack, of the hung rank only"
        )
    assert " sleep_in_data\n" in job.said[0]


def test_of_ranks_in_the_same_phase_the_one_that_has_not_begun_the_collective_is_named(ended):
    job = ended["hangmiddle-1"]
    assert job.codes == dict.fromkeys(range(3), 76)
    assert f"rank 1 ({HOST}, process " in job.said[0].partition("hangs: in update")[0]


@pytest.mark.parametrize("culprit", [1, 0])
def test_survivors_say_which_rank_is_gone(ended, culprit):
    job = ended[f"kill-{culprit}"]
    others = [rank for rank in range(3) if rank != culprit]
    assert job.codes == {culprit: -9} | dict.fromkeys(others, 76)
    for rank in others:
        assert f"rank {culprit} ({HOST}, process " in job.said[rank]
        assert ("is gone: the store" if culprit == 0 else "is frozen or gone: no heartbeat") in job.said[rank]
        assert "farewell" not in job.said[rank], "it is the lost connection that tells, not a limit"


def test_the_first_error_is_told_to_all_and_they_end_with_its_code(ended):
    job = ended["fail-1"]
    assert job.codes == {0: job.codes[0], 1: 65, 2: job.codes[2]}
    for rank in (0, 2):
        assert "rank 1 failed first: shard 7 is damaged" in job.said[rank]


def test_a_rank_that_leaves_early_is_named(ended):
    job = ended["leave-2"]
    assert job.codes == {0: 76, 1: 76, 2: 0}
    for rank in (0, 1):
        assert "rank 2" in job.said[rank]
