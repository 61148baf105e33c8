"""The laws of a ladder: L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, 3.3), and
L(C) = E + K / C^gamma of the runs on its line, at a fixed number of tokens a parameter.

    points (N, D, loss)  ->  draw_laws       Huber loss of log L, from a grid of starts; then fits to
                                             losses with residuals drawn anew (bootstrap)
                         ->  draw_line_laws  the same for the runs on the line, and C = 6 N D

The law of the line tells the loss of a budget, that of N and D what another size of the same budget
would have. A ladder has about ten runs for five values. Four things keep them from trading against
each other: N and D are counted relative to their geometric means; the exponents, and E where the bytes of a
token are known, have priors, which many runs outweigh; runs beside the line, which the large run is
on, count less where they are off; and seeds of a size count as one run. All starts, and all draws,
are minimized at once by Levenberg-Marquardt; no torch.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.errors import DataError
from pretrain.evaluation.bootstrap import SEED
from pretrain.scale.scaling_rule import FLOPS_OF_A_WEIGHT

MIN_RUNS = 6
"""Runs of a fit: its five values, and one to judge them by."""
HUBER_DELTA = 3e-3
"""Residual of log L from which the loss of a fit is linear: the noise of small runs. Hoffmann et al.
2022, appendix D.2, have 1e-3 for 400 larger ones."""
BESIDE = 3.0
"""Parameters of a size beside the line over those of the line, at the same budget."""
BESIDE_LINE = 5.0
"""What is added at most to the one HUBER_DELTA of a run of BESIDE times the parameters of its line,
or one part of it, where the law is a form that does not quite hold (`find_scales`)."""
EXPONENT = 0.31
EXPONENT_SPREAD = 0.1
"""Mean and standard deviation of the prior of alpha and beta: 0.34 and 0.28 in Hoffmann et al. 2022,
0.35 and 0.37 by Besiroglu et al. 2024 from the same runs. The lower mean is the one of the two that
small ladders bear out (docs/scaling_laws.md)."""
ENTROPY = 0.7
ENTROPY_SPREAD = 0.3
"""Prior of E, bits a byte, and standard deviation of its logarithm: 1.69 nats a token in Hoffmann
et al. 2022, 1.82 by Besiroglu et al. 2024, at about 4.2 bytes a token: 0.58 and 0.63. Small models
read short rows, which leave more."""
LINE_EXPONENT = 0.125
LINE_EXPONENT_SPREAD = 0.02
"""Mean and standard deviation of the prior of gamma: what has the large runs of two ladders of 1e12
to 1e13 FLOPs within 0.6% (docs/scaling_laws.md). Hoffmann et al. 2022 have 0.154."""
MIN_SIZES = 2
"""Sizes on the line, for the two values of its law."""
_MOST = 0.75
"""Share of the runs beside the line that are off by no more than their scale."""
_STARTS = ((0.2, 0.4, 0.6, 0.8), (0.3, 0.7), (0.25, 0.45))
"""Shares of E in the mean loss, and of N's term in the rest; both exponents."""
_ITERATIONS = 300
_REWEIGHTINGS = 50
_MIN_SPREAD = 0.05
_MIN_EXPONENT = 0.03
"""Least alpha and beta of a fit: where a term grows, as in draws of noisy runs, no size is best."""
_WITH_PRIOR = [0, 3, 4]
"""Positions of log E, alpha and beta among the values of a fit."""


@dataclass(frozen=True, slots=True)
class LossPoint:
    """A run of a ladder that has been trained."""

    name: str
    parameters: float  # N
    tokens: int  # D
    loss: float  # final validation loss, nats a target
    bits_per_byte: float | None = None  # the same; None: targets are no bytes of a text

    @property
    def flops(self) -> float:
        """FLOPs of training."""
        return FLOPS_OF_A_WEIGHT * self.parameters * self.tokens


@dataclass(frozen=True, slots=True)
class ScalingLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Returns the loss of a size, nats a target."""
        return float(self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta)

    @property
    def gamma(self) -> float:
        """Exponent of C = 6 N D in the best loss of a budget (Hoffmann et al. 2022, eq. 4)."""
        return self.alpha * self.beta / (self.alpha + self.beta)

    def optimal_parameters(self, flops: float) -> float:
        """Returns N of the lowest loss at 6 N D = `flops` (Hoffmann et al. 2022, eq. 4)."""
        both = self.alpha + self.beta
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / both)
        return float(ratio * (flops / FLOPS_OF_A_WEIGHT) ** (self.beta / both))


@dataclass(frozen=True, slots=True)
class LineLaw:
    """L(C) = E + K / C^gamma, at a fixed number of tokens a parameter."""

    e: float
    k: float
    gamma: float

    def loss(self, flops: float) -> float:
        """Returns the loss of a budget, nats a target."""
        return float(self.e + self.k / flops**self.gamma)


class _Fits:
    """Fits of the law to the same runs, with several starts or losses at once.

    Values are float64 [fits, 5]: log E, log A, log B, alpha, beta, where A and B are those of N
    and D relative to their geometric means; log losses are float64 [fits, runs]. Priors are float64
    [fits, 3], of log E, alpha and beta.
    """

    def __init__(self, points: Sequence[LossPoint], scales: np.ndarray) -> None:
        sizes = np.log([[point.parameters, point.tokens] for point in points])
        self.center = sizes.mean(0)
        self.sizes = sizes - self.center
        self.measured = np.log([point.loss for point in points])
        # Seeds of a size share what the form of the law is off there: together they weigh as one run.
        seeds = Counter((point.parameters, point.tokens) for point in points)
        shared = np.sqrt([seeds[point.parameters, point.tokens] for point in points])
        self.deltas = HUBER_DELTA * scales * shared
        # Nats a token for a bit a byte.
        nats = [point.loss / point.bits_per_byte for point in points if point.bits_per_byte]
        log_e = math.log(ENTROPY * float(np.median(nats))) if nats else 0.0
        self.prior = np.array([log_e, EXPONENT, EXPONENT])
        of_e = ENTROPY_SPREAD if nats else math.inf
        self.tightness = 1 / np.array([of_e, EXPONENT_SPREAD, EXPONENT_SPREAD])

    def terms(self, values: np.ndarray) -> np.ndarray:
        """Returns log E, and the logs of both terms of each run, float64 [fits, runs, 3]."""
        log_e = np.broadcast_to(values[:, None, :1], (len(values), len(self.sizes), 1))
        return np.concatenate([log_e, values[:, None, 1:3] - self.sizes * values[:, None, 3:]], axis=2)

    def log_losses(self, values: np.ndarray) -> np.ndarray:
        """Returns log L of each run."""
        losses: np.ndarray = np.logaddexp.reduce(self.terms(values), axis=2)
        return losses

    def objective(self, values: np.ndarray, measured: np.ndarray, prior: np.ndarray) -> np.ndarray:
        """Returns Huber's loss in units of its deltas, plus the prior's; float64 [fits]."""
        off = np.abs(self.log_losses(values) - measured) / self.deltas
        beyond = ((values[:, _WITH_PRIOR] - prior) * self.tightness) ** 2 / 2
        misfit: np.ndarray = np.where(off <= 1, off**2 / 2, off - 0.5).sum(1) + beyond.sum(1)
        return misfit

    def minimize(self, measured: np.ndarray, prior: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Returns the values at local minima, by Levenberg-Marquardt with Huber's weights."""
        damping = np.full(len(values), 1e-2)
        best = self.objective(values, measured, prior)
        for _ in range(_ITERATIONS):
            gradient, curvature = self._quadratic(values, measured, prior)
            diagonal = curvature * np.eye(5)
            step = np.linalg.solve(curvature + damping[:, None, None] * diagonal, gradient[:, :, None])[:, :, 0]
            tried = values - np.clip(step, -1.0, 1.0)
            tried[:, 3:] = np.maximum(tried[:, 3:], _MIN_EXPONENT)
            misfits = self.objective(tried, measured, prior)
            is_lower = misfits < best
            values = np.where(is_lower[:, None], tried, values)
            best = np.where(is_lower, misfits, best)
            damping = np.clip(np.where(is_lower, damping / 3, damping * 2), 1e-9, 1e9)
        return values

    def _quadratic(self, values: np.ndarray, measured: np.ndarray, prior: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns gradients [fits, 5] and Gauss-Newton matrices [fits, 5, 5] of the objective."""
        terms = self.terms(values)
        log_loss = np.logaddexp.reduce(terms, axis=2)
        shares = np.exp(terms - log_loss[:, :, None])  # of the three terms in the loss
        slopes = np.concatenate([shares, -self.sizes * shares[:, :, 1:]], axis=2)
        off = (log_loss - measured) / self.deltas
        weights = 1 / np.maximum(np.abs(off), 1)
        weighted = slopes * (weights / self.deltas**2)[:, :, None]
        gradient = np.einsum("frv,fr->fv", weighted, log_loss - measured)
        curvature = np.einsum("frv,frw->fvw", weighted, slopes)
        gradient[:, _WITH_PRIOR] += (values[:, _WITH_PRIOR] - prior) * self.tightness**2
        curvature[:, _WITH_PRIOR, _WITH_PRIOR] += self.tightness**2
        return gradient, curvature + 1e-9 * np.eye(5)

    def best(self) -> np.ndarray:
        """Returns the values of the fit to the measured losses, the best of all starts."""
        starts = np.array([
            [math.log(e), math.log((1 - e) * share), math.log((1 - e) * (1 - share)), exponent, exponent]
            for e, share, exponent in itertools.product(*_STARTS)
        ])  # fmt: skip
        starts[:, :3] += self.measured.mean()
        prior = np.tile(self.prior, (len(starts), 1))
        values = self.minimize(self.measured, prior, starts)
        values_of_best: np.ndarray = values[self.objective(values, self.measured, prior).argmin()]
        return values_of_best

    def law(self, values: np.ndarray) -> ScalingLaw:
        """Returns the law of absolute N and D by the values of a fit, float64 [5]."""
        alpha, beta = map(float, values[3:])
        a, b = map(float, np.exp(values[1:3] + values[3:] * self.center))
        return ScalingLaw(float(np.exp(values[0])), a, b, alpha, beta)


_MORE = "finish others: pretrain scale run LADDER; after divergence plan lower rates or more sizes"


def check_points(points: Sequence[LossPoint]) -> None:
    """Checks that runs can tell a law. Raises: DataError: Too few, or on one line."""
    if len(points) < MIN_RUNS:
        raise DataError(
            f"{len(points)} finished runs are too few for a law of five values, at least {MIN_RUNS} are needed",
            fix=_MORE,
        )
    sizes = np.log([[point.parameters, point.tokens] for point in points])
    spreads = np.linalg.svd(sizes - sizes.mean(0), compute_uv=False) / math.sqrt(len(points))
    if spreads.min() < _MIN_SPREAD:
        raise DataError(
            "the finished runs are on one line, where the effects of parameters and of tokens cannot be separated",
            fix=_MORE,
        )


def _beside(points: Sequence[LossPoint], line: float) -> np.ndarray:
    """Returns how far runs are from the line: 1 at BESIDE times its parameters; float64 [runs]."""
    ratios = np.array([point.tokens / point.parameters for point in points])
    beside: np.ndarray = np.abs(np.log(ratios / line)) / math.log(BESIDE**2)
    return beside


def find_scales(points: Sequence[LossPoint], line: float) -> np.ndarray:
    """Returns the residual of each run, relative to a run on the line; float64 [runs].

    It grows with the distance from the line, by as much as the runs beside it are off a law of
    those on it, and not at all where they are off by HUBER_DELTA only.

    Args:
        points: Runs.
        line: Tokens a parameter of the line.

    Raises:
        DataError: The runs cannot tell a law (`check_points`).
    """
    check_points(points)
    beside = _beside(points, line)
    fits = _Fits(points, 1 + BESIDE_LINE * beside)
    off = np.abs(fits.log_losses(fits.best()[None])[0] - fits.measured) / HUBER_DELTA - 1
    is_beside = beside > 0.5
    grows = float(np.quantile(off[is_beside] / beside[is_beside], _MOST)) if is_beside.any() else 0.0
    scales: np.ndarray = 1 + np.clip(grows, 0, BESIDE_LINE) * beside
    return scales


def find_residuals(points: Sequence[LossPoint], law: ScalingLaw, scales: np.ndarray) -> np.ndarray:
    """Returns log of measured over fitted loss of each run, float64 [runs].

    They are divided by their `scales` and enlarged by the degrees of freedom, sqrt(n / (n - 5)), for the
    values that the fit has taken from them: they have the spread of new runs on the line.
    """
    off = np.log([point.loss / law.loss(point.parameters, point.tokens) for point in points])
    residuals: np.ndarray = off / scales * math.sqrt(len(points) / (len(points) - 5))
    return residuals


def draw_laws(points: Sequence[LossPoint], scales: np.ndarray, resamples: int) -> list[ScalingLaw]:
    """Returns the law of the runs, and a law for each draw of their residuals and of the priors.

    A draw adds to the fitted log losses residuals of other runs (`find_residuals`) by their own
    `scales` (`find_scales`), with replacement (Efron and Tibshirani 1993, 9.4 and 9.7): the fewer runs,
    the wider. The priors are drawn too, so that what the runs do not tell counts as unknown.
    """
    fits = _Fits(points, scales)
    best = fits.best()
    law = fits.law(best)
    rng = np.random.default_rng(SEED)
    drawn = rng.choice(find_residuals(points, law, scales), size=(resamples, len(points)))
    drawn = fits.log_losses(best[None])[0] + scales * drawn
    has_prior = fits.tightness > 0
    prior = np.tile(fits.prior, (resamples, 1))
    spread = 1 / fits.tightness[has_prior]
    prior[:, has_prior] += rng.normal(0, spread, size=(resamples, len(spread)))
    values = fits.minimize(drawn, prior, np.tile(best, (resamples, 1)))
    return [law, *map(fits.law, values)]


def draw_line_laws(
    points: Sequence[LossPoint], line: float, laws: Sequence[ScalingLaw], residuals: np.ndarray
) -> list[LineLaw]:
    """Returns the law of the runs on the line, and a law for each draw of gamma and of residuals.

    Where the runs beside the line determine the exponents well, gamma is theirs. Where they do not,
    because the law of N and D is a form that does not quite hold, its own prior outweighs them.
    The runs on the line do not tell it: they bend more than what follows them.

    Args:
        points: Runs.
        line: Tokens a parameter of the line.
        laws: Law of N and D of the runs, and those of its draws, two or more.
        residuals: Residuals of log losses to draw from; float64 [any].

    Raises:
        DataError: Runs of fewer than MIN_SIZES sizes on the line.
    """
    on_line = _beside(points, line) < 0.5
    runs = [point for point, is_on in zip(points, on_line, strict=True) if is_on]
    sizes = len({point.parameters for point in runs})
    if sizes < MIN_SIZES:
        text = f"finished runs of {line:g} tokens a parameter are of {sizes} sizes"
        raise DataError(f"{text}, at least {MIN_SIZES} are needed", fix=_MORE)
    flops = np.array([point.flops for point in runs])
    measured = np.array([[point.loss for point in runs]])
    of_sizes = np.array([law.gamma for law in laws[1:]])
    weights = np.array([of_sizes.std(), LINE_EXPONENT_SPREAD]) ** -2
    gamma = float(weights @ [np.median(of_sizes), LINE_EXPONENT] / weights.sum())
    first = _fit_lines(flops, measured, np.array([gamma]))[0]
    rng = np.random.default_rng(SEED)
    fitted = np.array([first.loss(one) for one in flops])
    drawn = fitted * np.exp(rng.choice(residuals, size=(len(of_sizes), len(runs))))
    gammas = rng.normal(gamma, weights.sum() ** -0.5, len(of_sizes))
    return [first, *_fit_lines(flops, drawn, gammas)]


def _fit_lines(flops: np.ndarray, losses: np.ndarray, gammas: np.ndarray) -> list[LineLaw]:
    """Fits E and K by Huber's loss of relative residuals; losses [fits, runs], gammas [fits]."""
    middle = np.exp(np.log(flops).mean())
    falls = (flops / middle) ** -gammas[:, None]
    slopes = np.stack([np.ones_like(falls), falls], axis=2) / losses[:, :, None]
    weights = np.ones_like(losses)
    for _ in range(_REWEIGHTINGS):
        weighted = slopes * weights[:, :, None]
        curvature = np.einsum("frv,frw->fvw", weighted, slopes)
        values = np.linalg.solve(curvature, weighted.sum(1)[:, :, None])
        off = np.abs((slopes @ values)[:, :, 0] - 1)
        weights = 1 / np.maximum(off / HUBER_DELTA, 1)
    ks = values[:, 1, 0] * middle**gammas
    return [LineLaw(*map(float, fit)) for fit in zip(values[:, 0, 0], ks, gammas, strict=True)]
