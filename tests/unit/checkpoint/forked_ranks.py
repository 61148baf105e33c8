"""Real ranks over gloo for tests of checkpoints: forks of the test's own process, which know no engine.

    codes = run_ranks(2, lambda world: save_on(world, folder, 3))      by rank

A rank ends with 0, with the exit code of an error of ours, with -9 where it was killed, or with LOST_PEER where it
found another one gone.
"""

import json
import os
import re
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as td

from pretrain.checkpoint.manager import CheckpointManager
from pretrain.dist import World
from pretrain.errors import PretrainError
from pretrain.types import Fragment
from pretrain.utils import io
from tests.helpers.waiting import LIMIT_S
from tests.unit.checkpoint.stand_in import StandIn, state_of

LOST_PEER = 69


class Share(StandIn):
    """A rank's part of the stand-in: every `size`-th fragment, from that of the rank on."""

    def __init__(self, step: int, world: World) -> None:
        super().__init__(step, cut=3)
        self._world = world

    def owned_fragments(self) -> Iterator[Fragment]:
        """Yields what this rank saves."""
        yield from list(self.held_fragments())[self._world.rank :: self._world.size]


def manager_on(world: World, folder: Path) -> CheckpointManager:
    """The checkpoints of several ranks."""
    return CheckpointManager(folder, 2, world, {"world_size": world.size})


def run_ranks(size: int, body: Callable[[World], Any]) -> list[int]:
    """Calls `body` on `size` ranks; returns how each ended."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(size):
            child = os.fork()
            if not child:
                _be_rank(World(rank, size, rank), Path(folder) / "store", body)
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _be_rank(world: World, store: Path, body: Callable[[World], Any]) -> None:
    code = LOST_PEER
    try:
        signal.alarm(LIMIT_S)  # one that waits for a dead one ends by then, and its test fails
        td.init_process_group(
            "gloo", store=td.FileStore(str(store), world.size), rank=world.rank, world_size=world.size
        )
        body(world)
        code = 0
    except PretrainError as error:
        code = error.exit_code
    except RuntimeError:  # gloo's word for a peer that is gone
        code = LOST_PEER
    except BaseException:
        traceback.print_exc()
        code = 70
    finally:
        os._exit(code)


@dataclass(frozen=True)
class Operation:
    """One operation of a save: the n-th of its kind on its file. Numbers alone would not do: who makes a folder varies.

    Attributes:
        text: Its name and its file's, random parts of temporary names left out.
        number: How many of the same text came before, on the same side of the rename that commits.
        after: Whether it comes after that.
    """

    text: str
    number: int
    after: bool


def watch(act: Callable[[Operation], None]) -> None:
    """Calls `act` before each operation of this process."""
    seen: dict[tuple[str, bool], int] = {}
    renamed = False

    def hook(name: str, path: Path) -> None:
        nonlocal renamed
        text = re.sub(r"(\.tmp-step-\d+|\.tmp)-\w+$", r"\1", f"{name} {path.name}")
        seen[text, renamed] = seen.get((text, renamed), -1) + 1
        act(Operation(text, seen[text, renamed], renamed))
        renamed = renamed or text.startswith("rename step-")

    io.set_fault_hook(hook)


def kill_at(operation: Operation) -> None:
    """Makes this process kill itself before an operation."""
    watch(lambda current: os.kill(os.getpid(), signal.SIGKILL) if current == operation else None)


def operations_of_a_save(folder: Path, size: int) -> list[list[Operation]]:
    """Returns the operations of each rank in a save of step 3 to a copy of a folder."""
    copy, notes = folder.with_name("copy"), folder.with_name("notes")
    shutil.copytree(folder, copy)
    notes.mkdir()

    def body(world: World) -> None:
        seen: list[Operation] = []
        watch(seen.append)
        save_on(world, copy, 3)
        (notes / str(world.rank)).write_text(json.dumps([asdict(operation) for operation in seen]))

    assert run_ranks(size, body) == [0] * size
    found = [json.loads((notes / str(rank)).read_text()) for rank in range(size)]
    shutil.rmtree(copy)
    shutil.rmtree(notes)
    return [[Operation(**values) for values in rank] for rank in found]


def save_on(world: World, folder: Path, step: int) -> None:
    """Saves a step."""
    manager_on(world, folder).save(Share(step, world), state_of(step))
