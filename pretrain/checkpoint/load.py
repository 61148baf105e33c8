"""Loading a checkpoint into a model, whatever topology wrote it: each rank reads the ranges that it holds."""

import logging
from pathlib import Path

from pretrain import dist
from pretrain.checkpoint.fragments import FragmentReader
from pretrain.checkpoint.layout import Manifest, load_manifest
from pretrain.checkpoint.state import TrainState
from pretrain.errors import CheckpointError, PretrainError
from pretrain.types import FragmentStore

log = logging.getLogger(__name__)


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
    """Fills a model's state from a verified checkpoint, whatever topology wrote it. Collective.

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
