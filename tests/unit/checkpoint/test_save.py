"""A save in flight: phases beside the training, one after another, and what becomes of it when one fails."""

import errno
import json
import threading
from pathlib import Path

import pytest

from pretrain.checkpoint.format import MANIFEST, list_checkpoints, load_manifest
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.dist import World
from pretrain.errors import CheckpointError, DiskError, LockedError
from pretrain.utils import io
from tests.helpers.waiting import LIMIT_S
from tests.unit.checkpoint.stand_in import StandIn, load_newest, manager, save, state_of


@pytest.fixture(autouse=True)
def _no_hook_left_behind():
    yield
    io.set_fault_hook(None)


def names(folder):
    """What is in the folder, temporary names too."""
    return sorted(path.name for path in folder.iterdir())


def test_state_may_change_while_it_is_written_and_what_is_committed_is_that_of_its_step(tmp_path):
    gate = threading.Event()
    io.set_fault_hook(lambda operation, path: gate.wait(LIMIT_S) if operation == "open" else None)
    store, checkpoints = StandIn(3), manager(tmp_path)
    saving = checkpoints.begin(store, state_of(3))
    checkpoints.hold()
    for kinds in store.tensors.values():
        for tensor in kinds.values():
            tensor.fill_(4)
    store.step = 4  # its scalars tell the step
    assert not saving.is_done and not saving.is_committed
    gate.set()
    saving.wait()
    assert load_newest(tmp_path) == 3
    assert load_manifest(saving.path).scalars == {"loss_scale": 3.0}


def test_nothing_is_committed_before_the_ranks_have_agreed_and_nothing_removed_before_it_was_read_again(tmp_path):
    save(tmp_path, 1, 2)
    saving = manager(tmp_path).begin(StandIn(3), state_of(3))
    seen = []
    while not saving.is_finished:
        saving.join()
        committed = [path.name[-1] for path in list_checkpoints(tmp_path)]
        seen.append((saving.is_committed, "".join(committed)))
        saving.advance()
    # After: write, commit, re-read, retain.
    assert seen == [(False, "12"), (False, "123"), (True, "123"), (True, "23")]


def test_the_second_save_allocates_nothing(tmp_path):
    checkpoints = manager(tmp_path)
    checkpoints.save(StandIn(1), state_of(1))
    buffers = [buffer.data_ptr() for buffer in checkpoints._host._buffers]
    checkpoints.save(StandIn(2), state_of(2))
    assert [buffer.data_ptr() for buffer in checkpoints._host._buffers] == buffers


def test_what_must_be_durable_before_the_commit_is_asked_for_after_the_files_and_before_the_manifest(tmp_path):
    seen = []
    io.set_fault_hook(lambda operation, path: seen.append(f"{operation} {path.name}"))
    manager(tmp_path).begin(StandIn(1), state_of(1), before_commit=lambda: seen.append("ledger")).wait()
    place = seen.index("ledger")
    assert seen[place - 1] == "fsync rank-00000.safetensors"
    assert seen[place + 1].startswith(f"open {MANIFEST}")


def test_what_follows_the_commit_is_done_after_the_rename_is_durable_and_for_a_step_that_was_there_too(tmp_path):
    seen = []
    io.set_fault_hook(lambda operation, path: seen.append(f"{operation} {path.name}"))
    manager(tmp_path).begin(StandIn(1), state_of(1), after_commit=lambda: seen.append("noted")).wait()
    place = seen.index("noted")
    assert seen[place - 2 : place] == ["rename step-00000001", f"fsync_dir {tmp_path.name}"]
    manager(tmp_path).begin(StandIn(1), state_of(1), after_commit=lambda: seen.append("noted")).wait()
    assert seen.count("noted") == 2


def test_nothing_follows_a_commit_that_failed(tmp_path):
    def full(operation, path):
        if operation == "rename" and path.name == "step-00000001":
            raise OSError(28, "No space left on device")

    io.set_fault_hook(full)
    noted = []
    with pytest.raises(DiskError, match="step 1 not saved"):
        manager(tmp_path).begin(StandIn(1), state_of(1), after_commit=lambda: noted.append(1)).wait()
    assert not noted


def test_a_ledger_that_cannot_be_made_durable_forbids_the_commit(tmp_path):
    def full() -> None:
        raise DiskError("cannot sync: No space left on device", where="audit.jsonl")

    save(tmp_path, 1)
    saving = manager(tmp_path).begin(StandIn(2), state_of(2), before_commit=full)
    with pytest.raises(
        DiskError, match=r"step 2 not saved: rank 0: audit\.jsonl: cannot sync: No space left on device"
    ):
        saving.wait()
    assert names(tmp_path) == ["step-00000001"]


def test_an_attempt_that_does_not_own_the_run_any_more_cannot_commit(tmp_path):
    seen = []

    def fence() -> None:
        seen.append("fence")
        if f"rename {MANIFEST}" in seen:
            raise LockedError("the run is attempt 2's by now", where=str(tmp_path))

    io.set_fault_hook(lambda operation, path: seen.append(f"{operation} {path.name}"))
    ours = CheckpointManager(tmp_path, 2, World(0, 1, 0), {"attempt": 1}, fence=fence)
    with pytest.raises(LockedError, match="the run is attempt 2's by now"):
        ours.save(StandIn(1), state_of(1))
    assert seen.count("fence") == 2
    after = seen[len(seen) - seen[::-1].index("fence") :]
    assert after and all(operation.startswith(("unlink ", "rmdir ")) for operation in after), "all was ready"
    assert names(tmp_path) == []


def test_an_attempt_that_does_not_own_the_run_any_more_removes_nothing(tmp_path):
    owned = [True]

    def fence() -> None:
        if not owned[0]:
            raise LockedError("the run is attempt 2's by now")

    save(tmp_path, 1, 2)
    ours = CheckpointManager(tmp_path, 2, World(0, 1, 0), {}, fence=fence)
    saving = ours.begin(StandIn(3), state_of(3))
    while not saving.is_committed:
        saving.join()
        saving.advance()
    saving.join()
    owned[0] = False
    saving.advance()
    with pytest.raises(LockedError, match="attempt 2's"):
        saving.wait()
    (tmp_path / ".tmp-step-00000004-of-attempt-2").mkdir()
    (tmp_path / "step-00000003" / MANIFEST).write_text("{}")
    for act in (lambda other: other.save(StandIn(4), state_of(4)), lambda other: other.load_newest(StandIn(0))):
        with pytest.raises(LockedError, match="attempt 2's"):
            act(CheckpointManager(tmp_path, 2, World(0, 1, 0), {}, fence=fence))
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-00000001",
        "step-00000002",
        "step-00000003",
        ".tmp-step-00000004-of-attempt-2",
    }


def test_the_fence_is_asked_immediately_before_the_rename(tmp_path):
    seen = []
    io.set_fault_hook(lambda operation, path: seen.append(operation))
    CheckpointManager(tmp_path, 2, World(0, 1, 0), {}, fence=lambda: seen.append("fence")).save(StandIn(1), state_of(1))
    place = seen.index("fence", 1)  # the first one is that of the start
    assert seen[0] == "fence"
    assert seen[place : place + 3] == ["fence", "fsync_dir", "rename"]


def test_the_topology_is_in_the_manifest_as_it_was_given(tmp_path):
    topology = {"world_size": 1, "attempt": 3, "token": "5f"}
    CheckpointManager(tmp_path, 2, World(0, 1, 0), topology).save(StandIn(1), state_of(1))
    content = json.loads((tmp_path / "step-00000001" / MANIFEST).read_text())["content"]
    assert content["topology"] == topology


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", ["weight", "exp_avg_sq"])
def test_state_that_is_not_finite_is_not_committed_and_its_parameter_is_named(tmp_path, kind, value):
    save(tmp_path, 1)
    store = StandIn(2)
    store.tensors["norm"][kind][4] = value
    with pytest.raises(CheckpointError, match=f"norm/{kind} has a value that is not finite; .* lower optim.lr or roll"):
        manager(tmp_path).save(store, state_of(2))
    assert names(tmp_path) == ["step-00000001"]


def test_large_values_are_finite_although_their_sum_is_not(tmp_path):
    store = StandIn(2)
    store.tensors["embed"]["weight"].fill_(3e38)
    manager(tmp_path).save(store, state_of(2))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002"]


def test_a_parameter_that_is_not_whole_is_not_committed(tmp_path):
    store = StandIn(2)
    store.shapes = {"embed": (3, 4), "norm": (6,)}
    with pytest.raises(CheckpointError, match="norm has 6 elements, and the ranks have 5 of it"):
        manager(tmp_path).save(store, state_of(2))
    assert names(tmp_path) == []


def test_a_parameter_whose_shape_has_changed_is_not_committed(tmp_path):
    checkpoints = manager(tmp_path)
    checkpoints.save(StandIn(1), state_of(1))
    for shapes, message in (
        ({"embed": (4, 3), "norm": (5,)}, r"embed has shape \[3, 4\] in the save, shape \[4, 3\] now"),
        ({"embed": (3, 4)}, r"norm has shape \[5\] in the save, no such parameter now"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoints.save(StandIn(2, shapes), state_of(2))
    again = manager(tmp_path)
    again.load_newest(StandIn(0))
    with pytest.raises(CheckpointError, match="norm has shape"):
        again.save(StandIn(2, {"embed": (3, 4)}), state_of(2))
    assert names(tmp_path) == ["step-00000001"]


def test_what_does_not_read_back_is_set_aside_and_nothing_older_is_removed(tmp_path):
    save(tmp_path, 1, 2)
    saving = manager(tmp_path).begin(StandIn(3), state_of(3))
    saving.join()
    saving.advance()
    saving.join()
    path = tmp_path / "step-00000003" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DiskError, match=r"step 3 was committed, but is not what was written \(rank-00000.*CRC32 of ch"):
        saving.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003.bad-damaged"]
    assert not saving.is_committed


def test_a_folder_without_a_manifest_does_not_stand_in_the_way(tmp_path):
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "rank-00000.safetensors").touch()
    save(tmp_path, 2)
    assert load_newest(tmp_path) == 2
    assert names(tmp_path) == ["step-00000002", "step-00000002.bad-damaged"]


def test_a_full_disk_is_told_with_what_is_needed_and_what_is_free(tmp_path):
    def full(operation, path):
        if operation == "write":
            raise OSError(28, "No space left on device")

    io.set_fault_hook(full)
    message = (
        r"step 1 not saved: rank 0: .*rank-00000\.safetensors: cannot write: No space left on device "
        r"\(204 bytes needed, [\d,]+ free\); free space$"
    )
    with pytest.raises(DiskError, match=message):
        manager(tmp_path).save(StandIn(1), state_of(1))
    assert names(tmp_path) == []


def test_a_folder_that_may_not_be_entered_any_more_fails_a_save_as_a_disk_does(tmp_path, monkeypatch):
    """Its mode was changed, or a ticket has expired: no look into it is answered, and the next save may go through."""
    checkpoints = manager(tmp_path)
    checkpoints.save(StandIn(1), state_of(1))
    stat, hidden = Path.stat, [True]

    def refuse(path, **options):
        if hidden[0] and tmp_path in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    failed = r"step 2 not saved: rank 0: .*step-00000002: "
    message = failed + r"cannot be looked into: Permission denied \([\d,]+ free\); fix permi"
    with pytest.raises(DiskError, match=message):
        checkpoints.save(StandIn(2), state_of(2))
    hidden[0] = False
    checkpoints.save(StandIn(3), state_of(3))
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_the_run_can_save_after_a_save_that_failed(tmp_path):
    failing = [True]

    def full(operation, path):
        if operation == "write" and failing[0]:
            raise OSError(28, "No space left on device")

    io.set_fault_hook(full)
    checkpoints = manager(tmp_path)
    with pytest.raises(DiskError):
        checkpoints.save(StandIn(1), state_of(1))
    failing[0] = False
    checkpoints.save(StandIn(1), state_of(1))
    assert load_newest(tmp_path) == 1


def test_temporary_folders_of_a_dead_attempt_are_removed_and_not_those_of_this_one(tmp_path):
    for name in (".tmp-step-00000001-aaaaaaaa", ".trash-step-00000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").touch()
    checkpoints = manager(tmp_path)
    checkpoints.prepare(1000, 3)
    assert names(tmp_path) == []
    saving = checkpoints.begin(StandIn(1), state_of(1))
    saving.join()
    assert [name[:18] for name in names(tmp_path)] == [".tmp-step-00000001"]
    saving.wait()
    assert names(tmp_path) == ["step-00000001"]
