"""What an attempt removes when it has taken a run folder over, while the owner before it may wake up."""

from pathlib import Path

import pytest

from pretrain.checkpoint.retention import remove_leftovers
from pretrain.errors import DiskError
from pretrain.utils import io

SAVE = ".tmp-step-00000004-aaaa"


@pytest.fixture
def folder(tmp_path):
    """A folder of checkpoints in which a save and a removal were cut off."""
    for name in (SAVE, ".trash-step-00000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").touch()
    yield tmp_path
    io.set_fault_hook(None)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_what_was_cut_off_is_removed(folder):
    remove_leftovers(folder)
    assert names(folder) == []


def test_a_commit_that_comes_before_its_folder_is_taken_away_stays(folder):
    def wake_up(operation, path):
        if operation == "rename":
            (folder / SAVE).rename(folder / "step-00000004")

    io.set_fault_hook(wake_up)
    remove_leftovers(folder)
    assert names(folder) == ["step-00000004"]
    assert (folder / "step-00000004/rank-00000.safetensors").is_file()


def test_a_save_that_goes_on_while_its_folder_is_removed_has_no_folder(folder):
    refused = []

    def wake_up(operation, path):
        if operation == "rmdir":
            try:
                (folder / SAVE / "rank-00001.safetensors").touch()
            except FileNotFoundError:
                refused.append(path.name)

    io.set_fault_hook(wake_up)
    remove_leftovers(folder)
    assert names(folder) == []
    assert refused == [f".trash-{SAVE}", ".trash-step-00000002"]


def test_a_folder_that_cannot_be_removed_is_told(folder):
    def refuse(operation, path):
        raise PermissionError(1, "Operation not permitted")

    io.set_fault_hook(refuse)
    with pytest.raises(DiskError, match="cannot remove: Operation not permitted"):
        remove_leftovers(folder)
