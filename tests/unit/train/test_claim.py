"""What an attempt finds of those that were killed before it."""

from pretrain.run.folder import RunDir
from pretrain.train.claim import sweep
from pretrain.utils.io import set_fault_hook, write_file


class Death(BaseException):
    """The end of the process: nothing catches it."""


def die(operation, path):
    """Ends the process before it gives a file its name."""
    if operation == "rename":
        raise Death


def test_whatever_a_killed_attempt_was_writing_is_removed_and_nothing_else(tmp_path):
    run = RunDir(tmp_path)
    kept = [run.record, run.checkpoints / "best.json", run.path / "attention" / "step-00000010.png"]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        write_file(path, b"old")
    set_fault_hook(die)
    for path in (*kept, run.checkpoints / ".trial"):
        try:
            write_file(path, b"new")
        except Death:
            continue
    set_fault_hook(None)
    (run.checkpoints / ".tmp-step-00000020-0a1b2c3d").mkdir()
    sweep(run)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
    assert not list(run.checkpoints.glob(".tmp-*"))
