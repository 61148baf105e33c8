"""Two attempts at one run, of one Slurm job that was requeued and of two jobs: one goes on, the other ends with 73."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pretrain.checkpoint.format import list_checkpoints, load_manifest
from pretrain.errors import EXIT_LOCKED
from tests.helpers.holds import HELD, Hold
from tests.helpers.runs import RunMaker, assert_same_run, rank_pids
from tests.helpers.waiting import finish

STEPS = 60
RUN = (f"train.steps={STEPS}", "engine={kind: ddp, zero_stage: 0}")


@contextmanager
def started(runs: RunMaker, hold: Hold, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A start of the run `ours` that waits where it is held, and of which nothing is left at the end."""
    process = runs.start("ours", *RUN, HELD, **hold.environment, **environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in [*rank_pids(process).values(), process.pid]:
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.long
def test_an_old_attempt_that_wakes_up_cannot_go_on_with_a_run_that_its_requeue_has(tmp_path, corpus):
    runs = RunMaker(tmp_path, corpus)
    runs.train("golden", *RUN)
    holds = [Hold(tmp_path, name, step=step) for name, step in (("old", 40), ("new", 45))]
    with started(runs, holds[0], SLURM_JOB_ID="77") as old:
        runs.wait_for_step("ours", 30, old)
        ranks = rank_pids(old)
        for pid in ranks.values():
            os.kill(pid, signal.SIGSTOP)

        refused = runs.complete("ours", *RUN, expect=EXIT_LOCKED, SLURM_JOB_ID="78", SLURM_RESTART_COUNT="5")
        assert f"ours/run: in use by process {ranks[0]} on " in refused and "(Slurm job 77) since" in refused

        with started(runs, holds[1], SLURM_JOB_ID="77", SLURM_RESTART_COUNT="1") as new:
            runs.wait_for_step("ours", 25, new, after_attempt=1)
            new_pid = rank_pids(new)[0]
            holds[0].release()  # awake, it goes on at once
            for pid in ranks.values():
                os.kill(pid, signal.SIGCONT)
            output = finish(old)[0]
            assert old.returncode == EXIT_LOCKED, output
            assert f"was taken over by process {new_pid} on " in output and "leave the run to its owner" in output
            holds[1].release()
            output = finish(new)[0]
            assert new.returncode == 0, output
            assert "was an earlier start of this Slurm job" in output

    assert_same_run(runs, "ours", "golden", STEPS)
    attempts = json.loads(runs.folder("ours").record.read_text())["attempts"]
    assert [(attempt["lease"], attempt.get("exit_code")) for attempt in attempts] == [(1, None), (2, 0)]
    newest = list_checkpoints(runs.folder("ours").checkpoints)[-1]
    assert load_manifest(newest).topology["lease"] == 2
    assert [path.name for path in runs.folder("ours").lease.iterdir()] == ["00000002.json"]
