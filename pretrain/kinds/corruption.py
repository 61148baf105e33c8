"""Span corruption (Raffel et al. 2020, 3.1.4): its keys, and the lengths of corrupted rows."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from pretrain.config.base import OnResume, Section
from pretrain.kinds.objective import RowLimits, RowShape


class SpanConfig(Section):
    """Span corruption (Raffel et al. 2020, 3.1.4); for `kind: span`."""

    density: Annotated[float, OnResume.ALLOW] = Field(default=0.15, gt=0, lt=1)
    """Share of tokens that are removed from the source and predicted."""
    mean_length: Annotated[float, OnResume.ALLOW] = Field(default=3.0, ge=1)
    """Mean length of a removed span in tokens."""


class DenoiserConfig(SpanConfig):
    """Denoiser of UL2."""

    mode: Annotated[str | None, OnResume.ALLOW] = None
    """Special token that the source begins with. None: no such token."""
    prefix: Annotated[bool, OnResume.ALLOW] = False
    """Prefix language model: the only span is the end of the row, a share `density` of it."""
    weight: Annotated[float, OnResume.ALLOW] = Field(default=1.0, gt=0)
    """Share of the rows relative to the other denoisers."""


@dataclass(frozen=True, slots=True)
class Corruption:
    """Token counts of a row under span corruption."""

    num_noise: int  # removed tokens
    num_spans: int  # spans of removed tokens
    source: int  # input of the encoder: remaining tokens, sentinels, end, and the mode token if any
    target: int  # predicted tokens: removed tokens, sentinels, end

    def read(self, num_stacks: int) -> int:
        """Returns the tokens of the longest input."""
        # In one stack the last token predicts nothing, and is not read.
        return max(self.source, self.target) if num_stacks == 2 else self.source + self.target - 1


def corruption_of(row: int, span: SpanConfig) -> Corruption:
    """Counts the tokens of a corrupted row, rounded as in `random_spans_noise_mask` of T5.

    A prefix language model keeps the beginning of a row as its source, without a sentinel.
    """
    is_prefix = isinstance(span, DenoiserConfig) and span.prefix
    num_noise = min(max(round(row * span.density), 1), row - 1)
    num_spans = 1 if is_prefix else max(round(num_noise / span.mean_length), 1)
    num_spans = min(num_spans, row - num_noise)
    sentinels = 0 if is_prefix else num_spans
    mode = int(isinstance(span, DenoiserConfig) and span.mode is not None)
    return Corruption(
        num_noise=num_noise,
        num_spans=num_spans,
        source=row - num_noise + sentinels + 1 + mode,
        target=num_noise + sentinels + 1,
    )


def longest_corrupted(span: SpanConfig, limits: RowLimits) -> int:
    """Returns the longest row whose source and target have at most `limits.seq_len` tokens, 1 if there is none."""
    # Lengths never decrease with the row, and are at least half of it.
    rows = range(2, 2 * limits.seq_len + 1)
    return 1 + bisect_right(rows, limits.seq_len, key=lambda row: corruption_of(row, span).read(limits.num_stacks))


def corrupted_shape(span: SpanConfig, row: int, limits: RowLimits) -> RowShape:
    """Returns the lengths of a corrupted row."""
    corruption = corruption_of(row, span)
    weight = span.weight if isinstance(span, DenoiserConfig) else 1.0
    if limits.num_stacks == 2:
        return RowShape(corruption.target, corruption.source, weight)
    return RowShape(corruption.read(limits.num_stacks), weight=weight)
