"""`model.encoder.latent`, `model.decoder.latent` -- latent attention."""

from typing import Annotated

from pydantic import Field

from pretrain.config.base import MAX_WIDTH, OnResume, Section


class LatentConfig(Section):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, 2.1): keys and values of all heads
    are made from one vector of a token, which is all that a cache holds, and a key of positions."""

    kv_rank: Annotated[int, OnResume.NEVER] = Field(ge=1, le=MAX_WIDTH)
    """Width of the vector that keys and values are made from."""
    query_rank: Annotated[int | None, OnResume.NEVER] = Field(default=None, ge=1, le=MAX_WIDTH)
    """Width of the vector that queries are made from. None: queries are made from the input."""
    rope_width: Annotated[int, OnResume.NEVER] = Field(ge=2, le=MAX_WIDTH)
    """Dimensions of a head that are rotated, the first ones; in keys all heads share them."""
    value_width: Annotated[int, OnResume.NEVER] = Field(ge=1, le=MAX_WIDTH)
    """Width of the values of a head, at most `head_width`, which is that of queries and keys."""
    norm_eps: Annotated[float | None, OnResume.ALLOW] = Field(default=None, gt=0)
    """Epsilon of the norms of these vectors. None: `norm_eps` of the stack."""
