"""Plan of the released steps that are trained again, each from the checkpoint before it."""

import random
from dataclasses import dataclass

from pretrain.errors import CheckpointError
from pretrain.release.released_run import ReleasedRun


@dataclass(frozen=True, slots=True)
class Replay:
    """Steps that are trained again in one go, from a checkpoint."""

    start: int  # of the checkpoint; 0: the beginning of the run
    last: int
    drawn: tuple[int, ...]  # steps that were drawn, of those


def plan_replays(released: ReleasedRun, seed: int, num_steps: int, within: int) -> list[Replay]:
    """Draws steps that are at most `within` after a released checkpoint, or after the beginning.

    Raises:
        CheckpointError: No step follows a checkpoint, and the beginning needs pretrained weights.
    """
    begins = released.load_config().init.from_ is None
    starts = [*([0] if begins else []), *released.steps]
    nearest: dict[int, int] = {}
    for start in starts:
        for step in range(start + 1, min(start + within, released.last_step) + 1):
            nearest[step] = start
    if not nearest:
        raise CheckpointError(
            f"no step within {within} of a released checkpoint can be trained again",
            where=str(released.folder.path),
            fix="release more checkpoints, or raise --within",
        )
    steps = sorted(random.Random(seed).sample(sorted(nearest), min(num_steps, len(nearest))))
    by_start: dict[int, list[int]] = {}
    for step in steps:
        by_start.setdefault(nearest[step], []).append(step)
    return [Replay(start, drawn[-1], tuple(drawn)) for start, drawn in by_start.items()]
