"""Work of the ranks of the tests of hybrid models: they train on rows, under an engine."""

from typing import Any

from pretrain.dist import World
from tests.integration.workers import MODEL, build, train

HYBRID = MODEL | {
    "preset": "hybrid-tiny",
    "decoder": MODEL["decoder"]
    | {"mixers": ["delta", "mamba2", "convolution", "attention"], "layers": 4, "attention_gate": True}
    | {"delta": {"key_width": 5}, "mamba2": {"heads": 3, "head_width": 7, "state_width": 5}},
}
"""Each mixer, and odd sizes, so that partitions cut parameters."""


def losses_of(world: World, cases: list[list[Any]], steps: int, micro: int) -> list[Any]:
    """Trains each (kind, stage, precision)."""
    found = []
    for case in cases:
        engine = build(world, *case, micro=micro, model=HYBRID, sharded=case[1] == 3)
        found.append(train(engine, world, range(steps), micro))
    return found
