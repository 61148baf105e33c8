"""Ranks of real runs over gloo that are lost in each phase, and the course of the run: that of nobody's loss.

A module under `extend` has a rank kill, stop or crash itself, once, where a file of the plan says: the losses of a run
come one after another, each in the world that the loss before has left.
"""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recovery
from pretrain.tracking.audit import read_audit
from tests.helpers.fork_server import SOURCE_PATH
from tests.helpers.runs import RunMaker, assert_same_run
from tests.helpers.servers import serve_s3

pytestmark = pytest.mark.long

# A file `03.update.45.1.KILL` is the third loss: rank 1, by SIGKILL, as it enters `update` of step 45 or a later one.
LOSSES = """
import os, signal
from pathlib import Path

import torch

from pretrain import dist
from pretrain.checkpoint.save import Save
from pretrain.run.heartbeat import Progress

PLAN = Path(os.environ["PLAN"])
ERRORS = {"bug": lambda: RuntimeError("lost on purpose"), "memory": lambda: torch.OutOfMemoryError("no memory is left")}
now = 0

def lose_at(phase):
    for path in sorted(PLAN.iterdir())[:1]:
        number, name, step, rank, how = path.name.split(".")
        if (name, rank) != (phase, os.environ.get("RANK")) or now < int(step):
            return
        path.unlink()
        if how in ERRORS:
            raise ERRORS[how]()
        os.kill(os.getpid(), getattr(signal, f"SIG{how}"))

def enter(self, phase, step=None, before=Progress.enter):
    global now
    before(self, phase, step)
    now = self.now.step
    lose_at(phase)

def wrap(owner, name, phase):
    before = getattr(owner, name)
    def call(*arguments, **named):
        lose_at(phase)
        return before(*arguments, **named)
    setattr(owner, name, call)

Progress.enter = enter
wrap(dist, "start_all_reduce_sum", "exchange")
for part in ("_write", "_commit", "_read_again", "_retain"):
    wrap(Save, part, f"save{part}")
"""
LOST = [
    "data.5.1.KILL",
    "forward-backward.16.0.KILL",
    "exchange.27.1.KILL",
    "update.38.0.SEGV",
    "save.49.1.KILL",
    "save_write.60.1.KILL",
    "save_commit.71.0.KILL",
    "save_read_again.82.1.KILL",
    "save_retain.93.0.KILL",
    "evaluate.104.1.KILL",
    "load.0.1.KILL",  # in the recovery from the one before
    "update.115.0.bug",
    "exchange.126.1.memory",
    "data.137.1.STOP",
    "forward-backward.148.0.STOP",
]
RUN = ("checkpoint.every_steps=10", "eval.every_steps=8", "engine.timeout_s=600")


@pytest.fixture
def plan(tmp_path):
    """Makes the environment of a run that loses ranks so."""
    (tmp_path / "losses.py").write_text(LOSSES)

    def plan(*losses: str) -> dict[str, str]:
        folder = tmp_path / "plan"
        folder.mkdir()
        for number, loss in enumerate(losses):
            (folder / f"{number:02d}.{loss}").touch()
        return {"PLAN": str(folder), "PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE_PATH}"}

    return plan


def rows_of(path: Path, *left_out: str) -> list[dict[str, object]]:
    """The rows of a file without measured times."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.endswith(left_out)} for row in rows]


def attempts_of(runs: RunMaker, name: str) -> list[dict[str, Any]]:
    """The entries of run.json."""
    return json.loads(runs.folder(name).record.read_text())["attempts"]


def recoveries_of(runs: RunMaker, name: str) -> list[dict[str, object]]:
    """Those of recoveries."""
    return [attempt["recovery"] for attempt in attempts_of(runs, name) if "recovery" in attempt]


@pytest.mark.parametrize(("stage", "copies"), [(2, 0), (3, 1)])
def test_a_rank_that_is_lost_in_any_phase_leaves_no_trace_in_the_course(make_run, plan, stage, copies):
    items = (*RUN, f"engine.zero_stage={stage}")
    make_run.complete("whole", *items)
    environment = plan(*LOST)
    recover = ("run.recover=spare", f"run.recover_every_steps={copies}", "extend=[losses]")
    output = make_run.complete("lost", *items, *recover, **environment)
    assert not list(Path(environment["PLAN"]).iterdir()), output
    assert_same_run(make_run, "lost", "whole", 160)
    recoveries = recoveries_of(make_run, "lost")
    # The tenth world was lost before it was in run.json.
    numbers = [number for number in range(1, 16) if number != 10]
    assert [entry["number"] for entry in recoveries if "seconds" in entry] == numbers
    losses = [LOST[number - 1].split(".") for number in numbers]
    lost = [re.findall(r"rank (\d)", str(entry["lost"]))[-1] for entry in recoveries]
    assert lost == [rank for _, _, rank, _ in losses]
    if copies:
        begun = [attempt["from_step"] for attempt in attempts_of(make_run, "lost") if "recovery" in attempt]
        pairs = [(step, int(loss[1])) for step, loss in zip(begun, losses, strict=True) if loss[1] != "0"]
        assert [pair for pair in pairs if pair[0] < pair[1] - 3] == [], "the step, and two that were done"
    assert "in 1 start and 14 recoveries" in output
    timed = ("_s", "memory_bytes", "data_wait", "checkpoint_step", "mfu")
    ours, expected = (rows_of(make_run.folder(name).metrics, *timed) for name in ("lost", "whole"))
    assert [row for row in ours if len(row) > 1] == [row for row in expected if len(row) > 1]


FEW = [
    "data.5.0.KILL",
    "forward-backward.16.1.KILL",
    "load.0.0.KILL",  # in the recovery from the one before
    "exchange.27.0.SEGV",
    "save_write.30.1.KILL",
    "update.42.1.STOP",
]
KINDS = [
    (1, ["parallel.tensor=2"]),
    (0, ["parallel.sequence=2"]),
    (0, ["model.decoder.experts={count: 4, top_k: 2}", "parallel.experts=2"]),
    (0, ["optim.ema.horizon_steps=10"]),
    (1, ["init.from=BASE", "finetune={kind: lora, rank: 4}"]),
    (1, ["checkpoint.upload=s3://lab/runs"]),
]


@pytest.mark.parametrize(("copies", "kind"), KINDS)
def test_losses_leave_no_trace_in_other_kinds_of_runs(make_run, plan, tmp_path, copies, kind):
    items = ["checkpoint.every_steps=10", "engine.zero_stage=1", "train.stop_after=50", *kind]
    if "init.from=BASE" in kind:
        make_run.train("base", "train.stop_after=10", "checkpoint.every_steps=10")
        items = [item.replace("BASE", str(make_run.folder("base").path)) for item in items]
    (tmp_path / "bucket").mkdir()
    with serve_s3({"lab": tmp_path / "bucket"}):
        whole = [item.replace("lab/runs", "lab/whole") for item in items]
        make_run.complete("whole", *whole)
        environment = plan(*FEW)
        recover = ("run.recover=spare", f"run.recover_every_steps={copies}", "extend=[losses]")
        output = make_run.complete("lost", *items, *recover, **environment)
    assert not list(Path(environment["PLAN"]).iterdir()), output
    assert_same_run(make_run, "lost", "whole", 50)
    assert len([entry for entry in recoveries_of(make_run, "lost") if "seconds" in entry]) == len(FEW) - 1


def test_losses_at_random_moments_leave_the_launcher_as_it_was(tmp_path, corpus):
    """Kills, a freeze, and a kill within a recovery."""
    (tmp_path / "data").symlink_to(corpus)
    asked = argparse.Namespace(losses=8, ranks=2, stage=2, seed=5, arms=["spare"])
    found = recovery.drill(tmp_path, asked)["spare"]
    assert found["is_same"] and found["recoveries"] >= 8
    first, last = found["launcher"]["first"], found["launcher"]["last"]
    assert (first["fd"], first["task"]) == (last["fd"], last["task"])
    assert last["resident_mib"] - first["resident_mib"] < 5


def test_a_launcher_that_replaces_no_rank_is_told_of(make_run):
    output = make_run.train("elsewhere", "run.recover=spare", "train.stop_after=1")
    assert "run.recover=spare is for `pretrain launch local` on one machine: a lost rank ends this job" in output


def test_the_fourth_recovery_within_ten_steps_is_none(make_run, plan):
    losses = [f"update.{step}.{step % 2}.KILL" for step in range(25, 29)]
    output = make_run.complete("often", "run.recover=spare", "extend=[losses]", **plan(*losses), expect=137)
    assert "launch: 3 recoveries within 10 steps: the job ends" in output
    assert len(recoveries_of(make_run, "often")) == 3
    make_run.complete("often", "train.stop_after=40")
    assert [row.step for row in read_audit(make_run.folder("often").audit)] == list(range(1, 41))


def test_a_smaller_world_trains_on_the_same_samples(make_run, plan):
    """12 rows by 2: 4 ranks are refused, 3, 2 and 1 share them."""
    items = ("checkpoint.every_steps=10", "model.decoder.dropout=0.0", "train.stop_after=60")
    make_run.complete("whole", *items, ranks=3)
    losses = ("update.15.1.KILL", "data.35.0.KILL")
    make_run.complete("lost", *items, "run.recover=shrink", "extend=[losses]", ranks=3, **plan(*losses))
    assert [attempt["world_size"] for attempt in attempts_of(make_run, "lost")] == [3, 2, 1]
    whole, lost = (list(read_audit(make_run.folder(name).audit)) for name in ("whole", "lost"))
    assert [(row.step, row.tokens, row.digest) for row in lost] == [(row.step, row.tokens, row.digest) for row in whole]
    differences = [abs(float.fromhex(a.loss) / float.fromhex(b.loss) - 1) for a, b in zip(whole, lost, strict=True)]
    assert max(differences) < 1e-6  # sums in another order, in fp32
