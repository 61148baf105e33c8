"""Copies of the state in the memory of the machine, from which a recovery continues.

    every n steps   fragments of a rank  ->  world-2/step-00000041/rank-00000.safetensors, then .json
    a recovery      newest step with a .json of every rank  ->  manifest  ->  loaded as a checkpoint

The folder, in /dev/shm, is that of the launcher, and outlives the ranks. A copy is written by a
thread, over the oldest, and waited for before the next. Ranks meet in every step: when one begins a
copy, all have written their last but one, so that three are enough, the one being written included.
"""

import logging
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pretrain.checkpoint.agree import agree, nothing
from pretrain.checkpoint.format import MANIFEST, SCHEMA, Manifest, step_name, step_of
from pretrain.checkpoint.layouts import FileLayout, check_complete
from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.save import start_thread
from pretrain.checkpoint.snapshot import HostCopy, Snapshot
from pretrain.checkpoint.state import TrainState
from pretrain.dist import World
from pretrain.errors import CheckpointError, DiskError, PretrainError
from pretrain.run.recovery import COPIES, Recovery
from pretrain.types import FragmentStore
from pretrain.utils.io import FileRecord, make_dir, remove_tree, write_json
from pretrain.utils.safe_read import read_json

log = logging.getLogger(__name__)

Skips = Sequence[Sequence[int]]


class MemoryCopies:
    """The copies of one run in this world and those before it."""

    def __init__(self, recovery: Recovery, world: World, every_steps: int) -> None:
        self._folder = Path(recovery.memory)
        self._own = self._folder / f"world-{recovery.number:08d}"
        self._is_first = recovery.number == 0
        self._world = world
        self._every_steps = every_steps
        self._host = HostCopy()
        self._steps: list[int] = []
        self._writing: Future[None] | None = None
        self._has_failed = False

    def prepare(self, checkpoint_bytes: int) -> None:
        """Checks that the copies of all ranks fit, in the first world. Collective. Raises: DiskError."""
        if not self._is_first:  # there are copies already, and a recovery is not to fail by them
            return

        def check() -> None:
            free, needed = shutil.disk_usage(self._folder).free, COPIES * checkpoint_bytes
            if free < needed:
                raise DiskError(
                    f"{COPIES} copies of the state need {needed:,} bytes, and {free:,} are free",
                    where=str(self._folder),
                    fix="make /dev/shm larger, or set run.recover_every_steps=0",
                )

        agree(check if self._world.is_main else nothing)

    def hold(self) -> None:
        """Makes changes of the state from now on wait for the copy; see `HostCopy.hold`."""
        self._host.hold()

    def take(self, store: FragmentStore, state: TrainState) -> None:
        """Begins a copy where one is due; waits for the one before."""
        if state.step % self._every_steps:
            return
        self.finish()
        self._steps.append(state.step)
        stale = self._name(self._steps.pop(0)) if len(self._steps) > COPIES else None
        if stale is not None:
            stale.with_suffix(".json").unlink(missing_ok=True)  # the copy counts no longer
        elif len(self._steps) == COPIES and self._world.is_main:
            self._tidy(self._own)  # all ranks have a copy of this world
        snapshot = Snapshot(store, self._host)
        self._writing = start_thread(partial(self._write, snapshot, state, stale))

    def finish(self) -> None:
        """Waits for the copy that is being written, whose failure is a warning."""
        if self._writing is not None:
            self._warn(self._writing.exception())

    def _warn(self, error: BaseException | None) -> None:
        if error is None or self._has_failed:
            return
        if not isinstance(error, PretrainError):
            raise error
        self._has_failed = True
        log.warning("no copy of the state in memory: %s", error)

    def _name(self, step: int) -> Path:
        return self._own / step_name(step) / f"rank-{self._world.rank:05d}"

    def _write(self, snapshot: Snapshot, state: TrainState, stale: Path | None) -> None:
        path = self._name(state.step)
        file = path.with_suffix(".safetensors")
        make_dir(path.parent)
        if stale is not None:  # new pages would cost more than all else
            with suppress(OSError):
                stale.with_suffix(".safetensors").rename(file)
            with suppress(OSError):  # the last rank removes the folder
                stale.parent.rmdir()
        record = snapshot.write(file, over=file.exists())
        vote = {
            "record": asdict(record),
            "layout": snapshot.layout,
            "ranks": self._world.size,
            "state": state.to_json(),
            "scalars": snapshot.scalars,
        }
        write_json(path.with_suffix(".json"), vote)

    def load(self, store: FragmentStore, after_step: int, skips: Skips) -> TrainState | None:
        """Loads the newest copy that every rank of its world has; returns its state. Collective.

        None: there is none after `after_step`, of a course that leaves out `skips`.
        """
        choose = partial(self._choose, after_step, skips)
        chosen = agree(choose if self._world.is_main else nothing)[0]
        state = None
        if chosen is not None:
            path = self._folder / chosen
            state = load_checkpoint(path, store, self._world.rank / self._world.size)
            log.info("the state of step %d is that in memory", state.step)
        tidy = partial(self._tidy, None if chosen is None else self._folder / chosen)
        agree(tidy if self._world.is_main else nothing)
        return state

    def _choose(self, after_step: int, skips: Skips) -> str | None:
        paths = {path: step_of(path) or 0 for path in self._folder.glob("world-*/step-*")}
        for path in sorted(paths, key=lambda path: (paths[path], path), reverse=True):
            if paths[path] > after_step and self._complete(path, skips):
                return str(path.relative_to(self._folder))
        return None

    def _complete(self, path: Path, skips: Skips) -> bool:
        """Writes the manifest of a copy that is whole; returns whether it is."""
        try:
            votes = [read_json(vote) for vote in sorted(path.glob("rank-*.json"))]
            if not votes or len(votes) != votes[0]["ranks"]:
                return False
            if votes[0]["state"]["skips"] != [*map(list, skips)]:  # of before a rollback
                return False
            layouts = [FileLayout(*vote["layout"]) for vote in votes]
            shapes = check_complete([(layout, 1) for layout in layouts], {})
        except (OSError, ValueError, CheckpointError):  # of a rank that was killed as it wrote
            return False
        files = [FileRecord(**vote["record"]) for vote in votes]
        moments = sorted({kind for layout in layouts for kind in layout.moments})
        first = votes[0]
        manifest = Manifest(SCHEMA, first["state"], shapes, moments, files, {}, first["scalars"])
        write_json(path / MANIFEST, manifest.to_json())
        return True

    def _tidy(self, stays: Path | None) -> None:
        """Removes all copies but those in `stays`: a loss before the next copy needs the loaded one again."""
        for path in self._folder.glob("world-*/step-*"):
            if stays not in (path, path.parent):
                remove_tree(path)
