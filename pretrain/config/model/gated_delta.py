"""`model.decoder.delta` -- layers of the gated delta rule, in the place of attention."""

from typing import Annotated

from pydantic import Field

from pretrain.config.base import MAX_HEADS, MAX_WIDTH, Conflicts, OnResume, Section


class GatedDeltaConfig(Section):
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
    kernel: Annotated[int, OnResume.NEVER] = Field(default=4, ge=2, le=64)
    """Tokens that the short convolution of queries, keys and values reads, with the present one."""
    negative_eigenvalues: Annotated[bool, OnResume.ALLOW] = True
    """Write strengths of 0 to 2, not 0 to 1: a write may then reverse what a state holds, so that a
    layer can track parity (Grazzi et al. 2024)."""
    norm_eps: Annotated[float, OnResume.ALLOW] = Field(default=1e-5, gt=0)
    """Epsilon of the RMSNorm of each head's result, before it is gated."""

    def _conflicts(self) -> Conflicts:
        if self.heads and self.value_heads and self.value_heads % self.heads:
            yield f"value_heads={self.value_heads} must be a multiple of heads={self.heads}"
