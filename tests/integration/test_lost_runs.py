"""Checkpoints that are gone, all of them or under a reader's eyes: the real commands, beside a real run."""

import shutil
import signal
from pathlib import Path

from pretrain.checkpoint.format import list_checkpoints
from tests.helpers.refused import CONFIG, check_refused, fill_folder, visible
from tests.helpers.waiting import wait_until
from tests.helpers.warm_jobs import start_warm


def test_a_run_without_its_checkpoints_is_refused_by_whatever_still_tells_of_them(warm, corpus, tmp_path):
    folder = fill_folder(tmp_path, CONFIG, corpus)
    result = warm("train", "a.yaml", cwd=folder)
    assert result.code == 0, result.stderr
    run: Path = folder / "runs/run"
    shutil.rmtree(run / "checkpoints")
    record = (run / "run.json").read_bytes()
    words = ["run.json tells of one of step 4", "never starts over by itself", "restore the checkpoints, or start over"]
    check_refused(warm("train", "a.yaml", cwd=folder), 66, "runs/run/checkpoints", *words)
    check_refused(warm("launch", "local", "a.yaml", cwd=folder), 66, "runs/run/checkpoints", *words)
    assert (run / "run.json").read_bytes() == record, "a refused start is no attempt"
    (run / "run.json").unlink()
    audit = (run / "audit.jsonl").read_bytes()
    check_refused(warm("train", "a.yaml", cwd=folder), 66, "audit.jsonl has rows, and run.json is missing")
    assert (run / "audit.jsonl").read_bytes() == audit
    assert "checkpoints" not in visible(run)


def test_models_are_read_beside_a_run_that_removes_its_checkpoints(warm, corpus, tmp_path):
    folder = fill_folder(tmp_path, CONFIG, corpus)
    checkpoints = folder / "runs/run/checkpoints"
    longer = ["checkpoint.every_steps=2", "train.steps=1000000"]
    run = start_warm("train", "a.yaml", *longer, cwd=folder, output=folder / "said", ranks=1)
    try:
        wait_until(lambda: list_checkpoints(checkpoints), "a first checkpoint", run.is_running)
        commands = [
            "generate runs/run --prompt alpha --max-tokens 2", "export runs/run released --no-check",
            "average runs/run --last 2 --output mean", "inspect runs/run --verify --tensors", "report runs/run",
        ]  # fmt: skip
        for command in commands:
            before = list_checkpoints(checkpoints)
            result = warm(*command.split(), cwd=folder)
            assert result.code == 0, (command, result.stderr)
            wait_until(lambda seen=before: not seen[-1].exists(), "what was there is gone", run.is_running)
    finally:
        run.send(signal.SIGTERM)
        code = run.end()
    assert code == 75, run.output()
