"""Loading a checkpoint into a model, whatever topology wrote it: each rank reads the ranges that it holds."""

from pathlib import Path

from pretrain import dist
from pretrain.checkpoint.fragments import FragmentReader
from pretrain.checkpoint.layout import Manifest, load_manifest
from pretrain.checkpoint.state import TrainState
from pretrain.errors import CheckpointError, PretrainError
from pretrain.types import FragmentStore


def _check_kind(kind: str, manifest: Manifest) -> None:
    if kind != "weight" and kind not in manifest.moments:
        saved = ", ".join(manifest.moments) or "weights alone"
        raise CheckpointError(
            f"it was saved under another optimizer: it has {saved}, and no {kind}",
            fix="use the optim.kind it was trained with, or start another run from its weights with init.from",
        )


def load_checkpoint(path: Path, store: FragmentStore) -> TrainState:
    """Fills a model's state from a verified checkpoint, whatever topology wrote it. Collective.

    Args:
        path: The checkpoint folder.
        store: Where it goes.

    Raises:
        CheckpointError: It is not of this model; the parameters that differ are named.
    """
    manifest = load_manifest(path)
    reader = FragmentReader(path / record.name for record in manifest.files)
    problem = None
    try:
        for fragment in store.held_fragments():
            saved = manifest.shapes.get(fragment.name)
            if saved != list(fragment.shape):
                shape = "no such parameter" if saved is None else f"shape {saved}"
                raise CheckpointError(
                    f"{fragment.name} has shape {list(fragment.shape)} in this model, in the checkpoint {shape}",
                    where=str(path),
                    fix="use the config that the checkpoint was trained with",
                )
            for kind in fragment.tensors:
                _check_kind(kind, manifest)
                reader.read_into(fragment.name, kind, fragment.offset, fragment.tensors[kind])
    except PretrainError as error:
        problem = str(error)
    first = next((text for text in dist.gather_objects(problem) if text), None)
    if first is not None:
        raise CheckpointError(first)
    state = TrainState.from_json(manifest.state, str(path))
    store.finish_load(state.optimizer_step, manifest.scalars)
    return state
