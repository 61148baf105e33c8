"""What the ranks of the tests of `plan` do: train under each ZeRO stage, and count the tensors that are held."""

import contextlib
import gc
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.state import TrainState
from pretrain.dist import World
from tests.integration.workers import MODEL, ROWS, build, global_batch, rows_of


def held_bytes() -> int:
    """Bytes of all live tensors, each storage once, when no collective holds buffers any more."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        # A thread of gloo releases the buffers of a collective a moment after its end. Two looks: one
        # reads the threads in turn, and a thread may wake another.
        while not (_is_gloo_asleep() and _is_gloo_asleep()):
            pass
    return _count_bytes()


def _is_gloo_asleep() -> bool:
    """Returns whether each thread that runs collectives waits for one."""
    stats = [path.read_text() for path in Path("/proc/self/task").glob("*/stat")]
    states = [stat.rpartition(")")[2].split()[0] for stat in stats if "(pt_gloo_runloop)" in stat]
    return all(state == "S" for state in states)


def _count_bytes() -> int:
    gc.collect()
    sizes = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            # A gradient that nobody has asked for is no object of Python's.
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def bytes_by_depth(world: World, cases: list[list[Any]], depths: list[int]) -> list[list[list[int]]]:
    """Returns for each (kind, stage, precision, optimizer) and depth [parameters, bytes held between micro-batches]."""
    return [[_held(world, case, depth) for depth in depths] for case in cases]


def bytes_tuned(
    world: World, cases: list[list[Any]], arms: list[list[Any]], folder: str | None = None
) -> list[list[list[int]]]:
    """Returns the same of each case for each (kind of fine-tuning, depth), saving it if a folder is given."""
    found = []
    for case in cases:
        places = [None if folder is None else Path(folder) / f"{finetune}-{depth}" for finetune, depth in arms]
        found.append([_held(world, case, arm[1], arm[0], place) for arm, place in zip(arms, places, strict=True)])
    return found


def bytes_in_update(world: World, cases: list[list[Any]], depths: list[int]) -> list[list[list[int]]]:
    """Returns the same of the moment at which the optimizer has the gradients of its largest group."""
    return [[_held(world, case, depth, in_update=True) for depth in depths] for case in cases]


def decoder_of(depth: int) -> dict[str, Any]:
    """A model of so many blocks."""
    size = {"layers": depth, "width": 128, "heads": 4, "kv_heads": 4, "head_width": 32, "ff_width": 384}
    return {**MODEL, "decoder": size}


def _held(
    world: World,
    case: list[Any],
    depth: int,
    finetune: str = "full",
    folder: Path | None = None,
    in_update: bool = False,
) -> list[int]:
    before = held_bytes()
    micro = ROWS // world.size // 3
    engine = build(world, *case, micro=micro, model=decoder_of(depth), finetune=finetune)
    numbers = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    mine = range(world.rank * ROWS // world.size, (world.rank + 1) * ROWS // world.size)
    batches = [rows_of(global_batch(0), slice(start, start + micro)) for start in range(mine.start, mine.stop, micro)]
    for batch in batches:
        engine.forward_backward(batch, 1e-3, batch is batches[-1])
    engine.update(1e-3)
    # Between two micro-batches of the second step: moments are there, and gradients are held.
    engine.forward_backward(batches[0], 1e-3, False)
    held = held_bytes() - before
    engine.forward_backward(batches[1], 1e-3, True)
    stepped = []

    def count(*_: Any) -> None:
        stepped.append(held_bytes() - before)

    with contextlib.ExitStack() as stack:
        if in_update:
            stack.callback(register_optimizer_step_pre_hook(count).remove)
        engine.update(1e-3)
    if folder is not None:
        CheckpointManager(folder, 2, world, {}).save(engine.state, TrainState(step=1, optimizer_step=1))
    return [numbers, max(stepped, default=held)]
