"""A save during training, from the copy in host memory to the removal of old checkpoints.

States of a `Save`; each arrow between two phases is one collective `advance`, after all ranks are
done with the first:

    begin --> WRITE --------> COMMIT ---------> RE-READ -------> RETAIN --> finished, committed
              each rank:      rank 0: ledger,   each rank:       rank 0: removes what is
              its file,       manifest, fence,  its file, from   beyond `keep`
              CRCs, fsync     one rename        the disk again
                |   |            |                 |
                |   |            |                 +-- differs ----> set aside as bad, DiskError
                |   |            +-- disk full, lease lost --------> temporary folder removed, error
                |   +-- a rank failed, or fragments are missing ---> temporary folder removed, error
                +-- this step is committed already ----------------> finished, committed

Only COMMIT changes names that a reader sees, so a crash in any state leaves the previous
checkpoints valid. Threads call no collective.
"""

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pretrain.checkpoint.agree import agree, nothing, wait_until_visible
from pretrain.checkpoint.format import MANIFEST, SCHEMA, Manifest, load_manifest, set_aside, step_name, unseen
from pretrain.checkpoint.layouts import AgreedLayouts, LayoutVote
from pretrain.checkpoint.retention import Retention
from pretrain.checkpoint.snapshot import Snapshot
from pretrain.checkpoint.state import TrainState
from pretrain.dist import World
from pretrain.errors import CheckpointError, DiskError, PretrainError
from pretrain.utils.io import FileRecord, check_file, make_dir, publish_dir, remove_tree, write_json

log = logging.getLogger(__name__)


def start_thread(work: Callable[[], Any]) -> Future[Any]:
    """Runs `work` in a daemon thread, which calls no collective and delays no exit."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again by `Future.result`
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


@dataclass(slots=True)
class SaveTarget:
    """Folder of checkpoints of a run, and all that its saves have in common."""

    folder: Path
    world: World
    topology: dict[str, Any]
    fence: Callable[[], None]  # raises LockedError where another attempt owns the run
    retention: Retention
    token: str  # suffix of this attempt's temporary folders
    layouts: AgreedLayouts = field(default_factory=AgreedLayouts)

    def set_aside(self, path: Path) -> None:
        """Renames a damaged checkpoint: see `set_aside`. Raises: LockedError too."""
        self.fence()
        set_aside(path, "bad-damaged")


class Save:
    """A save in flight, of this rank's fragments and the state of their step.

    Rank 0 calls `before_commit` before the manifest is written, to make the ledger durable (it may
    raise DiskError), and `after_commit` after the rename, before anything older is removed (it must
    not raise).
    """

    def __init__(
        self,
        place: SaveTarget,
        snapshot: Snapshot,
        state: TrainState,
        before_commit: Callable[[], None],
        after_commit: Callable[[], None],
    ) -> None:
        self._place = place
        self._snapshot = snapshot
        self._layout = b""  # encoded; known when the file is written
        self._state = state
        self._before_commit = before_commit
        self._after_commit = after_commit
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
        return self._task.done()

    def advance(self) -> None:
        """Enters the next phase, once this rank is done with the current one. Collective.

        Raises:
            DiskError: A rank could not write, or read back what it wrote; there is no checkpoint.
            CheckpointError: The state has values that are not finite, or incomplete parameters.
            LockedError: Another attempt has taken the run folder.
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
        """Runs all remaining phases. Collective. Raises: as `advance`."""
        while not self.is_finished:
            self.join()
            self.advance()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for this rank's part of the current phase; not collective."""
        wait([self._task], timeout_s)

    def _run(self) -> Iterator[Future[Any]]:
        """Yields the task of each phase; between two yields all ranks meet, in `advance`."""
        writing = start_thread(self._write)
        yield writing
        votes = self._or_discard(partial(agree, writing.result))
        if votes[0] is None:  # committed before a rollback or restart repeated the step
            self._discard()
            self.is_committed = True
            return
        # Every rank has the same votes, so the same outcome.
        heard = [LayoutVote(*vote["layout"]) for vote in votes]
        rank = self._place.world.rank
        self._or_discard(partial(self._place.layouts.agree, heard, rank, self._layout))
        files = [FileRecord(**vote["record"]) for vote in votes]
        committing = start_thread(partial(self._commit, files) if self._is_main else nothing)
        yield committing
        self._or_discard(partial(agree, committing.result))
        self.is_committed = True
        reading = start_thread(self._read_again)
        yield reading
        try:
            unseen = next((text for text in agree(reading.result) if text), None)
        except DiskError:
            # Renamed before anyone relies on it; a rename that fails is the error that all ranks
            # raise.
            self.is_committed = False
            agree(partial(self._place.set_aside, self.path) if self._is_main else nothing)
            raise
        retaining = start_thread(partial(self._retain, unseen) if self._is_main else nothing)
        yield retaining
        agree(retaining.result)

    def _or_discard(self, result: Callable[[], Any]) -> Any:
        try:
            return result()
        except PretrainError:
            self._discard()  # on a full disk the next save needs the space
            raise

    def _discard(self) -> None:
        if self._is_main:
            with contextlib.suppress(DiskError):  # the next attempt removes leftovers
                remove_tree(self._temporary)

    def _write(self) -> dict[str, Any] | None:
        """Writes this rank's file; returns its vote, or None on rank 0 if the step is committed."""
        snapshot = self._snapshot
        try:
            if self._is_main and self.path.exists():
                try:
                    load_manifest(self.path)
                except CheckpointError:
                    self._place.set_aside(self.path)
                else:
                    self._after_commit()  # the attempt that committed may have died before this
                    return None
            make_dir(self._temporary)
            record = snapshot.write(self._temporary / self._file_name)
        except DiskError as error:
            raise self._not_saved(error, snapshot.num_bytes) from error
        except OSError as error:
            raise self._not_saved(unseen(error)) from error
        self._layout = snapshot.layout.encode()
        return {"record": asdict(record), "layout": LayoutVote.on(self._layout, self._place.layouts.agreed)}

    def _commit(self, files: list[FileRecord]) -> None:
        place = self._place
        layouts = place.layouts
        state = self._state.to_json()
        scalars = self._snapshot.scalars
        manifest = Manifest(SCHEMA, state, layouts.shapes, layouts.moments, files, place.topology, scalars)
        try:
            # This order is the commit protocol: ledger durable, manifest last in the folder, lease
            # checked immediately before the one rename that makes the checkpoint visible.
            self._before_commit()
            write_json(self._temporary / MANIFEST, manifest.to_json())
            place.fence()
            publish_dir(self._temporary, self.path)
        except DiskError as error:
            raise self._not_saved(error) from error
        self._after_commit()

    def _not_saved(self, error: DiskError, num_bytes: int | None = None) -> DiskError:
        needed = "" if num_bytes is None else f"{num_bytes:,} bytes needed, "
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({needed}{shutil.disk_usage(self._place.folder).free:,} free)"
        rank = self._place.world.rank
        text = f"checkpoint of step {self.step} not saved: rank {rank}: {error.where}: {error.what}{free}"
        return DiskError(text, fix=error.fix)

    def _read_again(self) -> str | None:
        """Reads this rank's file back and compares it; returns why this node does not see it."""
        path = self.path / self._file_name
        if not self._is_main:
            try:
                wait_until_visible(self.path, [MANIFEST, self._file_name])
            except CheckpointError as error:
                return str(error)
        try:
            if hasattr(os, "posix_fadvise"):  # drops the page cache: the next read is the disk's
                with contextlib.suppress(OSError), path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            records = {record.name: record for record in load_manifest(self.path).files}
            problem = check_file(path, records[self._file_name])
        except CheckpointError as error:
            problem = error.what
        if problem is not None:
            text = f"checkpoint of step {self.step} was committed, but is not what was written ({problem}): set aside"
            raise DiskError(text, where=str(self.path), fix="check the file system")
        return None

    def _retain(self, unseen: str | None) -> None:
        """Removes checkpoints beyond `keep`; a disk error is a warning: the new one is valid."""
        try:
            self._place.fence()
            if unseen is None:
                self._place.retention.note_valid(self.path)
            else:  # `Retention` verifies the checkpoint itself
                log.warning("checkpoint of step %d is committed, and one node does not see it: %s", self.step, unseen)
            self._place.retention.apply()
        except DiskError as error:
            log.warning("%s", error)
