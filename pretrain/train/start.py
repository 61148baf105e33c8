"""Where the weights of a new run come from, if not from its seed: `init.from`."""

from pathlib import Path

from pretrain.checkpoint.load import load_checkpoint
from pretrain.config.recurrent import AnyModelConfig
from pretrain.types import FragmentStore

HEAD_PARTS = ("head.", "pooler.")
SCORES = ("head.weight", "head.bias")


def load_start(what: Path, model: AnyModelConfig, store: FragmentStore) -> None:
    """Takes the weights of a checkpoint, a run or a model folder. Collective.

    Under a head of labels, what the checkpoint lacks of a head begins anew; and so do the scores, unless its labels are
    the same: a row of the same number would else stand for another label.

    Args:
        what: Names them.
        model: Of the run.
        store: Where they go.

    Raises:
        CheckpointError: There is no intact checkpoint, or it is not of this model.
    """
    from pretrain.artifact.find import find_checkpoint
    from pretrain.artifact.what import open_what

    if model.head.kind != "labels":
        load_checkpoint(find_checkpoint(what), store, weights_only=True)
        return
    source = open_what(what)
    leave = () if source.config.head.labels == model.head.labels else SCORES
    load_checkpoint(source.path, store, weights_only=True, may_lack=HEAD_PARTS, leave=leave)
