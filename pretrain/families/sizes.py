"""Sizes of a family: the keys that its models share, as published, and further ones of each model.

Where a paper and the released configuration differ, the released one is taken. Contexts are those
of training, not what a method of inference stretches them to.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

Values = dict[str, Any]
BOTH = ("encoder", "decoder")
_ENDS = ("max_seq_len", "tied_embeddings", "vocab_multiple")


class Size(NamedTuple):
    """A model by name: a value of `model.preset`.

    Attributes:
        values: Keys of `model:`, without `vocab_size`.
        of: Rows of the published vocabulary, None for images, and the parameters of the released
            model, of 1000 labels where it labels images. None: nothing was published.
    """

    values: Values
    of: tuple[int | None, int] | None = None

    def over(self, **keys: Any) -> "Size":
        """Returns the model with other keys."""
        return self._replace(values=self.values | keys)


Sizes = Mapping[str, Size]


class Architecture(NamedTuple):
    """Values that the models of a family have at any size."""

    stacks: tuple[str, ...]  # two are given in full, so that a user may change either
    stack: Values  # keys of each stack
    ends: Values  # keys of the model besides its stacks

    def size(
        self,
        layers: int,
        width: int,
        heads: int,
        ff_width: int,
        *,
        of: tuple[int | None, int] | None = None,
        **other: Any,
    ) -> Size:
        """Returns a model: its size, and other keys of its stacks or of the model."""
        size = {"layers": layers, "width": width, "heads": heads, "ff_width": ff_width}
        ends = {name: other.pop(name) for name in _ENDS if name in other}
        return Size(dict.fromkeys(self.stacks, self.stack | size | other) | self.ends | ends, of)
