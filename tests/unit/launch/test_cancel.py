"""`pretrain launch cancel` and `resubmit` where there is nothing to do, or nobody answers (the rest: `-m slurm`)."""

import json

import pytest

from pretrain.errors import LaunchError, LockedError
from pretrain.run.folder import RunDir, begin_attempt
from pretrain_launch.journal import append_row, mark_of_cancel
from pretrain_launch.spec import load_spec, write_spec
from pretrain_launch.submit import cancel, resubmit
from tests.helpers.clock import FakeClock
from tests.unit.launch.test_submit import spec

ROW = {"event": "start", "job": "7", "array": None, "restart": 0, "nodes": ["n1"], "world_size": 1, "step": 0, "at": ""}


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunDir:
    """A run with a job, where there are no commands of Slurm."""
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = RunDir(tmp_path / "run")
    folder.launch.mkdir(parents=True)
    (folder.launch / "journal.jsonl").write_text(json.dumps(ROW) + "\n")
    (folder.launch / "spec.json").write_text("{}")
    return folder


def squeue(run: RunDir, line: str) -> None:
    """Makes a squeue that answers with a line."""
    script = run.path.parent / "squeue"
    script.write_text(f"#!/bin/sh\necho '{line}'\n")
    script.chmod(0o755)


def test_a_run_without_a_job_is_not_cancelled(tmp_path):
    run = RunDir(tmp_path)
    begin_attempt(run, "first", {})
    for do in (lambda: cancel([tmp_path], 0, print), lambda: resubmit(tmp_path, print)):
        with pytest.raises(LaunchError, match=r"the run has no Slurm job; start it with pretrain launch slurm"):
            do()
    assert not mark_of_cancel(run).exists()


def test_a_run_is_marked_even_where_slurm_does_not_answer(run):
    with pytest.raises(LaunchError, match=r"Slurm does not answer about job 7; try again where squeue works"):
        cancel([run.path], 0, print)
    assert mark_of_cancel(run) == run.launch / "cancelled"
    assert mark_of_cancel(run).is_file()


@pytest.mark.parametrize(("code", "state"), [(0, "done"), (77, "failed"), (75, "stopped")])
def test_a_run_that_is_over_is_said_to_be_and_stays_what_it_is(run, code, state):
    end = {"event": "end", "job": "7", "restart": 0, "exit_code": code, "reason": "", "decision": "end", "at": ""}
    with (run.launch / "journal.jsonl").open("a") as file:
        file.write(json.dumps(end) + "\n")
    squeue(run, "")
    said = []
    cancel([run.path], 0, said.append)
    assert said == [f"run: job 7 had ended already: {state}"]
    assert not mark_of_cancel(run).exists()


def test_a_job_that_does_not_end_in_time_is_said_to_be_ended_by_slurm(run, monkeypatch):
    """Slurm's commands are scripts: the job runs on whatever it is sent."""
    squeue(run, "7|7|RUNNING|None|n1|0:10|1:00|x")
    scancel = run.path.parent / "scancel"
    scancel.write_text(f'#!/bin/sh\necho "$@" >> {run.path.parent / "sent"}\n')
    scancel.chmod(0o755)
    said = []
    monkeypatch.setattr("pretrain_launch.submit.time", FakeClock())
    cancel([run.path], 90.0, said.append)
    assert said == ["job 7: asked to save and end", "job 7: has not ended in 90 s: Slurm ends it", "run: cancelled"]
    assert (run.path.parent / "sent").read_text().splitlines() == ["--batch --signal=USR1 7", "7"]


def test_the_runs_of_a_sweep_are_cancelled_at_once(run, tmp_path):
    """One runs, one waits, one has ended."""
    runs = [run.path]
    for number, name in ((8, "second"), (9, "third")):
        folder = RunDir(tmp_path / name)
        folder.launch.mkdir(parents=True)
        (folder.launch / "journal.jsonl").write_text(json.dumps({**ROW, "job": str(number)}) + "\n")
        runs.append(folder.path)
    squeue(run, "7|7|RUNNING|None|n1|0:10|1:00|x\n8|8|PENDING|Priority||0:00|1:00|x")
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "sent"}\n')
    (tmp_path / "scancel").chmod(0o755)
    said = []
    cancel(runs, 0, said.append)
    assert said == ["third: job 9 had ended already: lost", "run: cancelled", "second: cancelled"]
    assert (tmp_path / "sent").read_text().splitlines() == ["8", "7"]
    assert [mark_of_cancel(RunDir(path)).exists() for path in runs] == [True, True, False]


@pytest.mark.parametrize(
    ("state", "fix"),
    [("PENDING", "wait for it, or cancel it"), ("RUNNING", "wait for it"), ("COMPLETING", "it is ending: try again")],
)
def test_a_run_whose_job_is_in_the_queue_is_not_submitted_again(run, state, fix):
    squeue(run, f"7|7|{state}|None|n1|0:10|1:00|x")
    mark_of_cancel(run).touch()
    with pytest.raises(LockedError, match=rf"job 7 of this run is {state}; {fix}"):
        resubmit(run.path, print)
    assert mark_of_cancel(run).exists()


def test_a_resubmission_excludes_the_nodes_that_have_failed_the_run_while_others_are_up(run, monkeypatch):
    """A job's own requeue excludes its chain's; a later resubmission keeps what an earlier one has excluded."""

    def tool(name: str, lines: str) -> None:
        script = run.path.parent / name
        script.write_text(f"#!/bin/sh\n{lines}\n")
        script.chmod(0o755)

    def fail(chain: str, node: str) -> None:
        append_row(run, {**ROW, "event": "end", "chain": chain, "exit_code": 137, "failed_node": node})

    squeue(run, "")
    asked = run.path.parent / "asked"
    tool("sbatch", f'echo "$@" >>{asked}; echo 8')
    tool("sinfo", "printf '%s\\n' 'n1 idle day*' 'n2 mix day*' 'n3 down day*' 'n4 idle night'")
    write_spec(spec(run=str(run.path), nodes=1, node_counts=[1], site={"sbatch": ["--exclude=n9"]}), "")
    chain = load_spec(run.launch / "spec.json").chain
    for node in ("n1", "n2", "n1"):
        fail(chain, node)
    said = []
    assert resubmit(run.path, said.append) == "8"
    assert said == ["n1: ranks were killed there 2 times; excluded from this job"]
    command = asked.read_text().splitlines()[-1].split()
    assert [item for item in command if item.startswith("--exclude=")][-1] == "--exclude=n9,n1"
    assert load_spec(run.launch / "spec.json").exclude == ["n1"]
    assert resubmit(run.path, said.append) == "8"
    assert asked.read_text().count("--exclude=n9,n1 ") == 2
    for _ in range(2):
        fail(load_spec(run.launch / "spec.json").chain, "n2")
    resubmit(run.path, said.append)
    assert said[-1] == "n1, n2: ranks were killed there 2 times; too few other nodes are up"
    assert load_spec(run.launch / "spec.json").exclude == []
