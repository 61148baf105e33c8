"""Run folders that have lost their checkpoints are refused by the real command, and not begun anew."""

import shutil
from pathlib import Path

from tests.helpers.refused import CONFIG, check_refused, fill_folder, visible


def test_a_run_without_its_checkpoints_is_refused_by_whatever_still_tells_of_them(warm, corpus, tmp_path):
    folder = fill_folder(tmp_path, CONFIG, corpus)
    result = warm("train", "a.yaml", cwd=folder)
    assert result.code == 0, result.stderr
    run: Path = folder / "runs/run"
    shutil.rmtree(run / "checkpoints")
    words = ["run.json tells of one of step 2", "never starts over by itself", "restore the checkpoints, or start over"]
    check_refused(warm("train", "a.yaml", cwd=folder), 66, "runs/run/checkpoints", *words)
    (run / "run.json").unlink()
    audit = (run / "audit.jsonl").read_bytes()
    check_refused(warm("train", "a.yaml", cwd=folder), 66, "audit.jsonl has rows, and run.json is missing")
    assert (run / "audit.jsonl").read_bytes() == audit
    assert "checkpoints" not in visible(run)
