"""Work of the ranks of the tests of hybrid models: they train on rows, under an engine."""

from dataclasses import replace
from typing import Any

from pretrain.dist import World
from tests.integration.sequence_workers import MODELS
from tests.integration.workers import MODEL, build, train

SHARED = MODELS["hybrid"]
HYBRID = MODEL | {
    "preset": "hybrid-tiny",
    "decoder": MODEL["decoder"]
    | {"mixers": ["delta", "mamba2", "convolution", "attention"], "layers": 4, "attention_gate": True}
    | {"delta": {"key_width": 5}, "mamba2": {"heads": 3, "head_width": 7, "state_width": 5}},
}
"""Each mixer, and odd sizes, so that partitions cut parameters."""
MIXTURE = SHARED | {
    "decoder": SHARED["decoder"] | {"experts": {"count": 4, "top_k": 2, "width": 10, "balance_weight": 0.1}}
}
"""Each mixer, with heads that ranks share, and experts behind them."""
RATE = 3e-3
"""Learning rate: at 1e-2 Adam makes 1e-4 of a norm out of the rounding of the two steps before."""


def losses_of(
    world: World, cases: list[list[Any]], steps: int, micro: int, experts: int = 0, sequence: int = 1
) -> list[Any]:  # fmt: skip
    """Trains each (kind, stage, precision); `experts` of a mixture are over so many ranks. 0: it has none."""
    world = replace(world, experts=max(experts, 1), sequence=sequence)
    model = MIXTURE if experts else HYBRID
    found = []
    for case in cases:
        engine = build(world, *case, micro=micro, model=model, sharded=case[1] == 3)
        found.append(train(engine, world, range(steps), micro, lr=RATE))
    return found
