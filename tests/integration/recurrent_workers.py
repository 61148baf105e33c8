"""What the ranks of the recurrent tests do."""

from typing import Any

from pretrain.dist import World
from tests.integration.workers import build, train


def losses_of(
    world: World, cases: list[list[Any]], model: dict[str, Any], source: bool, steps: int, micro: int
) -> list[list[list[float]]]:
    """Trains each (kind, stage, precision, whether parameters are cut up one by one) from the same start."""

    def trained(case: list[Any]) -> list[list[float]]:
        *engine, sharded = case
        built = build(world, *engine, micro=micro, model=model, sharded=sharded)
        return train(built, world, range(steps), micro, source=source)

    return [trained(case) for case in cases]
