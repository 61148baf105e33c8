"""Record of a mixer in the place of attention. One file each in `kinds/mixers/`."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from pretrain.config.base import Conflicts, OnResume, Section

Ability = Literal[
    "both_sides",  # encoders, prefixes and cross attention
    "fp8",  # `engine.fp8`
    "multi_token",  # `model.multi_token`
    "inits",  # `model.init` other than normal
    "widths",  # rules of `optim.transfer` and of ladders
    "maps",  # weights to draw
    "values",  # `value_residual`, `value_embeddings`
]
"""Capability of the product that a mixer may lack; what lacks it is refused by its key."""


class MixerSection(Section):
    """Sizes of the layers of a mixer."""

    kernel: Annotated[int, OnResume.NEVER] = Field(default=4, ge=2, le=64)
    """Tokens that the short convolution reads, with the present one."""

    def sizes(self, width: int, heads: int) -> Any:
        """Returns a NamedTuple of all values of a layer, with the defaults in such a stack."""
        raise NotImplementedError

    def describe(self, width: int, heads: int) -> str:
        """Returns a layer in words: `the gated delta rule with 4 states of 24 x 48`."""
        raise NotImplementedError

    def divisible(self, width: int, heads: int, *, matrices: bool) -> dict[str, int]:
        """Returns the numbers of a layer by key, of which ranks that share its rows have as many each.

        `matrices`: they share its matrices.
        """
        raise NotImplementedError

    def size_conflicts(self, width: int, heads: int) -> Conflicts:
        """Yields sizes that do not go together in a stack of this size, with keys from the section's."""
        yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """A layer through which tokens read those before them, by a state in place of keys and values.

    Attributes:
        layer: `"module:class"` of a module, built from a `StackConfig`. It is called as `SelfAttention`
            is, with `prepare_documents` (`pretrain/model/parts/recurrence.py`) in the place of
            a mask. `draws` are functions of (weight, generator) by the names of the weights that
            start in a way of their own; `fused` has the rows of matrices that are one parameter.
        counts: Module of its counts (`MixerCounts` of `pretrain/config/model/mixers/counted.py`).
        section: Sizes, under the mixer's name in a stack.
        supports: Abilities; what needs another is refused by its key (`StackConfig.lacking`).
    """

    layer: str
    counts: str
    section: type[MixerSection]
    supports: frozenset[Ability] = frozenset()
