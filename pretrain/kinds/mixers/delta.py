"""Gated delta rule (Yang et al. 2024, Gated DeltaNet): a state of a matrix for each head."""

from typing import Annotated, NamedTuple

from pydantic import Field

from pretrain.config.base import MAX_HEADS, MAX_WIDTH, Conflicts, OnResume
from pretrain.kinds.mixer import Mixer, MixerSection


class DeltaSizes(NamedTuple):
    """Values of a layer, with the defaults."""

    heads: int  # of queries and keys
    value_heads: int
    key_width: int
    value_width: int
    kernel: int
    negative_eigenvalues: bool
    norm_eps: float

    @property
    def rows(self) -> tuple[int, int, int]:
        """Width of all queries, keys and values."""
        keys = self.heads * self.key_width
        return keys, keys, self.value_heads * self.value_width

    @property
    def fused(self) -> tuple[int, int, int, int]:
        """Rows of the matrices of queries, keys, values and gates, which are one parameter."""
        return *self.rows, self.rows[-1]

    def of_rank(self, ranks: int) -> "DeltaSizes":
        """Returns the sizes of the part of the heads that each of so many ranks has."""
        return self._replace(heads=self.heads // ranks, value_heads=self.value_heads // ranks)


class DeltaConfig(MixerSection):
    """Sizes of the layers of the gated delta rule (Yang et al. 2024, Gated DeltaNet): each head has
    a matrix of `key_width` x `value_width` as its state, at any length of a document."""

    heads: Annotated[int | None, OnResume.NEVER] = Field(default=None, ge=1, le=MAX_HEADS)
    """Number of heads of queries and keys. None: `heads` of the stack."""
    value_heads: Annotated[int | None, OnResume.NEVER] = Field(default=None, ge=1, le=MAX_HEADS)
    """Number of heads of values, each with its state; a multiple of `heads`. None: `heads`."""
    key_width: Annotated[int | None, OnResume.NEVER] = Field(default=None, ge=1, le=MAX_WIDTH)
    """Width of a query and of a key. None: `0.75 width / heads`, as in the paper."""
    value_width: Annotated[int | None, OnResume.NEVER] = Field(default=None, ge=1, le=MAX_WIDTH)
    """Width of a value. None: `2 key_width`."""
    negative_eigenvalues: Annotated[bool, OnResume.ALLOW] = True
    """Write strengths of 0 to 2, not 0 to 1: a write may then reverse what a state holds, so that a
    layer can track parity (Grazzi et al. 2024)."""
    norm_eps: Annotated[float, OnResume.ALLOW] = Field(default=1e-5, gt=0)
    """Epsilon of the RMSNorm of each head's result, before it is gated."""

    def _conflicts(self) -> Conflicts:
        if self.heads and self.value_heads and self.value_heads % self.heads:
            yield f"value_heads={self.value_heads} must be a multiple of heads={self.heads}"

    def sizes(self, width: int, heads: int) -> DeltaSizes:
        """Returns the sizes in a stack."""
        heads = self.heads or heads
        key = self.key_width or 3 * width // (4 * heads)
        return DeltaSizes(
            heads, self.value_heads or heads, key, self.value_width or 2 * key,
            self.kernel, self.negative_eigenvalues, self.norm_eps,
        )  # fmt: skip

    def describe(self, width: int, heads: int) -> str:
        """Returns the rule and its states."""
        sizes = self.sizes(width, heads)
        states = f"{sizes.value_heads} states of {sizes.key_width} x {sizes.value_width}"
        return f"the gated delta rule with {states}"

    def divisible(self, width: int, heads: int, *, matrices: bool) -> dict[str, int]:
        """Returns the heads of queries and keys; there are as many of values, or a multiple."""
        return {"delta.heads": self.sizes(width, heads).heads}

    def size_conflicts(self, width: int, heads: int) -> Conflicts:
        """Yields heads that do not divide, and widths of 0."""
        sizes = self.sizes(width, heads)
        if sizes.value_heads % sizes.heads:
            yield f"value_heads={sizes.value_heads} must be a multiple of delta.heads={sizes.heads}"
        if min(sizes.key_width, sizes.value_width) < 1:
            yield f"key_width of width={width} and {sizes.heads} heads is 0", "set delta.key_width"


DELTA = Mixer(
    layer="pretrain.model.parts.gated_delta:GatedDelta",
    counts="pretrain.config.model.mixers.gated_delta",
    section=DeltaConfig,
)
