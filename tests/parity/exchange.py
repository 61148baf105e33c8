"""Out of a model of ours and back: written as a release, loaded by transformers, imported again."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.interop.release import open_release
from pretrain.interop.write import write_release
from pretrain.model.build import named_weights
from tests.helpers.lent import Lent, quiet_transformers


def check_round_trip(
    lent: Lent, auto_class: Any, out: Path, unread: frozenset[str] = frozenset(), **inputs: Tensor
) -> None:
    """Asserts that an export of ours is the model that it came from.

    transformers finds no key missing but `unread`, unexpected or mismatched, picks the same class, and its tensors and
    its first output for `inputs` are equal to the last bit, but scores of one row; an import of the export has the same
    config and is bit-identical.
    """
    theirs, ours, release = lent
    weights = {name: weight.detach() for name, weight in named_weights(ours)}
    written = write_release(release.config, weights.__getitem__, out, like=release.architecture)
    again = open_release(out)
    assert again.config == release.config
    for name, weight in weights.items():
        assert torch.equal(again.read(name), weight), name
    with quiet_transformers():
        loaded, info = auto_class.from_pretrained(out, output_loading_info=True, attn_implementation="eager")
    assert set(info.pop("missing_keys")) == unread
    assert {key: value for key, value in info.items() if value} == {}
    assert type(loaded).__name__ == type(theirs).__name__ == written.architecture
    unused = {name for weight in release.family.weights(release.config) for name in weight.unread}
    expected = theirs.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert name in unread | unused or torch.equal(tensor, expected[name]), name
    with torch.no_grad():
        found, wanted = loaded.eval()(**inputs)[0], theirs(**inputs)[0]
    # The order of a sum of one row depends on the place of the row in memory.
    one_row = release.config.head.num_scores == 1
    torch.testing.assert_close(found, wanted, rtol=1e-6 if one_row else 0, atol=1e-6 if one_row else 0)
