"""Saving and loading: whatever fails, dies or is damaged, a whole checkpoint is loaded, or none, never a mixture."""

import errno
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint.format import MANIFEST, SCHEMA, Manifest, NewerFormatError, list_checkpoints, load_manifest
from pretrain.errors import CheckpointError, DiskError
from pretrain.utils import io
from tests.unit.checkpoint.stand_in import StandIn, load_newest, manager, save, state_of


class Death(BaseException):
    """The end of the process: nothing catches it."""


@pytest.fixture(autouse=True)
def _no_hook_left_behind():
    yield
    io.set_fault_hook(None)


def raise_at(number: int, error: BaseException) -> None:
    """Makes the operation of this number (from 0) raise."""
    count = iter(range(1_000_000))

    def hook(operation, path):
        if next(count) == number:
            raise error

    io.set_fault_hook(hook)


def operations_of_a_save(folder) -> list[str]:
    """Returns the operations of the save of step 3 after steps 1 and 2, with a retention of 2."""
    save(folder, 1, 2)
    seen: list[str] = []
    io.set_fault_hook(lambda operation, path: seen.append(f"{operation} {_without_token(path.name)}"))
    save(folder, 3)
    io.set_fault_hook(None)
    return seen


def _without_token(name: str) -> str:
    return re.sub(r"^(\.tmp-step-\d+)-[0-9a-f]{8}$", r"\1", name)


def names(folder) -> list[str]:
    """What is in the folder, temporary names too."""
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_loaded_as_it_was_saved_under_another_cut(tmp_path):
    engine = StandIn(4, cut=3)
    for number, kinds in enumerate(engine.tensors.values()):
        for kind, tensor in kinds.items():
            tensor.copy_(torch.randn(tensor.numel(), generator=torch.Generator().manual_seed(number + len(kind))))
    manager(tmp_path).save(engine, state_of(4))
    other = StandIn(0, cut=7)
    assert manager(tmp_path).load_newest(other) == state_of(4)
    assert (other.finished_with, other.loaded_scalars) == (4, {"loss_scale": 4.0})
    for name, kinds in engine.tensors.items():
        for kind, tensor in kinds.items():
            assert torch.equal(tensor, other.tensors[name][kind])


def test_there_is_nothing_to_load_before_the_first_save(tmp_path):
    assert load_newest(tmp_path / "absent") is None


def test_a_step_that_is_committed_is_not_written_again(tmp_path):
    (path,) = save(tmp_path, 1)
    before = (path / MANIFEST).stat().st_mtime_ns
    save(tmp_path, 1)
    assert (path / MANIFEST).stat().st_mtime_ns == before


@pytest.mark.parametrize("keep", [2, 3])
def test_retention_keeps_the_newest(tmp_path, keep):
    save(tmp_path, 1, 2, 3, 4, 5, keep=keep)
    assert names(tmp_path) == [f"step-0000000{step}" for step in range(6 - keep, 6)]


def test_the_manifest_is_written_last_and_made_durable_before_the_rename(tmp_path):
    assert operations_of_a_save(tmp_path) == [
        "mkdir " + tmp_path.name,
        "mkdir .tmp-step-00000003",
        "fsync_dir " + tmp_path.name,
        "open rank-00000.safetensors",
        *["write rank-00000.safetensors"] * 2,
        "fsync rank-00000.safetensors",
        *(f"{operation} {MANIFEST}.tmp-{os.getpid()}" for operation in ("open", "write", "fsync")),
        f"rename {MANIFEST}",
        "fsync_dir .tmp-step-00000003",
        "fsync_dir .tmp-step-00000003",
        "rename step-00000003",
        "fsync_dir " + tmp_path.name,
        "rename .trash-step-00000001",
        "fsync_dir " + tmp_path.name,
        f"unlink {MANIFEST}",
        "unlink rank-00000.safetensors",
        "rmdir .trash-step-00000001",
    ]


def test_death_at_any_operation_of_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path):
    operations = operations_of_a_save(tmp_path / "whole")
    committed = operations.index("rename step-00000003")
    for number, operation in enumerate(operations):
        folder = tmp_path / str(number)
        save(folder, 1, 2)
        raise_at(number, Death())
        with pytest.raises(Death):
            save(folder, 3)
        io.set_fault_hook(None)
        assert load_newest(folder) == (2 if number <= committed else 3), operation
        save(folder, 3, 4)
        assert load_newest(folder) == 4
        assert names(folder) == ["step-00000003", "step-00000004"], operation


def test_a_full_disk_at_any_operation_costs_no_checkpoint_and_the_next_save_succeeds(tmp_path, caplog):
    operations = operations_of_a_save(tmp_path / "whole")
    committed = operations.index("rename step-00000003")
    for number, operation in enumerate(operations):
        folder = tmp_path / str(number)
        save(folder, 1, 2)
        raise_at(number, OSError(errno.ENOSPC, "No space left on device"))
        if number > committed + 1:  # the one that is new is durable
            save(folder, 3)
            assert "cannot remove: No space left on device" in caplog.text
        else:
            with pytest.raises(DiskError, match=r"No space left on device.*; free space"):
                save(folder, 3)
            assert not [name for name in names(folder) if name.startswith(".tmp")], operation
        io.set_fault_hook(None)
        assert load_newest(folder) == (2 if number <= committed else 3), operation
        save(folder, 3, 4)
        assert load_newest(folder) == 4
        assert len(list_checkpoints(folder)) == 2


def damages(content: bytes, rng: random.Random, num_flips: int):
    """Yields every truncation of a file and some of its single-bit flips."""
    yield from (content[:length] for length in range(len(content)))
    for _ in range(num_flips):
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        yield bytes(flipped)


@pytest.mark.long
def test_every_truncation_and_any_flipped_bit_is_found_and_the_older_checkpoint_loaded(tmp_path, caplog):
    caplog.set_level("ERROR")
    old, new = save(tmp_path, 1, 2)
    rng = random.Random(5)
    for path in sorted(new.iterdir()):
        content = path.read_bytes()
        for number, damaged in enumerate(damages(content, rng, num_flips=200)):
            path.write_bytes(damaged)
            assert manager(tmp_path).verify(new) is not None
            if number % 20 == 0:
                assert load_newest(tmp_path) == 1
                assert names(tmp_path) == [old.name, f"{new.name}.bad-damaged"]
                (tmp_path / f"{new.name}.bad-damaged").rename(new)
        path.write_bytes(content)
    assert load_newest(tmp_path) == 2


@pytest.mark.parametrize("hidden", ["rank-00000.safetensors", "manifest.json", "step-00000002"])
def test_what_may_not_be_read_is_no_damage_and_is_not_set_aside(tmp_path, monkeypatch, hidden):
    """As in the folder of a colleague; the tests may run as root, who may read everything."""
    save(tmp_path, 1, 2)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != hidden and access(path, mode))
    with pytest.raises(DiskError, match=rf"{hidden}: may not be read by user \d+ on .*; fix permissions"):
        load_newest(tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    monkeypatch.undo()
    assert load_newest(tmp_path) == 2


def test_a_folder_that_cannot_be_looked_into_is_no_run_without_checkpoints(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DiskError, match=f"{tmp_path}: cannot be looked into: Permission denied; fix permissions"):
        load_newest(tmp_path)


def test_a_missing_file_is_damage(tmp_path):
    _, new = save(tmp_path, 1, 2)
    (new / "rank-00000.safetensors").unlink()
    assert load_newest(tmp_path) == 1


def test_a_damaged_checkpoint_is_named_with_its_damage(tmp_path, caplog):
    _, new = save(tmp_path, 1, 2)
    (new / "rank-00000.safetensors").write_bytes(b"")
    assert load_newest(tmp_path) == 1
    size = load_manifest(tmp_path / f"{new.name}.bad-damaged").files[0].num_bytes
    assert f"{new} is damaged (rank-00000.safetensors has 0 bytes, the manifest says {size})" in caplog.text


def test_a_step_that_is_damaged_a_second_time_is_set_aside_again(tmp_path):
    for _ in range(3):
        _, new = save(tmp_path, 1, 2)
        (new / MANIFEST).write_bytes(b"")
        assert load_newest(tmp_path) == 1
    assert names(tmp_path) == ["step-00000001", *(f"step-00000002.bad-damaged{end}" for end in ("", "-2", "-3"))]


def test_a_run_whose_checkpoints_are_all_damaged_never_starts_over(tmp_path):
    for path in save(tmp_path, 1, 2):
        (path / "rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"none can be used \(step-00000001.bad-damaged, .*; restore one, or start"
    ):
        load_newest(tmp_path)
    with pytest.raises(CheckpointError, match="this run has saved checkpoints"):
        load_newest(tmp_path)


def test_a_checkpoint_without_its_manifest_still_forbids_a_start_from_nothing(tmp_path):
    (path,) = save(tmp_path, 1)
    (path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="this run has saved checkpoints, and none can be used"):
        load_newest(tmp_path)


def test_a_checkpoint_without_its_manifest_is_named_and_the_older_one_loaded(tmp_path, caplog):
    (_, new) = save(tmp_path, 1, 2)
    (new / MANIFEST).unlink()
    assert load_newest(tmp_path) == 1
    assert f"checkpoint {new} is damaged (not a checkpoint (no manifest.json)); trying an older one" in caplog.text
    assert names(tmp_path) == ["step-00000001", "step-00000002.bad-damaged"]


def test_a_newer_format_is_refused_and_not_set_aside(tmp_path):
    _, new = save(tmp_path, 1, 2)
    manifest = load_manifest(new)
    newer = Manifest(SCHEMA + 1, manifest.state, manifest.shapes, manifest.moments, manifest.files, {})
    io.write_json(new / MANIFEST, newer.to_json())
    with pytest.raises(NewerFormatError, match="written in format 2, this version reads 1; update pretrain"):
        load_newest(tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"embed": (3, 4), "norm": (6,)}, r"norm has shape \[6\] in this model, in the checkpoint shape \[5\]"),
        ({"embed": (4, 3)}, r"embed has shape \[4, 3\] in this model, in the checkpoint shape \[3, 4\]"),
        ({"head": (2,)}, r"head has shape \[2\] in this model, in the checkpoint no such parameter"),
    ],
)
def test_a_checkpoint_of_another_model_names_the_parameter(tmp_path, shapes, message):
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=f"{message}; use the config that the checkpoint was trained with"):
        manager(tmp_path).load_newest(StandIn(0, shapes))


def test_leftovers_of_dead_saves_are_neither_read_nor_kept(tmp_path):
    (path,) = save(tmp_path, 1)
    shutil.copytree(path, tmp_path / ".tmp-step-00000009")
    shutil.copytree(path, tmp_path / ".trash-step-00000008")
    assert load_newest(tmp_path) == 1
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
