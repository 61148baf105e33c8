"""A damaged run folder never starts from step 0 by itself, whatever of it is missing or damaged."""

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from pretrain.errors import CheckpointError, PretrainError
from pretrain.run.folder import RunDir, begin_attempt, check_new
from pretrain.tracking.audit import AuditLedger
from pretrain.training.claim import note_commit
from pretrain.utils.io import make_dir
from tests.unit.checkpoint.stand_in import StandIn, manager, save


def start(folder: Path) -> int | None:
    """What a start does about the past: returns the step that it resumes at, None for a start from
    nothing."""
    run = RunDir(folder)
    state = manager(run.checkpoints).load_newest(StandIn(0))
    if state is None:
        check_new(run)
    return None if state is None else state.step


def add_rows(run: RunDir, steps: range, attempt: int, saved: Sequence[int] = ()) -> None:
    """Rows of the ledger and of the metrics, which have one for each save too."""
    ledger = AuditLedger(run.audit)
    for step in steps:
        ledger.append(step=step, tokens=1, digest="0", loss=1.0, grad_norm=1.0, attempt=attempt)
    ledger.close()
    with run.metrics.open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
            if step in saved:
                file.write(json.dumps({"step": step, "checkpoint_step": step}) + "\n")


@pytest.fixture
def run(tmp_path) -> RunDir:
    """A run of two attempts that has saved steps 2, 4 and 6, the first two in its first attempt."""
    run = RunDir(make_dir(tmp_path / "run"))
    begin_attempt(run, "run", {"from_step": 0})
    add_rows(run, range(1, 5), 1, saved=(2, 4))
    save(run.checkpoints, 2, 4)
    note_commit(run, 2)
    begin_attempt(run, "run", {"from_step": 4})
    add_rows(run, range(5, 8), 2, saved=(6,))
    save(run.checkpoints, 6)
    return run


def cut_in_half(path: Path) -> None:
    """Truncates a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def forget_commits(run: RunDir) -> None:
    """A record in which nothing tells of a checkpoint."""
    record = run.read_record()
    record["attempts"] = [attempt | dict.fromkeys(("from_step", "committed_step"), 0) for attempt in record["attempts"]]
    run.record.write_text(json.dumps(record))


def spoil_ledger(run: RunDir) -> None:
    """A ledger with a damaged line in the middle."""
    lines = run.audit.read_bytes().splitlines(keepends=True)
    run.audit.write_bytes(lines[0] + b"{damaged\n" + b"".join(lines[2:]))


def set_all_aside(run: RunDir) -> None:
    """Checkpoints that were found to be damaged."""
    for path in run.checkpoints.iterdir():
        path.rename(path.with_name(f"{path.name}.bad-damaged"))


def drop_manifests(run: RunDir) -> None:
    """Checkpoints without what makes them such."""
    for path in run.checkpoints.glob("*/manifest.json"):
        path.unlink()


def keep_leftovers_only(run: RunDir) -> None:
    """What dead attempts have left, and no checkpoint."""
    for path in run.checkpoints.iterdir():
        path.rename(path.with_name(f".tmp-{path.name}-0"))


RECORD = {
    "whole": lambda run: None,
    "missing": lambda run: run.record.unlink(),
    "cut": lambda run: cut_in_half(run.record),
    "empty": lambda run: run.record.write_bytes(b""),
    "forgetful": forget_commits,
}
LEDGER = {
    "whole": lambda run: None,
    "missing": lambda run: run.audit.unlink(),
    "cut": lambda run: cut_in_half(run.audit),
    "damaged": spoil_ledger,
}
CHECKPOINTS = {
    "missing": lambda run: shutil.rmtree(run.checkpoints),
    "empty": lambda run: (shutil.rmtree(run.checkpoints), run.checkpoints.mkdir()),
    "set aside": set_all_aside,
    "without manifests": drop_manifests,
    "leftovers": keep_leftovers_only,
}


METRICS = {
    "whole": lambda run: None,
    "missing": lambda run: run.metrics.unlink(),
    "cut": lambda run: cut_in_half(run.metrics),
    "empty": lambda run: run.metrics.write_bytes(b""),
}


def tells_nothing(record: str, ledger: str, checkpoints: str, metrics: str) -> bool:
    """As of a run that died before its first save, or of none: no file knows of a commit, or of a
    later attempt."""
    silent = {"forgetful": ("missing", "cut"), "missing": ("missing",)}.get(record, ())
    return ledger in silent and metrics in ("missing", "empty") and checkpoints in ("missing", "empty", "leftovers")


@pytest.mark.parametrize("record", RECORD)
def test_no_damage_to_a_run_that_has_committed_makes_it_start_over(run, tmp_path, record):
    assert start(run.path) == 6
    told = 0
    for number, (ledger, checkpoints, metrics) in enumerate(itertools.product(LEDGER, CHECKPOINTS, METRICS)):
        damaged = RunDir(shutil.copytree(run.path, tmp_path / str(number)))
        RECORD[record](damaged)
        LEDGER[ledger](damaged)
        CHECKPOINTS[checkpoints](damaged)
        METRICS[metrics](damaged)
        if tells_nothing(record, ledger, checkpoints, metrics):
            continue
        with pytest.raises(PretrainError, match=r"step|run\.json|damaged"):
            start(damaged.path)
        told += 1
    assert told == {"forgetful": 68, "missing": 74}.get(record, 80)


def test_what_is_told_is_named_with_the_file_that_tells(run):
    shutil.rmtree(run.checkpoints)
    fix = "restore the checkpoints, or start over under another run.name"
    with pytest.raises(CheckpointError, match=f"run.json tells of one of step 2: a run never starts over .*; {fix}"):
        start(run.path)
    forget_commits(run)
    with pytest.raises(CheckpointError, match=r"audit.jsonl tells of an attempt that began at one of step 4"):
        start(run.path)
    run.audit.rename(aside := run.path / "aside")
    with pytest.raises(CheckpointError, match=r"metrics.jsonl tells of one of step 2"):
        start(run.path)
    aside.rename(run.audit)
    run.record.unlink()
    with pytest.raises(CheckpointError, match=r"audit.jsonl has rows, and run.json is missing"):
        start(run.path)
    run.audit.unlink()
    with pytest.raises(CheckpointError, match=r"metrics.jsonl has rows, and run.json is missing"):
        start(run.path)


def test_runs_that_never_committed_start_over_however_often(tmp_path):
    run = RunDir(make_dir(tmp_path / "run"))
    assert start(run.path) is None
    for number in (1, 2, 3):
        begin_attempt(run, "run", {"from_step": 0})
        run.audit.unlink(missing_ok=True)  # cut back to step 0
        add_rows(run, range(1, 4), number)
        assert start(run.path) is None


def test_the_newest_commit_of_an_attempt_is_noted(tmp_path):
    run = RunDir(make_dir(tmp_path / "run"))
    begin_attempt(run, "run", {"from_step": 0})
    note_commit(run, 5)
    note_commit(run, 10)
    begin_attempt(run, "run", {"from_step": 10})
    note_commit(run, 15)
    assert [attempt["committed_step"] for attempt in run.read_record()["attempts"]] == [10, 15]
