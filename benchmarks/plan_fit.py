"""Fits the constants of the roofline that `pretrain plan` predicts speed with, on published and on measured steps.

    python -m benchmarks.plan_fit

Least squares of the logarithm of times over the rows of `benchmarks/published_runs.py` that are marked as fitted and
those of `benchmarks/measured_steps.py` but the host's, one constant after another, in ever smaller steps. Prints the
constants, to be rounded into `pretrain/plan/gpus.py` (and `FLASH_BEFORE`), and the tables of docs/plan.md with those
that are there now. No noise: the same rows give the same constants.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import mock

from benchmarks import published_runs
from benchmarks.measured_steps import STEPS, MeasuredStep, step_errors
from benchmarks.published_runs import ROWS, error_table, predict_row
from pretrain.plan.gpus import CONSTANTS, GPUS, Constants

START = {"products": 0.8, "flash": 0.5, "cudnn": 0.8}
"""Constants of Hopper, from which each fit begins."""
BEST = GPUS["h200"].best_product
ALONE = {"products": 0.82 / BEST, "flash": 0.54, "cudnn": 0.81}
"""The same as measured: a product alone, and attention in the rows of 32,768 and 131,072 tokens."""


def with_hopper(values: dict[str, float]) -> Constants:
    """Returns the constants with others of Hopper."""
    return replace(CONSTANTS, shares=CONSTANTS.shares | {"hopper": replace(CONSTANTS.shares["hopper"], **values)})


def search_pattern(cost: Callable[[list[float]], float], start: list[float]) -> list[float]:
    """Returns a minimum: each number is changed by a factor as long as that helps, then by smaller ones."""
    best, values, step = cost(start), list(start), 0.2
    while step > 1e-4:
        before = best
        for place in range(len(values)):
            for factor in (1 + step, 1 / (1 + step)):
                tried = [*values[:place], values[place] * factor, *values[place + 1 :]]
                found = cost(tried)
                if found < best:
                    best, values = found, tried
        if best > before - 1e-9:
            step /= 2
    return values


def _squares(steps: Sequence[MeasuredStep], constants: Constants) -> float:
    return sum(math.log(1 + error) ** 2 for error in step_errors(steps, constants))


def fit_steps(steps: Sequence[MeasuredStep]) -> Constants:
    """Fits the three constants of `START` to measured steps alone."""

    def cost(values: list[float]) -> float:
        return _squares(steps, with_hopper(dict(zip(START, values, strict=True))))

    return with_hopper(dict(zip(START, search_pattern(cost, list(START.values())), strict=True)))


def leave_one_out(step: MeasuredStep) -> float:
    """Returns the error of a measured step by constants that were fitted on the others of the fit."""
    (error,) = step_errors([step], fit_steps([one for one in STEPS if one.fitted and one is not step]))
    return error


def step_table() -> str:
    """Returns the table of docs/plan.md: each measured step, and its predictions."""
    lines = ["| step on one H200 | measured, ms | fitted | left out | alone |", "|---|---|---|---|---|"]
    for step in STEPS:
        errors = (step_errors([step])[0], leave_one_out(step), step_errors([step], with_hopper(ALONE))[0])
        shown = " | ".join(f"{100 * error:+.1f}%" for error in errors)
        lines.append(f"| {step.name} | {step.ms:,} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """Fits, prints constants and tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="as without: it takes seconds")
    parser.parse_args()
    fitted = [step for step in STEPS if step.fitted]

    def cost(values: list[float]) -> float:
        ampere, ampere_flash, hopper, flash, cudnn, half_width, before = values
        if max(ampere, ampere_flash, hopper, flash, cudnn) > 1:
            return 1e9
        shares = CONSTANTS.shares
        older = replace(shares["ampere"], products=ampere, half_width=half_width, flash=ampere_flash)
        newer = replace(shares["hopper"], products=hopper, half_width=half_width, flash=flash, cudnn=cudnn)
        constants = replace(CONSTANTS, shares=shares | {"ampere": older, "hopper": newer})
        with mock.patch.object(published_runs, "FLASH_BEFORE", before):
            published = sum(math.log(predict_row(row, constants) / row.mfu) ** 2 for row in ROWS if row.fitted)
        return published + _squares(fitted, constants)

    names = ("ampere", "its flash", "hopper", "its flash", "its cudnn", "half width", "flash before")
    for name, value in zip(names, search_pattern(cost, [0.8, 0.6, 0.8, 0.5, 0.8, 300.0, 0.35]), strict=True):
        print(f"{name}: {value:.3f}")
    print(step_table(), error_table(), sep="\n\n")


if __name__ == "__main__":
    main()
