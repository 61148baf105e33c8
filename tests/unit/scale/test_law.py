"""The fit of the law: values that are known, torch's L-BFGS as a reference, outliers, intervals, too few runs."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from pretrain.errors import DataError
from pretrain.scale import law as law_module
from pretrain.scale.law import LossPoint, ScalingLaw, check_points, draw_laws, find_scales
from pretrain.scale.prediction import fit_ladder
from pretrain.scale.scaling_rule import RunSize

TRUE = ScalingLaw(e=1.7, a=400.0, b=900.0, alpha=0.34, beta=0.32)
LINE = 20.0
BUDGETS = [1e12, 2.15e12, 4.64e12, 1e13]


def ladder(noise: float = 0.0, seed: int = 0) -> list[LossPoint]:
    """Runs of a ladder of four sizes, on the line of 20 tokens a parameter and beside it."""
    rng = np.random.default_rng(seed)
    points = []
    for budget, beside in itertools.product(BUDGETS, (1 / 3, 1, 3)):
        if budget == BUDGETS[-1] and beside != 1:
            continue
        parameters = beside * (budget / 120) ** 0.5
        tokens = round(budget / (6 * parameters))
        loss = TRUE.loss(parameters, tokens) * float(np.exp(rng.normal(0, noise)))
        points.append(LossPoint(f"run-{len(points)}", parameters, tokens, loss))
    return points


def fit_law(points: list[LossPoint], line: float) -> ScalingLaw:
    """The law of the measured losses, without draws."""
    return draw_laws(points, find_scales(points, line), 0)[0]


NATS = 4.0
"""Nats a token for each bit a byte."""
LARGE = (1.58e6, 31_600_000)
"""Parameters and tokens at 30 times the FLOPs of the largest run of the ladder."""


def test_a_law_is_found_from_losses_that_follow_it():
    found = fit_law(ladder(), LINE)
    assert found.loss(*LARGE) == pytest.approx(TRUE.loss(*LARGE), rel=2e-3)
    assert found.alpha == pytest.approx(TRUE.alpha, abs=0.02)
    assert found.beta == pytest.approx(TRUE.beta, abs=0.02)


def test_the_fit_is_that_of_l_bfgs_on_the_same_objective():
    points = of_text(ladder(noise=0.004))
    deltas = law_module.HUBER_DELTA * torch.tensor(find_scales(points, LINE))
    sizes = torch.tensor([[point.parameters, point.tokens] for point in points], dtype=torch.float64).log()
    losses = torch.tensor([point.loss for point in points], dtype=torch.float64).log()
    center = sizes.mean(0)
    found = fit_law(points, LINE)
    scaled = [found.a * np.exp(-found.alpha * center[0].item()), found.b * np.exp(-found.beta * center[1].item())]
    values = torch.tensor(
        [np.log(found.e), *np.log(scaled), found.alpha, found.beta], dtype=torch.float64, requires_grad=True
    )

    def objective() -> torch.Tensor:
        terms = values[1:3] - (sizes - center) * values[3:]
        fitted = torch.logsumexp(torch.cat([values[:1].expand(len(points), 1), terms], 1), 1)
        off = (fitted - losses) / deltas
        misfit = torch.nn.functional.huber_loss(off, torch.zeros_like(off), reduction="sum")
        exponents = ((values[3:] - law_module.EXPONENT) / law_module.EXPONENT_SPREAD).square().sum() / 2
        entropy = ((values[0] - np.log(law_module.ENTROPY * NATS)) / law_module.ENTROPY_SPREAD).square() / 2
        return misfit + exponents + entropy

    ours = objective().item()
    with torch.no_grad():
        values.copy_(torch.tensor([0.5, -1.0, -1.0, 0.3, 0.4]))
    optimizer = torch.optim.LBFGS([values], max_iter=500, tolerance_change=1e-14, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = objective()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert ours == pytest.approx(objective().item(), rel=1e-4, abs=1e-4)


def test_the_best_size_is_the_minimum_over_all_sizes():
    sizes = np.geomspace(1e4, 1e9, 200_001)
    budget = 3e14
    losses = [TRUE.loss(size, budget / 6 / size) for size in sizes]
    assert TRUE.optimal_parameters(budget) == pytest.approx(sizes[int(np.argmin(losses))], rel=1e-3)


def test_one_run_that_went_wrong_hardly_moves_the_prediction():
    points = ladder(noise=0.001)
    worse = [
        LossPoint(point.name, point.parameters, point.tokens, point.loss * (1.1 if number == 4 else 1.0))
        for number, point in enumerate(points)
    ]
    moved = fit_law(worse, LINE).loss(*LARGE) / fit_law(points, LINE).loss(*LARGE)
    assert moved == pytest.approx(1.0, abs=0.02)


def test_sizes_that_the_law_does_not_quite_fit_beside_the_line_do_not_spoil_it_there():
    follow = ladder()
    assert find_scales(follow, LINE) == pytest.approx(1.0)
    beside = np.array([abs(np.log(point.tokens / point.parameters / LINE)) > 1 for point in follow])
    points = [
        replace(point, loss=point.loss * (1.04 if is_beside else 1.0))
        for point, is_beside in zip(follow, beside, strict=True)
    ]
    scales = find_scales(points, LINE)
    assert scales[beside].min() > 3
    assert scales[~beside] == pytest.approx(1.0, abs=1e-4)
    truth = TRUE.loss(*LARGE)
    weighted = fit_law(points, LINE).loss(*LARGE) / truth - 1
    alike = draw_laws(points, np.ones(len(points)), 0)[0].loss(*LARGE) / truth - 1
    assert abs(weighted) < 0.6 * abs(alike)


def of_text(points: list[LossPoint]) -> list[LossPoint]:
    """The same runs, of targets with a known number of bytes."""
    return [replace(point, bits_per_byte=point.loss / NATS) for point in points]


def test_losses_that_fall_as_a_pure_power_get_the_irreducible_loss_of_text():
    powers = [replace(point, loss=100 * point.parameters**-0.09 * point.tokens**-0.09) for point in ladder(noise=0.002)]
    expected = law_module.ENTROPY * NATS
    assert fit_law(powers, LINE).e < expected / 2
    assert fit_law(of_text(powers), LINE).e == pytest.approx(expected, rel=0.25)


def test_runs_that_reach_the_irreducible_loss_outweigh_its_prior():
    sizes = itertools.product(np.geomspace(1e6, 1e10, 5), (2.2, 20, 180))
    points = [
        LossPoint(
            f"{parameters}-{ratio}", parameters, round(ratio * parameters), TRUE.loss(parameters, ratio * parameters)
        )
        for parameters, ratio in sizes
    ]
    assert fit_law(of_text(points), LINE).e == pytest.approx(TRUE.e, rel=0.02)


def spread(points: list[LossPoint]) -> tuple[float, float]:
    """The 95% interval of the large run's loss."""
    low, high = np.quantile(
        [law.loss(*LARGE) for law in draw_laws(points, find_scales(points, LINE), 60)[1:]], [0.025, 0.975]
    )
    return float(low), float(high)


def test_intervals_cover_the_truth_and_widen_with_noise():
    truth = TRUE.loss(*LARGE)
    covered = [low < truth < high for low, high in (spread(ladder(0.004, seed)) for seed in range(5))]
    assert sum(covered) >= 4
    quiet, loud = spread(ladder(0.001)), spread(ladder(0.01))
    assert quiet[1] - quiet[0] < loud[1] - loud[0]


def test_a_ladder_that_parameters_make_no_better_has_draws_with_a_best_size():
    sizes = [(17e3, 17e3), (45e3, 45e3), (83e3, 83e3), (45e3, 6784), (17e3, 116736), (131e3, 15488)]
    losses = [5.6066, 5.3282, 4.8147, 6.1301, 4.4736, 5.7284]
    points = [LossPoint(str(n), n, round(d), loss) for (n, d), loss in zip(sizes, losses, strict=True)]
    fit = fit_ladder(points, 1.0)
    assert min(min(law.alpha, law.beta) for law in fit.laws) == 0.03, "some draws are at the bound"
    assert all(np.isfinite(fit.optimal_parameters(6e10)))


def test_too_few_runs_are_refused_by_their_number():
    with pytest.raises(DataError, match="5 finished runs are too few for a law of five values, at least 6 are needed"):
        check_points(ladder()[:5])


def test_runs_on_one_line_cannot_tell_sizes_from_tokens():
    points = [
        LossPoint(str(number), parameters, round(20 * parameters), 3.0)
        for number, parameters in enumerate(np.geomspace(1e5, 1e6, 6))
    ]
    with pytest.raises(DataError, match="are on one line, where the effects of parameters and of tokens cannot be"):
        check_points(points)


BEND = ScalingLaw(e=1.5, a=20.0, b=20.0, alpha=0.26, beta=0.26)
"""A law whose line falls by an exponent of 0.13."""


def bent(factor_beside: float) -> list[LossPoint]:
    """The ladder's runs, of losses that follow BEND on the line, and are worse beside it."""
    return [
        replace(
            point,
            loss=BEND.loss(point.parameters, point.tokens)
            * (factor_beside if abs(np.log(point.tokens / point.parameters / LINE)) > 1 else 1.0),
        )
        for point in ladder()
    ]


def test_the_law_of_the_line_is_found_from_the_runs_on_it_alone():
    for factor in (1.0, 1.05):
        found = fit_ladder(bent(factor), LINE, resamples=50).line_laws[0]
        assert found.gamma == pytest.approx(BEND.gamma, abs=0.01)
        assert found.loss(6 * LARGE[0] * LARGE[1]) == pytest.approx(BEND.loss(*LARGE), rel=5e-3)


def test_the_exponent_of_the_line_is_that_of_the_runs_where_they_tell_it_and_else_a_prior():
    found = fit_ladder(ladder(), LINE, resamples=50)
    assert found.line_laws[0].gamma == pytest.approx(TRUE.gamma, abs=0.01)
    steep = [replace(point, loss=point.loss * 1.01 ** (-1) ** number) for number, point in enumerate(ladder())]
    found = fit_ladder(steep, LINE, resamples=50)
    told = float(np.median([law.gamma for law in found.laws[1:]]))
    assert abs(found.line_laws[0].gamma - law_module.LINE_EXPONENT) < abs(found.line_laws[0].gamma - told)


def test_one_run_on_the_line_that_went_wrong_hardly_moves_its_law():
    points = [replace(point, name=f"{point.name}-{seed}") for point in bent(1.0) for seed in range(3)]
    on_line = [number for number, point in enumerate(points) if abs(np.log(point.tokens / point.parameters / 20)) < 0.1]
    points[on_line[4]] = replace(points[on_line[4]], loss=1.2 * points[on_line[4]].loss)
    found = fit_ladder(points, LINE, resamples=50).line_laws[0]
    assert found.loss(6 * LARGE[0] * LARGE[1]) == pytest.approx(BEND.loss(*LARGE), rel=3e-3)


def test_another_size_is_off_the_line_by_what_the_law_of_sizes_says():
    fit = fit_ladder(bent(1.0), LINE, resamples=20)
    budget = 6 * LARGE[0] * LARGE[1]
    on_line, larger = (
        fit.predict("a", RunSize(parameters=n, tokens=round(budget / 6 / n))) for n in (LARGE[0], 3 * LARGE[0])
    )
    truth = BEND.loss(3 * LARGE[0], budget / 18 / LARGE[0]) / BEND.loss(*LARGE)
    assert larger.loss / on_line.loss == pytest.approx(truth, rel=5e-3)
    assert on_line.low < on_line.loss < on_line.high


def test_a_line_of_one_size_is_refused():
    points = [
        point for point in ladder() if point.flops < 2e12 or abs(np.log(point.tokens / point.parameters / 20)) > 1
    ]
    with pytest.raises(DataError, match="of 20 tokens a parameter are of 1 sizes, at least 2 are needed"):
        fit_ladder(points, LINE)
