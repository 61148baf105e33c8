"""What the ranks of the fine-tuning tests do: train with frozen weights or adapters under each engine, save, load."""

from pathlib import Path
from typing import Any

from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.state import TrainState
from pretrain.dist import World
from tests.integration.workers import build, train

STEPS = 2
# A larger learning rate amplifies bf16's rounding: AdamW's first updates are +-lr, whatever the size of a gradient, so
# at 1e-2 gradients of rounding noise turn signs and the gradient norm of step 4 is 4 to 6% from fp32's; at 3e-3, 0.2%.
LR = 3e-3


def continued(world: World, cases: list[list[Any]], folder: str, finetune: str) -> dict[str, Any]:
    """Trains and saves each case, trains on; loads what each saved into the next case, saves that again, trains on.

    Returns the steps after each save, those after each load, and the parameters that a checkpoint names.
    """
    followed, loaded, names = [], [], []
    state = TrainState(step=STEPS, optimizer_step=STEPS)
    paths = [Path(folder) / str(number) for number in range(len(cases))]
    for path, case in zip(paths, cases, strict=True):
        engine = build(world, *case, micro=2, finetune=finetune, sharded=case[1] == 3)
        train(engine, world, range(STEPS), 2, lr=LR)
        CheckpointManager(path, 2, world, {}).save(engine.state, state)
        followed.append(train(engine, world, range(STEPS, STEPS + 2), 2, lr=LR))
        names.append(sorted({fragment.name for fragment in engine.state.held_fragments()}))
    for number, case in enumerate(cases):
        engine = build(world, *case, micro=2, finetune=finetune, sharded=case[1] == 3)
        load_checkpoint(paths[number - 1] / f"step-{STEPS:08d}", engine.state)
        CheckpointManager(paths[number - 1] / "again", 2, world, {}).save(engine.state, state)
        loaded.append(train(engine, world, range(STEPS, STEPS + 2), 2, lr=LR))
    return {"followed": followed, "loaded": loaded, "names": names}
