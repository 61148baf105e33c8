"""Saves of several ranks: a failure of one is a failure of all, the same, and what is committed is of all of them."""

import json
import multiprocessing
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as td

from pretrain.checkpoint.format import list_checkpoints, load_manifest
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.dist import World
from pretrain.errors import LockedError, PretrainError
from pretrain.utils import io
from tests.helpers.waiting import LIMIT_S
from tests.unit.checkpoint.stand_in import StandIn, load_newest, state_of

RANKS = 3


class Share(StandIn):
    """What one rank has of it: every third piece."""

    rank = 0

    def owned_fragments(self):
        """Yields this rank's pieces."""
        yield from list(self.held_fragments())[self.rank :: RANKS]


def lost(folder: Path) -> None:
    """The fence of an attempt that is succeeded while it writes."""
    if any(folder.glob(".tmp-*")):
        raise LockedError("the run is another attempt's")


def break_disk(case: str, rank: int) -> None:
    """Lets one operation of this rank fail, where the case says so."""

    def hook(operation, path):
        here = f"{rank} {operation} {path.name.split('.tmp-')[0]}"
        if here == case:
            raise OSError(28, "No space left on device")

    io.set_fault_hook(hook)


def rank_main(rank: int, folder: Path, cases: list[str]) -> None:
    """Saves once a case; writes down how it ended, and at which phase."""
    td.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    ends = []
    for number, case in enumerate(cases):
        store = Share(1, cut=2)
        store.rank = rank
        if case == "1 nan":
            store.tensors["embed"]["weight"][2:4] = float("nan")  # of the second piece
        fence = partial(lost, folder / str(number)) if case == "lost" else lambda: None
        checkpoints = CheckpointManager(folder / str(number), 2, World(rank, RANKS, rank), {}, fence=fence)
        break_disk(case, rank)
        saving, phase = checkpoints.begin(store, state_of(1)), 0
        try:
            while not saving.is_finished:
                saving.advance()
                phase += 1
            ends.append("saved")
        except PretrainError as error:
            ends.append(f"{phase} {type(error).__name__}: {error}")
        io.set_fault_hook(None)
    (folder / f"{rank}.json").write_text(json.dumps(ends))
    td.destroy_process_group()


CASES = {
    "none": "saved",
    "1 write rank-00001.safetensors": "0 DiskError: checkpoint of step 1 not saved: rank 1: ",
    "2 fsync rank-00002.safetensors": "0 DiskError: checkpoint of step 1 not saved: rank 2: ",
    "0 rename manifest.json": "1 DiskError: checkpoint of step 1 not saved: rank 0: ",
    "1 nan": "0 CheckpointError: .tmp-step-00000001-",
    "lost": "1 LockedError: the run is another attempt's",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of all cases, and how each ended on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("fork")
    arguments = (folder, list(CASES))
    processes = [context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode == 0
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_end_a_save_alike_at_the_same_phase(ended, case):
    folder, ends = ended
    number = list(CASES).index(case)
    told = {end[number] for end in ends}
    assert len(told) == 1, told
    assert told.pop().startswith(CASES[case])
    left = sorted(path.name for path in (folder / str(number)).iterdir())
    assert left == (["step-00000001"] if case == "none" else [])


def test_one_checkpoint_has_the_files_of_all_ranks_and_loads_in_one_process(ended):
    folder, _ = ended
    (path,) = list_checkpoints(folder / "0")
    assert [record.name for record in load_manifest(path).files] == [
        f"rank-0000{rank}.safetensors" for rank in range(3)
    ]
    assert load_newest(folder / "0") == 1
