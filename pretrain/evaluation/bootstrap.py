"""Confidence intervals and paired tests of scores, by bootstrap over rows, documents or items.

of one model     percentile interval of a score over the draws (Efron and Tibshirani 1993, 13.3)
of two models    paired: both are scored on the same draws (Koehn 2004)
of a share       Wilson's interval (1927), for independent answers: right at 0 and 1 too
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pretrain.errors import DataError

RESAMPLES = 1000
SEED = 12345
MIN_UNITS = 5
_CHUNK = 100
_QUANTILES = (0.025, 0.975)
_Z_95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Interval:
    """A score with its 95% interval, by the method `bootstrap` or `wilson`."""

    value: float
    low: float
    high: float
    method: str


@dataclass(frozen=True, slots=True)
class Difference:
    """A model's score less a baseline's on the same units, with its 95% interval."""

    value: float
    low: float
    high: float
    p_value: float  # of a difference as large if both were equally good
    num_units: int
    unit: str  # of the draws, in the plural: `rows`, `documents`
    resamples: int

    def line(self) -> str:
        """Returns the line of a report."""
        return (
            f"{self.value:+.4f}, 95% {self.low:+.4f} to {self.high:+.4f}, p {self.p_value:.4f} "
            f"(paired bootstrap, {self.num_units:,} {self.unit}, {self.resamples:,} draws)"
        )


def draw(num_units: int, resamples: int, seed: int = SEED) -> Iterator[np.ndarray]:
    """Yields the count of each unit in each draw, int64 [draws, num_units], some draws at a time.

    Raises: DataError: Too few units to draw from.
    """
    if num_units < MIN_UNITS:
        raise DataError(
            f"{num_units} units are too few to tell a difference from chance",
            fix="use more data",
        )
    rng = np.random.default_rng(seed)
    uniform = np.full(num_units, 1 / num_units)
    # In chunks: all draws of a large corpus would not fit into memory.
    for start in range(0, resamples, _CHUNK):
        yield rng.multinomial(num_units, uniform, size=min(_CHUNK, resamples - start))


def judge(observed: float, draws: np.ndarray, num_units: int, unit: str) -> Difference:
    """Returns a difference with the interval and the p-value of its draws; `unit` is a plural.

    The p-value is two-sided, from differences shifted to a mean of 0 (as in sacrebleu).
    """
    if not draws.any() and observed == 0:
        return Difference(0.0, 0.0, 0.0, 1.0, num_units, unit, len(draws))
    low, high = np.quantile(draws, _QUANTILES)
    extreme = int((np.abs(draws - draws.mean()) >= abs(observed)).sum())
    p_value = (extreme + 1) / (len(draws) + 1)
    return Difference(observed, float(low), float(high), p_value, num_units, unit, len(draws))


def compare_means(
    baseline: np.ndarray, model: np.ndarray, counts: np.ndarray, resamples: int, unit: str = "rows"
) -> Difference:
    """Returns the difference of two means, each a sum over units divided by their counts.

    All arrays are float64 [units]; `unit` is their plural name. Raises: DataError: Too few units.
    """
    difference = model - baseline
    draws = [drawn @ difference / (drawn @ counts) for drawn in draw(len(counts), resamples)]
    observed = float(difference.sum() / counts.sum())
    return judge(observed, np.concatenate(draws), len(counts), unit)


def bootstrap_interval(value: float, draws: np.ndarray) -> Interval:
    """Returns the percentile interval of a score, from its value on each draw."""
    low, high = np.quantile(draws, _QUANTILES)
    return Interval(value, float(low), float(high), "bootstrap")


def wilson_interval(successes: int, trials: int) -> Interval:
    """Returns the share of successes among independent trials."""
    share = successes / trials
    center, bend = share + _Z_95**2 / (2 * trials), 1 + _Z_95**2 / trials
    spread = _Z_95 * math.sqrt(share * (1 - share) / trials + _Z_95**2 / (4 * trials**2))
    low = max(0.0, (center - spread) / bend)
    high = min(1.0, (center + spread) / bend)
    return Interval(share, low, high, "wilson")
