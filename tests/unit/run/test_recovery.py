"""A recovery as the ranks of the next world know of it, and what they leave of it in run.json."""

import logging

from pretrain.run.folder import RunDir, begin_attempt
from pretrain.run.recovery import Recovery, describe_recovery, read_recovery


def test_the_first_step_of_another_world_is_noted_once_with_its_seconds(tmp_path, monkeypatch, caplog):
    assert read_recovery() == Recovery()
    for name, value in Recovery(2, "rank 1 on a was killed", 0.0).variable().items():
        monkeypatch.setenv(name, value)
    recovery = read_recovery()
    run = RunDir(tmp_path)
    begin_attempt(run, "a", recovery.facts())
    assert run.read_record()["attempts"][0]["recovery"] == {"number": 2, "lost": "rank 1 on a was killed"}
    with caplog.at_level(logging.INFO):
        recovery = recovery.end(run, 21)
        assert recovery.end(run, 22) == recovery
    assert [text for text in caplog.messages if text.startswith("recovery 2: step 21 is done ")] == caplog.messages
    entry = run.read_record()["attempts"][0]["recovery"]
    assert entry["seconds"] > 0
    assert describe_recovery(entry) == (
        f"recovery 2, a step done after {entry['seconds']:.1f} s, of the loss: rank 1 on a was killed"
    )


def test_the_first_world_of_a_launcher_is_no_recovery(tmp_path):
    assert describe_recovery(None) == ""
    for first in (Recovery(), Recovery(0)):
        assert first.facts() == {} and first.end(RunDir(tmp_path), 1) == first
    assert not any(tmp_path.iterdir())
