"""Fits the constants of the roofline that `pretrain plan` predicts speed with, on published runs.

    python -m benchmarks.plan_fit

Least squares of the logarithm of MFU over the rows of `pretrain/plan/published.py` that are marked as fitted, one
constant after another, in ever smaller steps. Prints the constants, to be rounded into `pretrain/plan/gpus.py`,
and the table of docs/plan.md with those that are there now. No noise: the same rows give the same constants.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import replace

from pretrain.config.engine import EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.plan.gpus import CONSTANTS, GPUS, Constants, GpuEfficiency
from pretrain.plan.published import MODELS, ROWS, PublishedRun
from pretrain.plan.published_errors import error_table
from pretrain.plan.roofline import Network, Work, time_step
from pretrain.plan.work import TrainingTask, plan_work

START = [0.75, 0.6, 300.0, 600.0, 0.6, 0.35]
LEAST_PASSES = 2.0
"""What is kept is written once and read once; the fit would have less."""


def build_constants(values: list[float]) -> Constants:
    """Returns the constants that six numbers stand for."""
    ampere, hopper, ampere_width, hopper_width, ampere_attention, hopper_attention = values
    shares = {
        "ampere": GpuEfficiency(ampere, ampere_width, ampere_attention),
        "hopper": GpuEfficiency(hopper, hopper_width, hopper_attention),
    }
    return replace(CONSTANTS, shares=CONSTANTS.shares | shares, passes=LEAST_PASSES)


def work_of(row: PublishedRun) -> Work:
    """Returns the work of a rank of a published run."""
    task = TrainingTask(MODELS[row.model], RowLengths(row.seq_len, row.seq_len))
    engine = EngineConfig(zero_stage=row.zero_stage)
    return plan_work(task, engine, row.gpus, row.micro, row.accumulation, recompute=row.recompute)


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
    rows = [(row, work_of(row)) for row in ROWS if row.fitted]

    def cost(values: list[float]) -> float:
        if min(values) <= 0 or max(values[0], values[1], values[4], values[5]) > 1:
            return 1e9
        constants, total = build_constants(values), 0.0
        for row, work in rows:
            nodes, gpu = max(1, row.gpus // 8), GPUS[row.gpu]
            found = time_step(work, Network(nodes, row.gpus // nodes, row.zero_stage, True), gpu, constants)
            total += math.log(100 * work.model_flops / found.total / gpu.flops / row.mfu) ** 2
        return total

    for generation, shares in build_constants(search_pattern(cost, START)).shares.items():
        print(generation, shares)
    print(error_table())


if __name__ == "__main__":
    main()
