"""Fits the constants of the roofline that `pretrain plan` predicts speed with, on published runs.

    python -m benchmarks.plan_fit

Least squares of the logarithm of MFU over the rows of `benchmarks/published_runs.py` that are marked as fitted,
one constant after another, in ever smaller steps. Prints the constants, to be rounded into `pretrain/plan/gpus.py`,
and the table of docs/plan.md with those that are there now. No noise: the same rows give the same constants.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import replace

from benchmarks.published_runs import ROWS, error_table, predict_row
from pretrain.plan.gpus import CONSTANTS, Constants, GpuEfficiency

START = [0.75, 0.6, 300.0, 600.0, 0.6, 0.35]
LEAST_PASSES = 2.0
"""Lower bound of the fit: a saved tensor is written once and read once."""


def build_constants(values: list[float]) -> Constants:
    """Returns the constants that six numbers stand for."""
    ampere, hopper, ampere_width, hopper_width, ampere_attention, hopper_attention = values
    shares = {
        "ampere": GpuEfficiency(ampere, ampere_width, ampere_attention),
        "hopper": GpuEfficiency(hopper, hopper_width, hopper_attention),
    }
    return replace(CONSTANTS, shares=CONSTANTS.shares | shares, passes=LEAST_PASSES)


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


def main() -> None:
    """Fits, prints constants and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="as without: it takes seconds")
    parser.parse_args()

    def cost(values: list[float]) -> float:
        if min(values) <= 0 or max(values[0], values[1], values[4], values[5]) > 1:
            return 1e9
        constants = build_constants(values)
        return sum(math.log(predict_row(row, constants) / row.mfu) ** 2 for row in ROWS if row.fitted)

    for generation, shares in build_constants(search_pattern(cost, START)).shares.items():
        print(generation, shares)
    print(error_table())


if __name__ == "__main__":
    main()
