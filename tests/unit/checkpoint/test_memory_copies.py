"""Copies of the state in memory: whole ones of all ranks, the newest, of the right course, and three at most."""

from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.checkpoint.memory_copies import MemoryCopies
from pretrain.checkpoint.state import TrainState
from pretrain.dist import World
from pretrain.errors import DiskError
from pretrain.run.recovery import COPIES, Recovery
from tests.unit.checkpoint.forked_ranks import Share
from tests.unit.checkpoint.stand_in import StandIn, state_of


class Ranks:
    """The ranks of a world, whose copies are taken one after another."""

    def __init__(self, folder: Path, size: int, number: int = 0, every_steps: int = 1) -> None:
        self.worlds = [World(rank, size, rank) for rank in range(size)]
        recovery = Recovery(number, memory=str(folder))
        self.copies = [MemoryCopies(recovery, world, every_steps) for world in self.worlds]

    def take(self, *steps: int, ranks: int | None = None, skips: tuple[tuple[int, int], ...] = ()) -> None:
        """Copies these steps, on the first ranks or all."""
        for step in steps:
            for world, copies in list(zip(self.worlds, self.copies, strict=True))[:ranks]:
                copies.take(Share(step, world), replace(state_of(step), skips=skips))
        for copies in self.copies[:ranks]:
            copies.finish()


def load(folder: Path, after_step: int = 0, skips: tuple[tuple[int, int], ...] = ()) -> int | None:
    """Loads into a world of one that follows; returns the step, all of whose values are there."""
    engine = StandIn(-1, cut=5)
    copies = MemoryCopies(Recovery(9, memory=str(folder)), World(0, 1, 0), 1)
    state: TrainState | None = copies.load(engine, after_step, skips)
    if state is None:
        assert engine.values() == {-1.0}
        return None
    assert replace(state, skips=()) == state_of(state.step)
    assert engine.values() == {float(state.step)} and engine.loaded_scalars == {"loss_scale": float(state.step)}
    return state.step


def files(folder: Path) -> list[str]:
    """The files of copies."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_newest_copy_of_all_ranks_is_loaded_into_any_layout_and_the_rest_removed(tmp_path):
    ranks = Ranks(tmp_path, 2)
    ranks.take(1, 2)
    ranks.take(3, ranks=1)  # the other was killed
    assert load(tmp_path) == 2
    assert {name.split("/")[1] for name in files(tmp_path)} == {"step-00000002"}
    assert load(tmp_path) == 2, "a loss before the next copy needs it again"


def test_a_copy_is_written_over_the_oldest(tmp_path):
    def numbers() -> set[int]:
        return {path.stat().st_ino for path in tmp_path.rglob("*.safetensors")}

    ranks = Ranks(tmp_path, 2)
    ranks.take(*range(1, COPIES + 1))
    pages = numbers()
    assert len(pages) == 2 * COPIES
    ranks.take(*range(COPIES + 1, 3 * COPIES))
    assert numbers() == pages
    assert load(tmp_path) == 3 * COPIES - 1


def test_a_copy_of_a_later_world_is_newer_by_its_step(tmp_path):
    Ranks(tmp_path, 2).take(4)
    Ranks(tmp_path, 1, number=1).take(5)
    assert load(tmp_path) == 5


@pytest.mark.parametrize("damage", ["cut", "no file of a rank", "another size"])
def test_a_copy_that_is_not_whole_is_passed_over(tmp_path, damage):
    ranks = Ranks(tmp_path, 2)
    ranks.take(1, 2)
    vote = next(tmp_path.glob("*/step-00000002/rank-00001.json"))
    if damage == "cut":
        vote.write_bytes(vote.read_bytes()[:-20])
    elif damage == "no file of a rank":
        vote.unlink()
    else:
        vote.write_bytes(vote.with_name("rank-00000.json").read_bytes())
    assert load(tmp_path) == 1


def test_a_checkpoint_as_new_and_another_course_leave_copies_out(tmp_path):
    ranks = Ranks(tmp_path, 2)
    ranks.take(7)
    assert load(tmp_path, after_step=7) is None
    assert files(tmp_path) == []
    ranks.take(8)
    assert load(tmp_path, skips=((10, 20),)) is None, "taken before a rollback"
    ranks.take(9, skips=((10, 20),))
    assert load(tmp_path, skips=((10, 20),)) == 9


def test_three_copies_are_there_at_most_of_the_steps_that_are_due(tmp_path):
    ranks = Ranks(tmp_path, 2, every_steps=2)
    for step in range(1, 14):
        ranks.take(step)
        assert len({name.split("/")[1] for name in files(tmp_path)}) <= COPIES
    assert {name.split("/")[1] for name in files(tmp_path)} == {f"step-{step:08d}" for step in (8, 10, 12)}


def test_the_copy_that_a_world_began_with_goes_once_all_ranks_have_one_of_it(tmp_path):
    Ranks(tmp_path, 2).take(1)
    assert load(tmp_path) == 1
    ranks = Ranks(tmp_path, 2, number=1)
    for step, there in ((2, {1, 2}), (3, {1, 2, 3}), (4, {2, 3, 4})):
        ranks.take(step)
        assert {int(name.split("/")[1][5:]) for name in files(tmp_path)} == there
    ranks.copies[0].prepare(2**60)  # a recovery is not refused


def test_copies_that_do_not_fit_are_refused_and_a_full_memory_later_is_a_warning(tmp_path, caplog):
    copies = MemoryCopies(Recovery(0, memory=str(tmp_path)), World(0, 1, 0), 1)
    copies.prepare(1)
    with pytest.raises(DiskError, match=r"3 copies of the state need .* bytes, and .* are free; make"):
        copies.prepare(2**60)
    (tmp_path / "world-00000000").write_text("in the way")
    for step in (1, 2, 3):
        copies.take(StandIn(step), state_of(step))
    assert [text[:31] for text in caplog.messages] == ["no copy of the state in memory:"]
