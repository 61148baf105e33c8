"""Out of a model of ours and back: written as a release, loaded by transformers, imported again."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.interop.label_names import WORDS, labelled_by
from pretrain.interop.release import open_release
from pretrain.interop.write import write_release
from pretrain.model.build import named_weights
from tests.helpers.lent import Lent, quiet_transformers


def check_round_trip(
    lent: Lent, auto_class: Any, out: Path, unread: frozenset[str] = frozenset(), **inputs: Tensor
) -> None:
    """Asserts that an export of ours is the model that it came from.

    transformers finds no key missing but `unread`, unexpected or mismatched, picks the same class, and its first output
    for `inputs` is equal to the last bit; an import of the export has the same config and is bit-identical.
    """
    theirs, ours, release = lent
    weights = {name: weight.detach() for name, weight in named_weights(ours)}
    words = labelled_by(release.folder) == WORDS
    written = write_release(
        release.config, weights.__getitem__, out, family=release.family.model_type, labels_words=words
    )
    again = open_release(out)
    assert again.config == release.config
    for name, weight in weights.items():
        assert torch.equal(again.read(name), weight), name
    with quiet_transformers():
        loaded, info = auto_class.from_pretrained(out, output_loading_info=True, attn_implementation="eager")
    assert set(info.pop("missing_keys")) == unread
    assert {key: value for key, value in info.items() if value} == {}
    assert type(loaded).__name__ == type(theirs).__name__ == written.architecture
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**inputs)[0], theirs(**inputs)[0])
