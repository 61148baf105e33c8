"""What comes next is written into each checkpoint, and a resumption that would train on something else is refused."""

import hashlib
from dataclasses import replace
from pathlib import Path

from pretrain.checkpoint.format import MANIFEST, list_checkpoints, load_manifest
from pretrain.run.folder import RunDir
from pretrain.tracking.audit import read_audit
from pretrain.utils.io import write_json
from tests.helpers.refused import CONFIG, check_refused, fill_folder


def test_a_checkpoint_knows_the_samples_of_its_next_step_and_others_are_refused(warm, corpus, tmp_path):
    folder = fill_folder(tmp_path, CONFIG, corpus)
    command = ("train", "a.yaml", "train.steps=20")
    done = warm(*command, "train.stop_after=6", "checkpoint.keep=9", cwd=folder)
    assert done.code == 0, done.stderr
    run = RunDir(Path(folder / "runs/run"))
    rows = read_audit(run.audit)
    *earlier, last = list_checkpoints(run.checkpoints)
    assert [load_manifest(path).state["next_digest"] for path in earlier] == [rows[2].digest, rows[4].digest]
    assert len(next_digest := load_manifest(last).state["next_digest"]) == 16
    assert load_manifest(last).topology["config"] == hashlib.sha256(run.config.read_bytes()).hexdigest()

    manifest = load_manifest(last)
    write_json(last / MANIFEST, replace(manifest, state={**manifest.state, "next_digest": "0" * 16}).to_json())
    words = ["the samples of step 7 are not those that its checkpoint says come next (digest 0000000000000000 -> "]
    check_refused(warm(*command, "train.stop_after=8", cwd=folder), 65, *words, "resume.allow=[data]")
    assert len(read_audit(run.audit)) == 6
    done = warm(*command, "train.stop_after=8", "resume.allow=[data]", cwd=folder)
    assert done.code == 0 and words[0] in done.stderr, done.stderr
    rows = read_audit(run.audit)
    assert [row.step for row in rows] == list(range(1, 9)) and rows[6].digest == next_digest
    assert warm(*command, cwd=folder).code == 0
    newest = list_checkpoints(run.checkpoints)[-1]
    assert load_manifest(newest).state["next_digest"] == "", "nothing is to come"
