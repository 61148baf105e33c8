"""When the loop saves and what becomes of a failure, with real checkpoints of a stand-in for an engine."""

import logging
import threading
from types import SimpleNamespace

import pytest

from pretrain.checkpoint.format import list_checkpoints, step_of
from pretrain.dist import World
from pretrain.errors import CheckpointError, DiskError, DivergedError
from pretrain.run.folder import RunDir, begin_attempt
from pretrain.run.heartbeat import Progress
from pretrain.run.recovery import Recovery
from pretrain.training.saving import Saving
from pretrain.utils import io
from tests.helpers.waiting import LIMIT_S
from tests.unit.checkpoint.stand_in import StandIn, load_newest, manager, save, state_of


@pytest.fixture(autouse=True)
def _no_hook_left_behind():
    yield
    io.set_fault_hook(None)


class Steps:
    """Takes the steps of a run as the loop does, without a model: the store's values tell the step."""

    def __init__(self, folder, every=2):
        self.store, self.folder = StandIn(0), folder
        self.synced, self.noted = [], []
        place = RunDir(folder.with_name(f"{folder.name}-run"))
        place.path.mkdir()
        begin_attempt(place, "run", {})
        self.saving = Saving(
            checkpoints=manager(folder),
            store=self.store,
            folder=place,
            audit=SimpleNamespace(sync=lambda: self.synced.append(self.step), has_waiting=False),
            tracker=SimpleNamespace(
                advance=lambda step, phase: None,
                log=lambda step, figures, shown: self.noted.append((step, figures)),
                checkpoint=lambda step, path: None,
            ),
            progress=Progress(),
            world=World(0, 1, 0),
            every_steps=every,
            step=0,
        )
        self.step = 0

    def take(self, *, is_last=False, settle=True):
        """One step; lets the thread come to the end of its phase first, where that is asked for."""
        if settle and self.saving._save is not None:
            self.saving._save.join()
        num_written = int(self.saving.is_written)
        self.saving.before_update()
        self.step += 1
        for kinds in self.store.tensors.values():
            for tensor in kinds.values():
                tensor.fill_(self.step)
        self.saving.after_step(state_of(self.step), num_written, may_begin=not is_last)

    def committed(self):
        """Steps of the checkpoints there are."""
        return [step_of(path) for path in list_checkpoints(self.folder)]


def refuse_writes(operation, path):
    """A disk that is full."""
    if operation == "write" and path.name.startswith("rank"):
        raise OSError(28, "No space left on device")


def test_a_save_is_committed_some_steps_later_as_of_its_own_step(tmp_path):
    steps = Steps(tmp_path, every=10)
    seen = []
    for _ in range(15):
        steps.take()
        seen.append(steps.committed())
    # Begun in step 10, written by 11, which begins the commit; the manifest is there when 12 ends.
    assert seen[9] == []
    assert seen[11] == [10]
    assert load_newest(tmp_path) == 10


def test_copies_in_memory_are_taken_beside_the_saves_of_steps_that_others_follow(tmp_path):
    steps = Steps(tmp_path, every=10)
    steps.saving.checkpoints.keep_copies(Recovery(0, memory=str(tmp_path / "memory")), 2)
    for _ in range(6):
        steps.take(is_last=steps.step == 5)
    copies = steps.saving.checkpoints.copies
    copies.finish()
    assert [path.name for path in sorted(tmp_path.glob("memory/*/*"))] == ["step-00000002", "step-00000004"]
    assert copies.load(loaded := StandIn(-1), 0, ()) == state_of(4)
    assert loaded.values() == {4.0}
    steps.saving.audit.has_waiting = True
    for _ in range(4):
        steps.take()
    assert copies._steps == [2, 4], "no copy of a step whose row would be lost"


def test_the_end_waits_for_what_is_in_flight_and_saves_the_last_step(tmp_path):
    steps = Steps(tmp_path, every=2)
    for step in range(3):
        steps.take(is_last=step == 2)
    steps.saving.finish(state_of(3), is_last=True)
    assert steps.committed() == [2, 3]


def test_the_last_step_is_not_saved_twice(tmp_path):
    steps = Steps(tmp_path, every=0)
    steps.take()
    steps.saving.finish(state_of(1), is_last=True)
    operations = []
    io.set_fault_hook(lambda operation, path: operations.append(operation))
    steps.saving.finish(state_of(1), is_last=True)
    assert not operations and steps.committed() == [1]


def test_nothing_is_saved_where_no_step_was_taken(tmp_path):
    Steps(tmp_path).saving.finish(state_of(0), is_last=True)
    assert not list(tmp_path.iterdir())


def test_a_save_that_is_due_waits_for_the_one_in_flight_and_this_is_said_once_with_numbers(tmp_path, caplog):
    steps, gate = Steps(tmp_path, every=1), threading.Event()  # open while training waits, and only then
    wait = steps.saving._wait

    def wait_with_open_gate():
        gate.set()
        wait()
        gate.clear()

    steps.saving._wait = wait_with_open_gate
    io.set_fault_hook(lambda operation, path: gate.wait(LIMIT_S) if operation == "open" else None)
    for _ in range(4):
        steps.take(settle=False)
    steps.saving.finish(state_of(4), is_last=True)
    waits = [record.message for record in caplog.records if "was still under way" in record.message]
    assert len(waits) == 1
    assert "the save of step 1 was still under way when that of step 2 was due: training waited " in waits[0]
    assert "raise checkpoint.every_steps (now 1) or write to a faster disk" in waits[0]
    assert steps.committed() == [3, 4]


def test_a_full_disk_does_not_stop_training_and_the_next_save_succeeds(tmp_path, caplog):
    steps = Steps(tmp_path, every=2)
    io.set_fault_hook(refuse_writes)
    for _ in range(3):
        steps.take()
    assert "step 2 not saved: rank 0: " in caplog.text
    assert "No space left on device (204 bytes needed, " in caplog.text
    assert "training continues, the next save is in 2 steps at the latest" in caplog.text
    io.set_fault_hook(None)
    for _ in range(5):
        steps.take()
    assert steps.committed() == [4, 6]


def test_three_saves_that_fail_in_a_row_end_the_run(tmp_path):
    steps = Steps(tmp_path, every=2)
    io.set_fault_hook(refuse_writes)
    for _ in range(6):
        steps.take()
    with pytest.raises(DiskError, match="step 6 not saved"):
        steps.take()
    assert steps.step == 7


def test_a_save_that_succeeds_ends_the_row(tmp_path):
    steps = Steps(tmp_path, every=5)

    def refuse(operation, path):
        if not path.parent.name.startswith((".tmp-step-00000015-", ".tmp-step-00000030-")):
            refuse_writes(operation, path)

    io.set_fault_hook(refuse)
    for _ in range(33):
        steps.take()
    assert steps.committed() == [15, 30]


def test_the_last_save_must_succeed(tmp_path):
    steps = Steps(tmp_path, every=2)
    steps.take()
    io.set_fault_hook(refuse_writes)
    with pytest.raises(DiskError, match="step 1 not saved"):
        steps.saving.finish(state_of(1), is_last=True)


def test_where_the_save_in_flight_fails_at_the_end_that_of_the_last_step_is_still_tried(tmp_path, caplog):
    steps = Steps(tmp_path, every=2)
    io.set_fault_hook(refuse_writes)
    steps.take()
    steps.take()
    steps.saving._save.join()
    io.set_fault_hook(None)
    steps.take(is_last=True, settle=False)
    steps.saving.finish(state_of(3), is_last=True)
    assert steps.committed() == [3]
    assert "step 2 not saved" in caplog.text


def test_state_that_is_not_finite_ends_the_run_at_once(tmp_path):
    steps = Steps(tmp_path, every=2)
    steps.take()
    steps.step = float("nan")
    steps.store.tensors["norm"]["weight"].fill_(float("nan"))
    steps.saving.after_step(state_of(2), 0, may_begin=True)
    steps.saving._save.join()
    with pytest.raises(CheckpointError, match="norm/weight has a value that is not finite"):
        steps.saving.after_step(state_of(3), 1, may_begin=True)
    assert not list_checkpoints(tmp_path)


def test_the_ledger_is_made_durable_by_the_thread_that_saves(tmp_path):
    steps = Steps(tmp_path, every=2)
    threads = []
    steps.saving.audit.sync = lambda: threads.append(threading.current_thread())
    for _ in range(5):
        steps.take()
    assert threads and threading.main_thread() not in threads


def test_whatever_a_save_writes_is_written_by_its_thread_and_the_commit_is_noted_before_anything_older_goes(tmp_path):
    steps = Steps(tmp_path, every=2)
    steps.saving.checkpoints.prepare(1, 3)
    seen, threads = [], set()

    def watch(operation, path):
        seen.append(f"{operation} {path.name}")
        threads.add(threading.current_thread())

    save(tmp_path, 1)
    io.set_fault_hook(watch)
    for _ in range(9):
        steps.take()
    assert threading.main_thread() not in threads
    order = ["rename step-00000002", "rename run.json", "rename step-00000004", "rename run.json",
             "rename .trash-step-00000001"]  # fmt: skip
    assert [operation for operation in seen if operation in order][: len(order)] == order
    steps.saving.finish(state_of(9), is_last=True)
    assert steps.saving.folder.read_record()["attempts"][-1]["committed_step"] == 9


def test_steps_are_taken_while_the_disk_holds_up_the_note_of_a_commit(tmp_path):
    steps, reached, gate = Steps(tmp_path, every=10), threading.Event(), threading.Event()

    def hold(operation, path):
        if path == steps.saving.folder.record:
            reached.set()
            gate.wait(LIMIT_S)

    io.set_fault_hook(hold)
    for _ in range(11):
        steps.take()
    assert reached.wait(LIMIT_S)
    for _ in range(8):
        steps.take(settle=False)
    assert steps.step == 19 and not steps.saving.is_written
    gate.set()
    steps.saving.finish(state_of(19), is_last=True)
    assert steps.committed() == [10, 19]


def test_an_error_in_the_loop_lets_the_save_in_flight_come_to_its_end(tmp_path):
    steps = Steps(tmp_path, every=2)
    with pytest.raises(DivergedError), steps.saving:
        steps.take()
        steps.take()
        raise DivergedError("the gradient was not finite")
    assert steps.committed() == [2]


def test_what_was_saved_and_how_long_training_waited_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="pretrain")
    steps = Steps(tmp_path, every=2)
    for _ in range(5):
        steps.take()
    assert f"saved {tmp_path / 'step-00000002'} in " in caplog.text
    assert " s, training waited " in caplog.text


def test_each_commit_is_told_once_with_what_it_cost_at_the_step_that_heard_of_it(tmp_path):
    steps = Steps(tmp_path)
    for _ in range(5):
        steps.take()
    steps.saving.finish(state_of(5), is_last=True)
    saved = [(step, int(figures["checkpoint_step"])) for step, figures in steps.noted]
    assert [number for _, number in saved] == [2, 4, 5]
    assert all(number <= step for step, number in saved) and saved[-1] == (5, 5)
    assert all(0 <= figures["checkpoint_stall_s"] <= figures["checkpoint_write_s"] for _, figures in steps.noted)
