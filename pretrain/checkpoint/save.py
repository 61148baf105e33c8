"""Work beside the loop: a function in a thread of its own, and what it came to."""

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from pretrain.checkpoint.agree import agree, check_complete, nothing, wait_until_visible
from pretrain.checkpoint.format import MANIFEST, SCHEMA, Manifest, load_manifest, set_aside, step_name, unseen
from pretrain.checkpoint.retention import Retention
from pretrain.checkpoint.snapshot import Snapshot
from pretrain.checkpoint.state import TrainState
from pretrain.dist import World
from pretrain.errors import CheckpointError, DiskError, PretrainError
from pretrain.utils.checksum import FileRecord, check_file
from pretrain.utils.io import make_dir, publish_dir, remove_tree, write_json

Result = TypeVar("Result")


class SaveTask(Generic[Result]):
    """Runs `work` in a daemon thread, which must not call a collective.

    Args:
        work: Called once.
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as error:  # for whoever asks for the result
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether there is a result, or an error."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when it is done, or when the time is over. Signals are handled meanwhile."""
        self._thread.join(timeout_s)

    def result(self) -> Result:
        """Waits; returns what `work` returned, or raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result[0]


# A save, from the copy in host memory to the last old checkpoint that goes: four phases beside the
# training.
#
#     write    every rank: its file, with CRCs, fsynced             the ranks vote: one that failed, and nothing is
#                                                                   committed
#     commit   rank 0: ledger, manifest, fence, one rename          all are told
#     re-read  every rank: its file, from the disk again            all are told; what is not seen is no damage
#     retain   rank 0: what is beyond `keep` is removed
#
# Work is done in a thread, which calls no collective. Between two phases the ranks call `advance`
# together, when all of them have been heard to be done: a checkpoint is committed, or is not, at
# the same step for all.


log = logging.getLogger(__name__)


@dataclass(slots=True)
class SaveTarget:
    """Where a run saves.

    Attributes:
        folder: Of checkpoints.
        world: This process's place.
        topology: Noted in manifests.
        fence: Raises LockedError where the run folder is not ours any more. Rank 0 calls it before it changes names.
        retention: Removes old ones.
        token: Ends the names of our temporary folders: those that end otherwise are not ours.
        shapes: Shape of every parameter in the last checkpoint that was committed; empty before.
    """

    folder: Path
    world: World
    topology: dict[str, Any]
    fence: Callable[[], None]
    retention: Retention
    token: str
    shapes: dict[str, list[int]] = field(default_factory=dict)

    def set_aside(self, path: Path) -> None:
        """Renames a damaged checkpoint: see `set_aside`. Raises: LockedError too."""
        self.fence()
        set_aside(path, "bad-damaged")


class Save:
    """A save in flight.

    Args:
        place: Where to.
        snapshot: What, of this rank.
        state: The state of the step that is saved.
        before_commit: Called by rank 0 before the manifest is written: what must be durable by then, and may fail by a
            DiskError.
        after_commit: Called by rank 0 when the checkpoint is there, before anything older is removed; must not raise.

    Attributes:
        path: The checkpoint that it makes.
        is_committed: Whether it is there.
        is_finished: Whether nothing is left to do.
    """

    def __init__(
        self,
        place: SaveTarget,
        snapshot: Snapshot,
        state: TrainState,
        before_commit: Callable[[], None],
        after_commit: Callable[[], None],
    ) -> None:
        self._place, self._snapshot, self._state = place, snapshot, state
        self._before_commit, self._after_commit = before_commit, after_commit
        self._is_main = place.world.is_main
        self.step = state.step
        self.path = place.folder / step_name(state.step)
        self._temporary = place.folder / f".tmp-{self.path.name}-{place.token}"
        self._file_name = f"rank-{place.world.rank:05d}.safetensors"
        self.is_committed = self.is_finished = False
        self._phases = self._run()
        self._task = next(self._phases)

    @property
    def is_done(self) -> bool:
        """Whether this rank's part of the phase is done, or has failed."""
        return self._task.is_done

    def advance(self) -> None:
        """Goes on to the next phase; waits where this rank's part of this one is not done. Collective.

        Raises:
            DiskError: Some rank could not write, or not read what it had written; that checkpoint is not there.
            CheckpointError: The state is not one to go back to.
            LockedError: This attempt does not own the run folder any more.
        """
        assert not self.is_finished
        try:
            self._task = next(self._phases)
        except StopIteration:
            self.is_finished = True
        except BaseException:
            self.is_finished = True
            raise

    def wait(self) -> None:
        """Goes through all phases that are left. Collective. Raises: as `advance`."""
        while not self.is_finished:
            self.join()
            self.advance()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for what this rank does now, whatever the others do; not collective."""
        self._task.wait(timeout_s)

    def _run(self) -> Iterator[SaveTask[Any]]:
        writing = SaveTask(self._write)
        yield writing
        votes = self._or_discard(partial(agree, writing.result))
        if votes[0] is None:
            self._discard()
            self.is_committed = True
            return
        shapes = self._or_discard(partial(check_complete, votes, self._place.shapes))  # alike on every rank
        committing = SaveTask(partial(self._commit, votes, shapes) if self._is_main else nothing)
        yield committing
        self._or_discard(partial(agree, committing.result))
        self.is_committed, self._place.shapes = True, shapes
        reading = SaveTask(self._read_again)
        yield reading
        try:
            unseen = next((text for text in agree(reading.result) if text), None)
        except DiskError:
            self.is_committed = False
            agree(partial(self._place.set_aside, self.path) if self._is_main else nothing)
            raise
        retaining = SaveTask(partial(self._retain, unseen) if self._is_main else nothing)
        yield retaining
        agree(retaining.result)

    def _or_discard(self, result: Callable[[], Any]) -> Any:
        try:
            return result()
        except PretrainError:
            self._discard()  # a full disk needs the space
            raise

    def _discard(self) -> None:
        if self._is_main:
            with contextlib.suppress(DiskError):  # what cannot be removed now, the next attempt removes
                remove_tree(self._temporary)

    def _write(self) -> dict[str, Any] | None:
        """Writes this rank's file; returns its vote, or None on rank 0 where the step is committed already."""
        snapshot = self._snapshot
        try:
            if self._is_main and self._is_there():
                self._after_commit()  # which may have failed, or not been reached, at the time
                return None
            make_dir(self._temporary)
            record = snapshot.write(self._temporary / self._file_name)
        except DiskError as error:
            raise self._not_saved(error, snapshot.num_bytes) from error
        except OSError as error:
            raise self._not_saved(unseen(error)) from error
        vote = {"shapes": snapshot.shapes, "moments": snapshot.moments, "num_weights": snapshot.num_weights}
        return {"record": asdict(record), **vote}

    def _is_there(self) -> bool:
        """Whether the step is committed already; what is not a checkpoint, under its name, is set aside."""
        if not self.path.exists():
            return False
        try:
            load_manifest(self.path)
        except CheckpointError:
            self._place.set_aside(self.path)
            return False
        return True

    def _commit(self, votes: list[dict[str, Any]], shapes: dict[str, list[int]]) -> None:
        files = [FileRecord(**vote["record"]) for vote in votes]
        moments = sorted({kind for vote in votes for kind in vote["moments"]})
        place, state = self._place, self._state.to_json()
        manifest = Manifest(SCHEMA, state, shapes, moments, files, place.topology, self._snapshot.scalars)
        try:
            self._before_commit()
            write_json(self._temporary / MANIFEST, manifest.to_json())
            place.fence()
            publish_dir(self._temporary, self.path)
        except DiskError as error:
            raise self._not_saved(error) from error
        self._after_commit()

    def _not_saved(self, error: DiskError, num_bytes: int | None = None) -> DiskError:
        """Returns the error with what a user needs to know: which save, which rank, how much room there is."""
        needed = "" if num_bytes is None else f"{num_bytes:,} bytes needed, "
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({needed}{shutil.disk_usage(self._place.folder).free:,} free)"
        rank = self._place.world.rank
        what = f"checkpoint of step {self.step} not saved: rank {rank}: {error.where}: {error.what}{free}"
        return DiskError(what, fix=error.fix)

    def _read_again(self) -> str | None:
        """Compares this rank's file on the disk with what was meant to be there; rank 0 the manifest too.

        Returns:
            Why that was not possible, where this node does not see the files under the name that rank 0 gave them.

        Raises:
            DiskError: It is not what was written.
        """
        path = self.path / self._file_name
        if not self._is_main:
            try:
                wait_until_visible(self.path, [MANIFEST, self._file_name])
            except CheckpointError as error:
                return str(error)
        try:
            _drop_from_cache(path)
            records = {record.name: record for record in load_manifest(self.path).files}
            problem = check_file(path, records[self._file_name])
        except CheckpointError as error:
            problem = error.what
        if problem is not None:
            what = f"checkpoint of step {self.step} was committed, but is not what was written ({problem}): set aside"
            raise DiskError(what, where=str(self.path), fix="check the file system")
        return None

    def _retain(self, unseen: str | None) -> None:
        """Removes what is beyond `keep`. What the disk refuses here is said: the checkpoint is no less good for it.

        Args:
            unseen: Why a rank did not read its file again. Then all of it is read here before anything goes.
        """
        try:
            self._place.fence()
            if unseen is None:
                self._place.retention.note_valid(self.path)
            else:
                log.warning("checkpoint of step %d is committed, and one node does not see it: %s", self.step, unseen)
            self._place.retention.apply()
        except DiskError as error:
            log.warning("%s", error)


def _drop_from_cache(path: Path) -> None:
    """Lets go of the pages of a file in memory, so that what is read next comes from the disk."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
