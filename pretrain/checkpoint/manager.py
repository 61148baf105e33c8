"""The checkpoints of a run: saved during training, listed, verified, loaded.

    prepare   leftovers of dead attempts removed; free space checked; a file written as a trial
    begin     this rank's fragments copied to host memory  ->  a `Save` in phases (save.py)
    load      newest first: verified, a share of the files per rank  ->  damaged: renamed, next one
              ->  each rank reads its ranges (load.py)

Rank 0 decides for all. DeepSpeed's own checkpoints are not used: they are not crash-safe, and
depend on the topology.
"""

import logging
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pretrain import dist
from pretrain.checkpoint.agree import agree, nothing, wait_for_folder
from pretrain.checkpoint.format import NewerFormatError, list_checkpoints, list_folders, load_manifest
from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.memory_copies import MemoryCopies
from pretrain.checkpoint.retention import BestKeeper, Retention, remove_leftovers
from pretrain.checkpoint.save import Save, SaveTarget
from pretrain.checkpoint.snapshot import HostCopy, Snapshot
from pretrain.checkpoint.state import TrainState
from pretrain.dist import World
from pretrain.errors import CheckpointError, DiskError, disk_fix
from pretrain.run.recovery import Recovery
from pretrain.types import FragmentStore
from pretrain.utils.io import check_file, make_dir, write_file

log = logging.getLogger(__name__)


def room_problem(free: int, existing: int, checkpoint: int, num_kept: int) -> str | None:
    """Returns why checkpoints do not fit, with the numbers; None where they do.

    All in bytes: `existing` checkpoints are replaced over time by `num_kept` ones at once.
    """
    needed = checkpoint * num_kept
    if needed <= free + existing:
        return None
    there = f", besides {existing:,} bytes of existing checkpoints" if existing else ""
    return (
        f"{num_kept} checkpoints of {checkpoint:,} bytes (those that are kept, and the one being written) need "
        f"{needed:,} bytes, and {free:,} are free{there}"
    )


def check_room(folder: Path, checkpoint: int, num_kept: int) -> None:
    """Checks that checkpoints fit on the file system of `folder`. Raises: DiskError."""
    try:
        files = (file for path in list_checkpoints(folder) for file in path.iterdir())
        existing = sum(file.stat().st_size for file in files)
        problem = room_problem(shutil.disk_usage(folder).free, existing, checkpoint, num_kept)
    except OSError as error:
        raise DiskError(
            f"cannot be looked at: {error.strerror}",
            where=str(folder),
            fix=disk_fix(error),
        ) from error
    if problem is not None:
        raise DiskError(
            problem,
            where=str(folder),
            fix="free space, lower checkpoint.keep, or set run.dir to a larger file system",
        )


def try_writing(folder: Path) -> None:
    """Writes and removes a file, for early errors of quota and permissions. Raises: DiskError."""
    trial = folder / ".trial"
    write_file(trial, b"checkpoints are written here\n")
    with suppress(OSError):
        trial.unlink()


def _check_readable(path: Path) -> None:
    for entry in (path, *path.glob("*")):
        mode = os.R_OK | os.X_OK if entry.is_dir() else os.R_OK
        if entry.exists() and not os.access(entry, mode):
            raise DiskError(
                f"may not be read by user {os.geteuid()} on {socket.gethostname()}",
                where=str(entry),
                fix="fix permissions",
            )


class CheckpointManager:
    """The checkpoints of one run: the `keep` newest stay, at least 2.

    Never removed are those of steps that are a multiple of `keep_every_steps` (0: none), the best
    one by the validation metric `best`, and those in use by another run. Rank 0 calls `fence`
    immediately before the rename that commits, and before anything is removed or renamed; it
    raises LockedError where another attempt owns the run folder. `topology` is JSON for the
    manifest: world size, engine, attempt.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        world: World,
        topology: dict[str, Any],
        fence: Callable[[], None] = nothing,
        keep_every_steps: int = 0,
        best: str | None = None,
    ) -> None:
        self._folder = folder
        self._world = world
        self._host = HostCopy()
        self._best = None if best is None else BestKeeper(folder, best)
        self.retention = Retention(folder, keep, keep_every_steps, self._best)
        self._place = SaveTarget(folder, world, topology, fence, self.retention, token="")
        self._in_flight: Save | None = None
        self.copies: MemoryCopies | None = None
        """Copies in memory, beside the checkpoints; None: there are none."""

    def keep_copies(self, recovery: Recovery, every_steps: int) -> None:
        """Makes room for copies where the launcher has a folder in memory for them."""
        if recovery.memory:
            self.copies = MemoryCopies(recovery, self._world, every_steps)

    def prepare(self, checkpoint_bytes: int, num_kept: int) -> None:
        """Prepares the folder for `num_kept` checkpoints at once. Collective, before step 1.

        Raises: DiskError, where they do not fit, or the folder is not writable.
        """
        self._begin_attempt()

        def check() -> None:
            if self._world.is_main:
                check_room(self._folder, checkpoint_bytes, num_kept)
                try_writing(self._folder)

        agree(check)

    def _begin_attempt(self) -> None:
        """Draws this attempt's temporary names, and removes dead folders. Collective, once."""
        if self._place.token:
            return

        def sweep() -> str:
            if self._world.is_main:
                self._place.fence()
                make_dir(self._folder)
                remove_leftovers(self._folder)
            return secrets.token_hex(4)

        self._place.token = agree(sweep)[0]

    def begin(
        self,
        store: FragmentStore,
        state: TrainState,
        before_commit: Callable[[], None] = nothing,
        after_commit: Callable[[], None] = nothing,
    ) -> Save:
        """Copies this rank's fragments to host memory and begins to write them.

        The store may change after this has returned and `hold` was called. For the other arguments
        see `Save`. Raises: DiskError, where the folder of checkpoints cannot be created.
        """
        assert self._in_flight is None or self._in_flight.is_finished, "one save at a time: they share their buffers"
        self._begin_attempt()
        self._in_flight = Save(self._place, Snapshot(store, self._host), state, before_commit, after_commit)
        return self._in_flight

    def note_evaluation(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Notes the evaluation of a step before its save. Empty: unknown."""
        if self._best is not None:
            self._best.note(step, metrics)

    def reserve(self, store: FragmentStore) -> None:
        """Allocates the host memory of saves from a GPU, in a thread: after the first step, when all state exists."""
        tensors = [tensor for fragment in store.owned_fragments() for tensor in fragment.tensors.values()]
        if any(tensor.is_cuda for tensor in tensors):
            self._host.reserve(sum(tensor.numel() for tensor in tensors), pinned=True)

    def hold(self) -> None:
        """Makes changes of the state from now on wait for the copy; see `HostCopy.hold`."""
        self._host.hold()

    def save(self, store: FragmentStore, state: TrainState) -> Path:
        """Commits a checkpoint, through all phases. Collective. Raises: as `Save.advance`."""
        save = self.begin(store, state)
        save.wait()
        return save.path

    def load_newest(self, store: FragmentStore) -> TrainState | None:
        """Loads the newest valid checkpoint; returns its state, None before the first. Collective.

        A damaged one is renamed to `step-N.bad-damaged` with a warning, and the next older one is
        tried.

        Raises:
            CheckpointError: There are or were checkpoints, and none is valid: a run never starts
                over by itself. Or the newest has a newer format, which is no damage.
            DiskError: A damaged one cannot be renamed; or permissions forbid reading one, which is
                no damage.
        """
        is_older = False
        while True:
            newest = agree(self._list_newest)[0]
            if not newest:
                self._refuse_restart()
                return None
            path = self._folder / newest[0]
            problem = self.verify(path)
            if problem is None:
                self.retention.note_valid(path)
                # The next save must have the same parameters, of the same shapes.
                self._place.layouts.load(dict(load_manifest(path).shapes))
                if is_older:
                    log.warning("checkpoint %s is good: the run continues from there", path)
                return load_checkpoint(path, store, self._world.rank / self._world.size)
            is_older = True
            log.warning("checkpoint %s is damaged (%s); trying an older one", path, problem)
            # Renamed before the next look, so that the older one is the newest in the following
            # pass.
            agree(partial(self._place.set_aside, path) if self._world.is_main else nothing)

    def _list_newest(self) -> list[str]:
        folders = list_folders(self._folder) if self._world.is_main else []
        return [path.name for path in folders[-1:]]

    def _refuse_restart(self) -> None:
        bad = sorted(path.name for path in self._folder.glob("step-*"))
        if any(dist.gather_objects(bool(bad))):
            raise CheckpointError(
                f"this run has saved checkpoints, and none can be used ({', '.join(bad)})",
                where=str(self._folder),
                fix="restore one, or start over under another run.name",
            )

    def verify(self, path: Path) -> str | None:
        """Verifies sizes and CRCs, a share of the files per rank; returns a problem. Collective.

        Raises:
            NewerFormatError: The format is newer than this version.
            CheckpointError: A rank does not see the files that rank 0 sees.
            DiskError: A rank may not read them.
        """
        wait_for_folder(path, self._world)
        agree(partial(_check_readable, path))
        try:
            files = load_manifest(path).files
            mine = files[self._world.rank :: self._world.size]
            problem = next((text for record in mine if (text := check_file(path / record.name, record))), None)
        except NewerFormatError:
            raise  # on every rank: all read the same manifest
        except CheckpointError as error:
            problem = error.what
        return next((text for text in dist.gather_objects(problem) if text), None)
