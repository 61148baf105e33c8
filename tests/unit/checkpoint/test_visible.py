"""Two ranks whose nodes show the same files, one of them late: each has a folder of its own, and one is a late copy."""

import json
import logging
import multiprocessing
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as td

from pretrain.checkpoint import agree
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.dist import World
from pretrain.errors import PretrainError
from pretrain.utils import io
from tests.helpers.clock import FakeClock
from tests.helpers.waiting import LIMIT_S
from tests.unit.checkpoint.forked_ranks import Share, manager_on, run_ranks
from tests.unit.checkpoint.stand_in import StandIn, load_newest, save, state_of


def copy_late(source: Path, target: Path) -> None:
    """Shows a checkpoint on the other node, a file at a time."""
    for path in sorted(source.glob("step-*/*")):
        (target / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, target / f".late-{path.name}")
        (target / f".late-{path.name}").rename(target / path.parent.name / path.name)


class LateClock(FakeClock):
    """While it is waited for, the checkpoint comes."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def sleep(self, seconds: float) -> None:
        """As `time.sleep`, and once it has lasted for a while the files are there."""
        super().sleep(seconds)
        if self.now > 1010:
            copy_late(self._folder / "node-0", self._folder / "node-1")


def load(rank: int, folder: Path, is_seen: bool) -> None:
    """Loads the newest checkpoint from this node's folder; writes down what came of it."""
    td.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if rank:
        agree.time = LateClock(folder) if is_seen else FakeClock()  # type: ignore[assignment]
    try:
        state = CheckpointManager(folder / f"node-{rank}", 2, World(rank, 2, rank), {}).load_newest(StandIn(0))
        end = f"step {state.step}"
    except PretrainError as error:
        end = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(end))
    td.destroy_process_group()


def load_on_two_nodes(folder: Path, *, is_seen: bool) -> list[str]:
    """What came of loading on each rank."""
    (folder / "node-1").mkdir()
    save(folder / "node-0", 1, 2)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=load, args=(rank, folder, is_seen)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode == 0
    assert sorted(path.name for path in (folder / "node-0").iterdir()) == ["step-00000001", "step-00000002"]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_checkpoint_that_a_node_sees_late_is_waited_for_and_not_taken_for_damaged(tmp_path):
    assert load_on_two_nodes(tmp_path, is_seen=True) == ["step 2", "step 2"]


def test_a_node_that_never_sees_a_checkpoint_ends_the_start_on_every_rank_and_spoils_nothing(tmp_path):
    ends = load_on_two_nodes(tmp_path, is_seen=False)
    assert ends[0] == ends[1]
    what = r"node-1/step-00000002/manifest.json: not seen on \S+ in 90 s, and there on another node; see whether all"
    assert re.search(what, ends[0])


def save_unseen(folder: Path, steps: list[int], damage: Callable[[Path], None] = lambda path: None) -> str:
    """Saves on two ranks, of which the second sees nothing under a new name; returns what the first one logged."""

    def body(world: World) -> None:
        agree.time = FakeClock()  # type: ignore[assignment]
        if world.rank:
            agree._names = lambda path: []
        else:
            logging.getLogger().addHandler(logging.FileHandler(folder / "log"))
            io.set_fault_hook(lambda operation, path: damage(folder / "run" / "step-00000003"))
        checkpoints = manager_on(world, folder / "run")
        for step in steps:
            checkpoints.save(Share(step, world), state_of(step))

    assert run_ranks(2, body) == [0, 0]
    return (folder / "log").read_text()


def steps_in(folder: Path) -> list[str]:
    """The names in the folder of checkpoints."""
    return sorted(path.name for path in (folder / "run").iterdir())


def test_a_checkpoint_that_a_node_does_not_see_after_the_commit_is_kept_and_this_is_said(tmp_path):
    told = save_unseen(tmp_path, [1, 2, 3])
    what = (
        r"checkpoint of step 3 is committed, and one node does not see it: \S+/manifest.json: not seen on \S+ in 90 s"
    )
    assert re.search(what, told)
    assert steps_in(tmp_path) == ["step-00000002", "step-00000003"]
    assert load_newest(tmp_path / "run") == 3


def test_where_a_node_does_not_see_a_checkpoint_all_of_it_is_read_before_an_older_one_goes(tmp_path):
    def flip(path: Path) -> None:
        file = path / "rank-00001.safetensors"
        if file.exists():
            file.write_bytes(file.read_bytes()[:-1] + b"\x7f")

    save_unseen(tmp_path, [1, 2, 3], flip)
    assert steps_in(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    assert load_newest(tmp_path / "run") == 2


def test_one_process_waits_for_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(agree, "wait_until_visible", None)
    agree.wait_for_folder(tmp_path / "not there", World(0, 1, 0))
