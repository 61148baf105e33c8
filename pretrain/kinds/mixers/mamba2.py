"""Mamba-2 (Dao and Gu 2024): a state of a matrix for each head, with a decay and no reading before a write."""

from typing import Annotated, NamedTuple

from pydantic import Field

from pretrain.config.base import MAX_HEADS, MAX_WIDTH, Conflicts, OnResume
from pretrain.kinds.mixer import Mixer, MixerSection


class Mamba2Sizes(NamedTuple):
    """Values of a layer, with the defaults."""

    heads: int
    head_width: int
    state_width: int
    groups: int
    kernel: int
    bias: bool
    filter_bias: bool
    norm_eps: float

    @property
    def inner(self) -> int:
        """Width of the values of all heads."""
        return self.heads * self.head_width

    @property
    def rows(self) -> tuple[int, int, int]:
        """Width of values, keys and queries of all groups, which the convolution mixes."""
        return self.inner, self.groups * self.state_width, self.groups * self.state_width

    @property
    def fused(self) -> tuple[int, ...]:
        """Rows of the matrices of gates, values, keys, queries and steps, which are one parameter."""
        return self.inner, *self.rows, self.heads

    def of_rank(self, ranks: int) -> "Mamba2Sizes":
        """Returns the sizes of the part of the heads that each of so many ranks has."""
        return self._replace(heads=self.heads // ranks, groups=self.groups // ranks)


class Mamba2Config(MixerSection):
    """Sizes of the layers of Mamba-2 (Dao and Gu 2024): each head has a matrix of `state_width` x
    `head_width` as its state, at any length of a document."""

    heads: Annotated[int | None, OnResume.NEVER] = Field(default=None, ge=1, le=MAX_HEADS)
    """Number of heads. None: `2 width / head_width`, as in the paper."""
    head_width: Annotated[int, OnResume.NEVER] = Field(default=64, ge=1, le=MAX_WIDTH)
    """Width of a head."""
    state_width: Annotated[int, OnResume.NEVER] = Field(default=128, ge=1, le=MAX_WIDTH)
    """Width of what writes to a state and of what reads it (B and C in the paper)."""
    groups: Annotated[int, OnResume.NEVER] = Field(default=1, ge=1, le=MAX_HEADS)
    """Number of groups of heads; those of a group write and read alike, and have one norm."""
    bias: Annotated[bool, OnResume.NEVER] = False
    """Bias terms in both projections."""
    filter_bias: Annotated[bool, OnResume.NEVER] = True
    """Bias terms in the short convolution."""
    norm_eps: Annotated[float, OnResume.ALLOW] = Field(default=1e-5, gt=0)
    """Epsilon of the RMSNorm of a group's gated result."""

    def sizes(self, width: int, heads: int) -> Mamba2Sizes:
        """Returns the sizes in a stack."""
        return Mamba2Sizes(
            self.heads or 2 * width // self.head_width, self.head_width, self.state_width,
            self.groups, self.kernel, self.bias, self.filter_bias, self.norm_eps,
        )  # fmt: skip

    def describe(self, width: int, heads: int) -> str:
        """Returns the rule and its states."""
        sizes = self.sizes(width, heads)
        return f"Mamba-2 with {sizes.heads} states of {sizes.state_width} x {sizes.head_width}"

    def divisible(self, width: int, heads: int, *, matrices: bool) -> dict[str, int]:
        """Returns the heads; and with `matrices` the groups, whose rows would be copies."""
        sizes = self.sizes(width, heads)
        return {"mamba2.heads": sizes.heads} | ({"mamba2.groups": sizes.groups} if matrices else {})

    def size_conflicts(self, width: int, heads: int) -> Conflicts:
        """Yields heads that do not divide, and none."""
        sizes = self.sizes(width, heads)
        if sizes.heads < 1:
            wide = f"head_width={sizes.head_width} leaves no head of width={width}"
            yield wide, "set mamba2.heads, or a smaller one"
        elif sizes.heads % sizes.groups:
            yield f"groups={sizes.groups} must divide the number of heads, {sizes.heads}"


MAMBA2 = Mixer(
    layer="pretrain.model.parts.state_space:Mamba2",
    counts="pretrain.config.model.mixers.state_space",
    section=Mamba2Config,
)
