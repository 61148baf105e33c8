"""A step that was not finite, on a disk that is full."""

import json
import logging
from types import SimpleNamespace

from pretrain.checkpoint.state import TrainState
from pretrain.dist import World
from pretrain.run.folder import RunDir
from pretrain.training.bad_step import _advice, report_bad_step
from pretrain.utils.io import set_fault_hook


def full(operation, path):
    """A disk that is full."""
    raise OSError(28, "No space left on device")


def test_a_bad_step_is_written_down_and_a_full_disk_does_not_end_the_run_for_it(tmp_path, caplog):
    # In fp16 the cause of a finite loss is not looked for: no engine is needed.
    config = SimpleNamespace(optim=SimpleNamespace(max_bad_steps=3), engine=SimpleNamespace(precision="fp16"))
    run = SimpleNamespace(config=config, world=World(0, 1, 0), folder=RunDir(tmp_path))
    batch = SimpleNamespace(sample_ids=[5, 7], micro_batches=[])
    report_bad_step(run, TrainState(step=4, bad_steps_in_a_row=1), batch, 1.0, 64)
    assert json.loads((tmp_path / "bad_step.json").read_text())["step"] == 4
    set_fault_hook(full)
    try:
        with caplog.at_level(logging.WARNING, logger="pretrain"):
            report_bad_step(run, TrainState(step=5, bad_steps_in_a_row=2), batch, 1.0, 64)
    finally:
        set_fault_hook(None)
    assert "No space left on device; free space; the report of step 5 is lost" in caplog.text
    assert json.loads((tmp_path / "bad_step.json").read_text())["step"] == 4


def test_a_rollback_is_advised_only_where_there_is_a_checkpoint(tmp_path):
    saving = SimpleNamespace(every_steps=3)
    config = SimpleNamespace(engine=SimpleNamespace(precision="fp32"), checkpoint=saving)
    engine = SimpleNamespace(state=SimpleNamespace(scalars=dict))
    run = SimpleNamespace(config=config, engine=engine, folder=RunDir(tmp_path))
    assert "rollback" not in _advice(run, None, 2)
    assert "`pretrain rollback` goes back" in _advice(run, None, 3), "of step 3, whose save is under way"
    (tmp_path / "checkpoints/step-00000002").mkdir(parents=True)
    assert "`pretrain rollback` goes back" in _advice(run, None, 0)
