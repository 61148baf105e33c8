"""Saving, finding, verifying and loading checkpoints. Every function here is collective unless it says otherwise.

    save    each rank writes its fragments to .tmp-step-N  ->  sizes and CRCs gathered, all ranks vote
            ->  rank 0: manifest, fsync, one rename  ->  older ones beyond `keep` removed
    load    newest first: sizes and CRCs checked, a share of the files a rank  ->  bad: set aside, try the older one
            ->  each rank reads the ranges it holds

Rank 0 decides and tells; no rank decides alone. DeepSpeed's own save and load are not used: they are not crash-safe and
do not reshape.
"""

import functools
import itertools
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretrain import dist
from pretrain.checkpoint.fragments import FragmentReader, write_fragments
from pretrain.checkpoint.layout import (
    MANIFEST,
    SCHEMA,
    Manifest,
    NewerFormatError,
    list_checkpoints,
    load_manifest,
    step_name,
)
from pretrain.checkpoint.state import TrainState
from pretrain.dist import World
from pretrain.errors import CheckpointError, DiskError, PretrainError
from pretrain.io import FileRecord, check_file, make_dir, publish_dir, remove_dir, write_json
from pretrain.types import Fragment, FragmentStore

log = logging.getLogger(__name__)


class CheckpointManager:
    """The checkpoints of one run.

    Args:
        folder: The run's `checkpoints` folder.
        keep: Newest ones kept, at least 2.
        world: This process's place.
        topology: What wrote them, noted in the manifest.
    """

    def __init__(self, folder: Path, keep: int, world: World, topology: dict[str, Any]) -> None:
        self._folder, self._keep, self._world, self._topology = folder, keep, world, topology

    def save(self, store: FragmentStore, state: TrainState) -> Path:
        """Commits a checkpoint of `state.step`; does nothing where that step is committed already.

        Raises:
            DiskError: Some rank could not write; nothing was committed, nothing older was touched.
        """
        final = self._folder / step_name(state.step)
        if dist.broadcast_object((final / MANIFEST).is_file()):
            return final
        temporary = self._folder / f".tmp-{final.name}"
        self._on_main(lambda: self._clear(temporary), "checkpoint not saved")
        fragments = list(store.owned_fragments())
        record, error = self._write_own(temporary, fragments)
        shapes = {fragment.name: list(fragment.shape) for fragment in fragments}
        moments = sorted({kind for fragment in fragments for kind in fragment.tensors} - {"weight"})
        votes = dist.gather_objects({"record": record, "error": error, "shapes": shapes, "moments": moments})
        scalars = store.scalars()
        try:
            _raise_first([vote["error"] for vote in votes], "checkpoint not saved")
            self._on_main(lambda: self._commit(temporary, final, state, scalars, votes), "checkpoint not saved")
        except DiskError:
            if self._world.is_main:  # a full disk needs the space
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if self._world.is_main:
            self._remove_old()
        return final

    def _clear(self, temporary: Path) -> None:
        make_dir(self._folder)
        for leftover in (*self._folder.glob(".tmp-*"), *self._folder.glob(".trash-*")):
            shutil.rmtree(leftover)
        make_dir(temporary)

    def _write_own(self, temporary: Path, fragments: list[Fragment]) -> tuple[dict[str, Any] | None, str | None]:
        try:
            path = temporary / f"rank-{self._world.rank:05d}.safetensors"
            return asdict(write_fragments(path, fragments)), None
        except DiskError as error:
            return None, f"rank {self._world.rank}: {error}"

    def _commit(
        self, temporary: Path, final: Path, state: TrainState, scalars: dict[str, float], votes: list[dict[str, Any]]
    ) -> None:
        shapes: dict[str, list[int]] = {}
        for vote in votes:
            shapes |= vote["shapes"]
        files = [FileRecord(**vote["record"]) for vote in votes]
        moments = sorted({kind for vote in votes for kind in vote["moments"]})
        manifest = Manifest(SCHEMA, state.to_json(), shapes, moments, files, self._topology, scalars)
        write_json(temporary / MANIFEST, manifest.to_json())
        publish_dir(temporary, final)

    def _remove_old(self) -> None:
        """Removes checkpoints beyond `keep`; where that fails, the one just saved is no less good."""
        for old in list_checkpoints(self._folder)[: -self._keep]:
            try:
                remove_dir(old)
            except DiskError as error:
                log.warning("%s", error)

    def _on_main(self, action: Callable[[], None], failed: str) -> None:
        """Runs `action` on rank 0 and fails on every rank where it fails there, saying what `failed`."""
        error = None
        if self._world.is_main:
            try:
                action()
            except DiskError as failure:
                error = str(failure)
            except OSError as failure:
                error = f"{self._folder}: {failure}"
        _raise_first(dist.gather_objects(error), failed)

    def load_newest(self, store: FragmentStore) -> TrainState | None:
        """Loads the newest checkpoint that verifies into `store`; returns its state, or None where there is none yet.

        A bad one is renamed to `step-N.bad-damaged`, and the next older one is tried.

        Raises:
            CheckpointError: There are or were checkpoints, and none verifies: a run never starts over by itself. Or the
                newest is of a newer format: it is good, but not for this version.
            DiskError: A bad one cannot be renamed.
        """
        while True:
            newest = dist.broadcast_object([path.name for path in list_checkpoints(self._folder)[-1:]])
            if not newest:
                self._refuse_restart()
                return None
            path = self._folder / newest[0]
            problem = self.verify(path)
            if problem is None:
                return load_checkpoint(path, store)
            log.warning("checkpoint %s is damaged (%s); trying an older one", path, problem)
            self._on_main(functools.partial(_set_aside, path), "a damaged checkpoint cannot be set aside")

    def _refuse_restart(self) -> None:
        bad = sorted(path.name for path in self._folder.glob("step-*")) if self._folder.is_dir() else []
        if any(dist.gather_objects(bool(bad))):
            raise CheckpointError(
                f"this run has saved checkpoints, and none can be used ({', '.join(bad)})",
                where=str(self._folder),
                fix="restore one, or start over under another run.name",
            )

    def verify(self, path: Path) -> str | None:
        """Checks sizes and CRCs of all files, a share of them on each rank; returns the first problem, or None.

        Raises:
            NewerFormatError: This version cannot tell.
        """
        try:
            files = load_manifest(path).files
            mine = files[self._world.rank :: self._world.size]
            problem = next((text for record in mine if (text := check_file(path / record.name, record))), None)
        except NewerFormatError:
            raise  # on every rank: all read the same manifest
        except CheckpointError as error:
            problem = error.what
        return next((text for text in dist.gather_objects(problem) if text), None)


def _raise_first(errors: list[str | None], failed: str) -> None:
    first = next((error for error in errors if error), None)
    if first is not None:
        raise DiskError(f"{failed}: {first}")


def _set_aside(path: Path) -> None:
    """Gives a damaged checkpoint a name that nothing reads, and that no earlier one of the same step has."""
    target = path.with_name(f"{path.name}.bad-damaged")
    for number in itertools.count(2):
        if not target.exists():
            break
        target = path.with_name(f"{path.name}.bad-damaged-{number}")
    path.rename(target)


def _check_kind(kind: str, manifest: Manifest) -> None:
    if kind != "weight" and kind not in manifest.moments:
        saved = ", ".join(manifest.moments) or "weights alone"
        raise CheckpointError(
            f"it was saved under another optimizer: it has {saved}, and no {kind}",
            fix="use the optim.kind it was trained with, or start another run from its weights with init.from",
        )


def load_checkpoint(
    path: Path,
    store: FragmentStore,
    weights_only: bool = False,
    *,
    may_lack: tuple[str, ...] = (),
    leave: tuple[str, ...] = (),
) -> TrainState:
    """Fills a model's state from a verified checkpoint, whatever topology wrote it.

    Args:
        path: The checkpoint folder.
        store: Where it goes.
        weights_only: Leave the moments and the step count as they are (to start a new run from these weights).
        may_lack: Beginnings of the names of parameters that stay as they are where the checkpoint has none of that
            shape, which is said.
        leave: Names of parameters that stay as they are, which is said.

    Raises:
        CheckpointError: It is not of this model; the parameters that differ are named.
    """
    manifest = load_manifest(path)
    reader = FragmentReader(path / record.name for record in manifest.files)
    problem, anew = None, dict[str, str]()
    try:
        for fragment in store.held_fragments():
            saved = manifest.shapes.get(fragment.name)
            lacks = saved != list(fragment.shape) and fragment.name.startswith(may_lack)
            if lacks or fragment.name in leave:
                anew[fragment.name] = f"{fragment.name} {list(fragment.shape)}"
                continue
            if saved != list(fragment.shape):
                shape = "no such parameter" if saved is None else f"shape {saved}"
                raise CheckpointError(
                    f"{fragment.name} has shape {list(fragment.shape)} in this model, in the checkpoint {shape}",
                    where=str(path),
                    fix="use the config that the checkpoint was trained with",
                )
            kinds = [kind for kind in fragment.tensors if kind == "weight" or not weights_only]
            for kind in kinds:
                _check_kind(kind, manifest)
                reader.read_into(fragment.name, kind, fragment.offset, fragment.tensors[kind])
    except PretrainError as error:
        problem = str(error)
    found = dist.gather_objects((problem, anew))
    first = next((text for text, _ in found if text), None)
    if first is not None:
        raise CheckpointError(first)
    if anew := {name: text for _, part in found for name, text in part.items()}:
        log.info(
            "weights are those of %s, but for these, which begin anew: %s",
            path,
            ", ".join(anew[n] for n in sorted(anew)),
        )
    state = TrainState.from_json(manifest.state, str(path))
    store.finish_load(*((0, {}) if weights_only else (state.optimizer_step, manifest.scalars)))
    return state
