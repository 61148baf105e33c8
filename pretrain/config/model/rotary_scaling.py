"""`model.encoder.rope_scaling`, `model.decoder.rope_scaling` -- rotary positions for longer sequences."""

from typing import Annotated, Literal

from pydantic import Field

from pretrain.config.base import MAX_ROWS, Conflicts, OnResume, Section


class RotaryScaling(Section):
    """Scaling of rotary frequencies, for sequences longer than in the original training."""

    kind: Annotated[Literal["linear", "dynamic", "llama3", "yarn", "longrope"], OnResume.ALLOW]
    """`linear`: divide every frequency (Chen et al. 2023). `dynamic`: raise the period with the
    length of a document, from `original_max_seq_len` on. `llama3` (Llama 3.1): divide low
    frequencies, keep high ones, interpolate between. `yarn` (Peng et al. 2023): likewise, and scale
    the scores. `longrope` (Ding et al. 2024): divide each frequency by a factor of its own, and scale
    the scores."""
    factor: Annotated[float, OnResume.ALLOW] = Field(ge=1)
    """Divisor of the frequencies, 1 or more; of `longrope` the growth of the context, for the scores alone."""
    original_max_seq_len: Annotated[int, OnResume.ALLOW] = Field(default=8192, ge=1, le=MAX_ROWS)
    """Sequence length of the original training in tokens; all kinds but `linear`."""
    short_factors: Annotated[list[float], OnResume.ALLOW] = Field(default_factory=list)
    """Divisors of the frequencies in documents of up to `original_max_seq_len` tokens, one for each
    pair of rotated dimensions; `longrope` only. Of a cache in decoding its capacity counts."""
    long_factors: Annotated[list[float], OnResume.ALLOW] = Field(default_factory=list)
    """Divisors of the frequencies in longer documents; `longrope` only."""
    low_freq_factor: Annotated[float, OnResume.ALLOW] = Field(default=1.0, gt=0)
    """Wavelengths above `original_max_seq_len / low_freq_factor` are divided; `llama3` only."""
    high_freq_factor: Annotated[float, OnResume.ALLOW] = Field(default=4.0, gt=0)
    """Wavelengths below `original_max_seq_len / high_freq_factor` are kept; `llama3` only."""
    beta_slow: Annotated[float, OnResume.ALLOW] = Field(default=1.0, gt=0)
    """Dimensions of fewer turns in `original_max_seq_len` are divided; `yarn` only."""
    beta_fast: Annotated[float, OnResume.ALLOW] = Field(default=32.0, gt=0)
    """Dimensions of more turns in `original_max_seq_len` are kept; `yarn` only."""
    attention_factor: Annotated[float | None, OnResume.ALLOW] = Field(default=None, gt=0)
    """Factor of rotated queries and of keys; `yarn` and `longrope` only. None: at least 1, of
    `yarn` `0.1 ln(factor) + 1`, of `longrope` `sqrt(1 + ln(factor) / ln(original_max_seq_len))`."""
    score_mscale: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0)
    """m: scores are multiplied by `(0.1 m ln(factor) + 1)^2` (DeepSeek-V3: 1); `yarn` only."""
    truncate: Annotated[bool, OnResume.ALLOW] = True
    """Round the ends of the ramp between both to whole dimensions; `yarn` only. False: gpt-oss."""

    def _conflicts(self) -> Conflicts:
        for below, above in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            low = getattr(self, below)
            high = getattr(self, above)
            if low >= high:
                yield f"{below}={low} must be less than {above}={high}"
        is_longrope = self.kind == "longrope"
        for key in ("short_factors", "long_factors"):
            factors = getattr(self, key)
            if is_longrope != bool(factors) or min(factors, default=1) <= 0:
                yield f"{key} are positive numbers with kind=longrope, and left out with others"

    @property
    def follows_length(self) -> bool:
        """True if the frequencies depend on the length of a document."""
        return self.kind in ("dynamic", "longrope")
