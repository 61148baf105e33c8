"""What goes when something newer is there: never what is needed to have two good ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.checkpoint.format import list_checkpoints, step_name, step_of
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.retention import MIN_VALID, find_marks, find_obsolete, mark_in_use
from pretrain.dist import World
from tests.unit.checkpoint.stand_in import StandIn, manager, save, state_of


@given(
    st.lists(st.integers(0, 60), unique=True, max_size=12),
    st.integers(2, 5),
    st.sampled_from([0, 1, 5, 10]),
    st.sets(st.integers(0, 60)),
)
def test_two_good_ones_the_newest_and_milestones_stay(tmp_path_factory, steps, keep, every, bad):
    found = [tmp_path_factory.getbasetemp() / step_name(step) for step in sorted(steps)]
    asked = []

    def is_valid(path):
        asked.append(path)
        return step_of(path) not in bad

    obsolete = find_obsolete(found, keep, every, is_valid)
    stay = [path for path in found if path not in obsolete]
    good = [path for path in found if step_of(path) not in bad]
    assert set(good[-MIN_VALID:]) <= set(stay), "the two newest good ones"
    assert found[-keep:] == stay[-keep:], "the newest, good or bad"
    assert not every or all(step_of(path) % every for path in obsolete)
    assert not obsolete or len(asked) == len(set(asked)) <= len(stay), "no more is read than two good ones take"
    needed = found.index(good[-MIN_VALID]) if len(good) >= MIN_VALID else 0
    extra = [path for path in stay if found.index(path) < needed and not (every and step_of(path) % every == 0)]
    assert len(extra) <= max(0, keep - MIN_VALID), "nothing else stays"


def test_a_damaged_checkpoint_does_not_count(tmp_path):
    save(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "rank-00000.safetensors").write_bytes(b"")
    save(tmp_path, 3)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [1, 2, 3]
    save(tmp_path, 4)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [3, 4]


@pytest.mark.parametrize(("every", "left"), [(0, [5, 6]), (2, [2, 4, 5, 6]), (3, [3, 5, 6])])
def test_checkpoints_of_every_so_many_steps_are_kept_for_good(tmp_path, every, left):
    checkpoints = CheckpointManager(tmp_path, 2, World(0, 1, 0), {}, keep_every_steps=every)
    for step in range(1, 7):
        checkpoints.save(StandIn(step), state_of(step))
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == left


def test_a_checkpoint_in_use_is_kept_until_its_mark_is_removed(tmp_path, caplog):
    """A run that has gone may have been moved, or be mounted elsewhere."""
    folder, user = tmp_path / "checkpoints", tmp_path / "caf\udce9"
    user.mkdir()
    save(folder, 1)
    checkpoint = folder / "step-00000001"
    for _ in range(2):
        mark_in_use(checkpoint, user)
    (mark,) = find_marks(checkpoint)
    checkpoints = manager(folder)
    checkpoints.save(StandIn(2), state_of(2))
    user.rename(tmp_path / "moved")
    for step in (3, 4, 5):
        checkpoints.save(StandIn(step), state_of(step))
    assert [step_of(path) for path in list_checkpoints(folder)] == [1, 4, 5]
    (warning,) = [record.getMessage() for record in caplog.records if "is kept for" in record.getMessage()]
    assert f"which is not there: if it is not moved but gone, remove {mark}" in warning
    mark.unlink()
    checkpoints.save(StandIn(6), state_of(6))
    assert [step_of(path) for path in list_checkpoints(folder)] == [5, 6]
