"""Pictures in the run folder: one a step, whole or not at all, and none of a step that the run has gone back before."""

import logging
from pathlib import Path

import pytest

from pretrain.tracking.picture_files import Pictures
from pretrain.utils import io
from tests.unit.tracking.test_run_output import make


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_step_has_one_picture_and_those_after_a_commit_are_forgotten(tmp_path):
    pictures = Pictures(tmp_path / "attention")
    pictures.rewind(0)
    assert not (tmp_path / "attention").exists()
    for step in (5, 10, 123456789):
        pictures.write(step, b"first")
    assert pictures.write(5, b"second").read_bytes() == b"second"
    others = ("step-00000099.png.bak", "step-99.png", "mine.png")
    for other in others:
        (tmp_path / "attention" / other).touch()
    pictures.rewind(9)
    assert names(tmp_path / "attention") == sorted(["step-00000005.png", *others])


def test_rank_0_keeps_what_the_run_draws(tmp_path):
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        tracker = make(tmp_path / str(rank), rank=rank)
        tracker.log(4, {"loss": 1.0})
        tracker.attention(4, b"picture")
        tracker.attention(8, b"picture")
        tracker.rewind(4)
        tracker.close()
    assert names(tmp_path / "0" / "attention") == ["step-00000004.png"]
    assert names(tmp_path / "1") == []


@pytest.mark.parametrize("failing", ["mkdir", "rename"])
def test_a_disk_that_takes_no_picture_is_a_warning(tmp_path, caplog, failing):
    tracker = make(tmp_path)

    def fail(operation: str, path: Path) -> None:
        if operation == failing and "attention" in str(path):
            raise OSError(28, "No space left on device")

    io.set_fault_hook(fail)
    try:
        with caplog.at_level(logging.WARNING, logger="pretrain"):
            tracker.attention(4, b"picture")
    finally:
        io.set_fault_hook(None)
    assert "a picture of attention is left out: " in caplog.text and "No space left" in caplog.text
    tracker.attention(8, b"picture")
    tracker.close()
    assert names(tmp_path / "attention") == ["step-00000008.png"]
