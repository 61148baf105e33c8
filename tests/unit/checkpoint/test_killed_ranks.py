"""Several ranks save, and one is killed at an operation, at every one of them in turn, or its disk fails there."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as td

from pretrain.dist import World
from pretrain.errors import DiskError
from pretrain.utils import io
from tests.helpers.waiting import LIMIT_S
from tests.unit.checkpoint.forked_ranks import (
    LOST_PEER,
    Operation,
    Share,
    kill_at,
    manager_on,
    operations_of_a_save,
    run_ranks,
    save_on,
    watch,
)
from tests.unit.checkpoint.stand_in import load_newest, save, state_of

KILLED = -9
pytestmark = pytest.mark.timeout(2 * LIMIT_S)  # a few hundred starts of ranks, on a machine that may be busy


@pytest.fixture
def saved(tmp_path) -> Path:
    """A folder with the checkpoints of steps 1 and 2, of two ranks."""

    def body(world: World) -> None:
        checkpoints = manager_on(world, tmp_path / "saved")
        for step in (1, 2):
            checkpoints.save(Share(step, world), state_of(step))

    assert run_ranks(2, body) == [0, 0]
    return tmp_path / "saved"


def names(folder: Path) -> list[str]:
    """What is in a folder, temporary names too."""
    return sorted(path.name for path in folder.iterdir())


def is_racing(operation: Operation) -> bool:
    """Whether another rank may have done it instead: the first to come makes the temporary folder."""
    return operation.text == "fsync_dir copy" and not operation.after


def check_killed(saved: Path, size: int, victim: int, operation: Operation) -> None:
    """Kills a rank there. The old checkpoint is loaded, or the new one after the rename; the next save cleans up."""
    folder = shutil.copytree(saved, saved.with_name("copy"))

    def body(world: World) -> None:
        if world.rank == victim:
            kill_at(operation)
        save_on(world, folder, 3)

    codes = run_ranks(size, body)
    assert codes[victim] == KILLED or (is_racing(operation) and codes == [0] * size), (codes, operation)
    assert set(codes) <= {KILLED, LOST_PEER, 0}, (codes, operation)
    newest = 3 if operation.after or codes[victim] == 0 else 2
    assert load_newest(folder) == newest, operation
    save(folder, 4)
    assert load_newest(folder) == 4
    assert names(folder) == [f"step-0000000{newest}", "step-00000004"], operation
    shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_any_operation_of_a_save_leaves_the_old_or_the_new_checkpoint(saved, victim):
    operations = operations_of_a_save(saved, 2)[victim]
    words = {operation.text.split()[0] for operation in operations}
    assert words >= {"mkdir", "open", "write", "fsync"} | (
        {"rename", "fsync_dir", "unlink", "rmdir"} if not victim else set()
    )
    assert {operation.after for operation in operations} == ({False, True} if not victim else {False})
    for operation in operations:
        check_killed(saved, 2, victim, operation)


@pytest.mark.long
@pytest.mark.parametrize("size", [3, 4])
def test_whichever_of_more_ranks_is_killed_at_whatever_operation(saved, size):
    for victim, operations in enumerate(operations_of_a_save(saved, size)):
        for operation in operations:
            check_killed(saved, size, victim, operation)


def fail_at(operation: Operation, error: int) -> None:
    """Makes an operation of this process fail."""

    def act(current: Operation) -> None:
        if current == operation:
            raise OSError(error, os.strerror(error))

    watch(act)


LATER = [pytest.param(error, marks=pytest.mark.long) for error in (errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES)]


@pytest.mark.parametrize("error", [errno.ENOSPC, *LATER], ids=errno.errorcode.get)
def test_a_disk_that_fails_at_any_operation_of_any_rank_costs_no_checkpoint_and_the_next_save_succeeds(saved, error):
    cases = [(victim, *case) for victim, found in enumerate(operations_of_a_save(saved, 2)) for case in judged(found)]

    def body(world: World) -> None:
        for number, (victim, operation, must_fail) in enumerate(cases):
            folder = saved.with_name(str(number)) / "copy"
            if world.is_main:
                shutil.copytree(saved, folder)
            td.barrier()
            if world.rank == victim:
                fail_at(operation, error)
            check_failed(world, folder, operation, error, must_fail)

    assert run_ranks(2, body) == [0, 0]
    for number, (_, operation, must_fail) in enumerate(cases):
        folder = saved.with_name(str(number))
        failed = load_newest(folder / "failed")
        assert failed == (3 if operation.after or not must_fail else 2) or is_racing(operation), operation
        assert load_newest(folder / "copy") == 4, operation


def judged(operations: list[Operation]) -> list[tuple[Operation, bool]]:
    """Adds whether its failure must be told: all but those of retention, which come when the new one is durable."""
    commit = next((n for n, operation in enumerate(operations) if operation.text == "rename step-00000003"), None)
    return [(operation, commit is None or n <= commit + 1) for n, operation in enumerate(operations)]


def check_failed(world: World, folder: Path, operation: Operation, error: int, must_fail: bool) -> None:
    """All ranks are told of the failure, or none; what was there is there; the same processes save the next step."""
    checkpoints = manager_on(world, folder)
    refusal = ""
    try:
        checkpoints.save(Share(3, world), state_of(3))
    except DiskError as failure:
        refusal = str(failure)
        assert os.strerror(error) in refusal
    io.set_fault_hook(None)
    refusals: list[str] = [""] * world.size
    td.all_gather_object(refusals, refusal)
    assert len(set(refusals)) == 1, (refusals, operation)
    assert bool(refusal) == must_fail or is_racing(operation), (refusal, operation)
    if world.is_main:
        shutil.copytree(folder, folder.with_name("failed"))
    td.barrier()
    checkpoints.save(Share(4, world), state_of(4))
