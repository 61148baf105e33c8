"""A training step of a small ViT: `pretrain train` against plain PyTorch loops, and against timm, interleaved.

    python -m benchmarks.image_step data/fashion fashion [--rounds 12]    # made as configs/prepare/fashion.yaml says

One process, one thread, fp32; the model of configs/run/vit_fashion.yaml with AdamW, 128 images a step.
The arms live side by side and take blocks of four steps in random order. Those but timm start from the
same weights, and `memory` reads the first batches of ours: losses within 1e-4, or no timing counts.

    ours      the loop of `pretrain train`: images decoded, cropped and mirrored, ledger with a digest
              of the pixels, metrics
    plain     our model in a loop of PyTorch: its DataLoader over the PNG files, the same augmentation
              by Pillow and numpy
    memory    the same loop over batches in memory: nothing is decoded
    timm      timm's ViT of the same size, its dataset, transforms, loader and optimizer, in the order
              of its train.py; skipped where timm is not installed

Ratios are times of a peer over ours, above 1: ours is faster. Must: 0.97 of `plain`.
"""

import argparse
import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MALLOC_ARENA_MAX"] = "1"

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.common import is_conclusive, measure, print_row, ratio
from benchmarks.trainer_ours import COMPARED_STEPS, Trainer
from benchmarks.trainer_peers import BareLoop, build_module
from pretrain.config.load import load_config
from pretrain.config.run import RunConfig
from pretrain.dist import read_world
from pretrain.types import Batch
from pretrain.utils.image_file import SUFFIXES
from pretrain.utils.log import quiet_libraries

BLOCK_STEPS = 4
ROWS = 128
PADDING = 2
MUST = 0.97
LOSS_TOLERANCE = 1e-4


def plan_run(folder: str, name: str, data: str) -> RunConfig:
    """Returns the config of a run that saves and validates nothing."""
    settings: dict[str, Any] = {
        "data.path": data,
        "run.dir": folder,
        "run.name": name,
        "batch.micro": ROWS,
        "optim.kind": "adamw",
        "optim.muon": "null",
        "optim.lr": 1e-3,
        "optim.schedule.kind": "constant",
        "optim.schedule.warmup_steps": 0,
        "train.steps": 1_000_000,
        "eval.every_steps": 0,
        "engine.kind": "single",
        "checkpoint.every_steps": 0,
        "tracking.log_every_steps": BLOCK_STEPS,
        "tracking.wandb": '"off"',
    }
    return load_config("configs/run/vit_fashion.yaml", [f"{key}={value}" for key, value in settings.items()])


class PngFolder(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images of FOLDER/train/CLASS/*.png, cropped at a random place of a black frame and mirrored."""

    def __init__(self, folder: Path) -> None:
        self._files = sorted(path for path in folder.glob("train/*/*") if path.suffix in SUFFIXES)
        names = sorted({path.parent.name for path in self._files})
        self._labels = [names.index(path.parent.name) for path in self._files]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        with Image.open(self._files[number]) as image:
            pixels = np.pad(np.asarray(image.convert("L")), PADDING)
        top, left = np.random.randint(0, 2 * PADDING + 1, 2)
        pixels = pixels[top : top + 28, left : left + 28]
        if np.random.random() < 0.5:
            pixels = pixels[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(pixels)[None]), self._labels[number]


def forever(loader: Any) -> Iterator[Any]:
    """Yields the batches of a loader, epoch after epoch."""
    while True:
        yield from loader


def plain_batches(folder: Path, length: int) -> Iterator[tuple[Batch, float]]:
    """Yields what the plain loop reads: pixels, and the label at the first position of each row."""
    loader = torch.utils.data.DataLoader(PngFolder(folder), ROWS, shuffle=True, drop_last=True)
    for pixels, labels in forever(loader):
        targets = torch.full((ROWS, length), -100)
        targets[:, 0] = labels
        zeros = torch.zeros_like(targets)
        chosen = torch.arange(0, ROWS * length, length)
        yield Batch(zeros, targets, target_positions_P=chosen, pixels_BCYX=pixels), 1 / ROWS


def plain_step(config: RunConfig) -> Callable[[Batch, float], Tensor]:
    """Returns the step of a plain loop over our model, loss and optimizer."""
    module, optimizer = build_module(config)

    def step(batch: Batch, scale: float) -> Tensor:
        optimizer.zero_grad()
        loss = module(batch)[0] * scale
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), config.optim.grad_clip)
        optimizer.step()
        return loss.detach()

    return step


def timm_loop(config: RunConfig, photos: Path) -> BareLoop:
    """Returns a loop in the order of timm's train.py: loader, autocast off, loss, clipping, step."""
    from timm.data import create_dataset, create_loader
    from timm.models.vision_transformer import VisionTransformer
    from timm.optim import create_optimizer_v2
    from timm.utils import dispatch_clip_grad

    stack = config.model.last_stack
    size = {"embed_dim": stack.width, "depth": stack.layers, "num_heads": stack.heads}
    patches = {"img_size": 28, "patch_size": 4, "in_chans": 1, "num_classes": 10}
    model = VisionTransformer(**size, **patches, class_token=False, global_pool="avg")
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    dataset = create_dataset("", root=str(photos), split="train", is_training=True, input_img_mode="L")
    options: dict[str, Any] = {"is_training": True, "use_prefetcher": False, "num_workers": 0, "color_jitter": 0.0}
    options |= {"mean": (0.5,), "std": (0.5,), "interpolation": "bilinear"}
    loader = create_loader(dataset, input_size=(1, 28, 28), batch_size=ROWS, **options)
    criterion = torch.nn.CrossEntropyLoss()

    def step(pixels: Tensor, labels: Tensor) -> Tensor:
        loss = criterion(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        dispatch_clip_grad(model.parameters(), config.optim.grad_clip, mode="norm")
        optimizer.step()
        return loss.detach()

    return BareLoop(step, forever(loader))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="shards of the images")
    parser.add_argument("photos", type=Path, help="the files that they were prepared from")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ours, world = {}, read_world()
        for name in ("ours", "ours_again"):
            ours[name] = Trainer(plan_run(folder, name, str(options.data)), world)
            stack.callback(ours[name].close)
            ours[name].take(COMPARED_STEPS + 1)
        config = ours["ours"].run.config
        first = [(step.micro_batches[0], 1 / step.counts.num_targets) for step in ours["ours"].steps.first]
        memory = BareLoop(plain_step(config), forever(first))
        found = [float(loss) for loss in memory.take(COMPARED_STEPS)]
        worst = max(abs(one - other) for one, other in zip(found, ours["ours"].losses(), strict=True))
        assert worst < LOSS_TOLERANCE, f"losses differ by {worst}: the arms do not do the same work"
        arms: dict[str, Trainer | BareLoop] = {**ours, "memory": memory}
        batches = plain_batches(options.photos, config.batch.seq_len)
        arms["plain"] = BareLoop(plain_step(config), batches)
        if importlib.util.find_spec("timm") is not None:
            arms["timm"] = timm_loop(config, options.photos)
        for arm in arms.values():
            arm.take(2)
        timings = measure({name: partial(arm.take, BLOCK_STEPS) for name, arm in arms.items()}, options.rounds)
    figures: dict[str, Any] = {"loss_difference": worst}
    for clock in ("cpu_s", "wall_s"):
        aa = ratio(timings["ours"], timings["ours_again"], clock=clock)
        peers = [name for name in arms if name not in ours]
        ratios = {name: ratio(timings[name], timings["ours"], clock=clock) for name in peers}
        ms = {
            name: round(1e3 / BLOCK_STEPS * float(np.median([getattr(one, clock) for one in runs])), 1)
            for name, runs in timings.items()
        }
        held = "holds" if ratios["plain"].low >= MUST else "missed"
        verdict = held if is_conclusive(aa) else f"{held}, inconclusive: A/A wider than 3%"
        figures[clock] = {"ms": ms, "ratios": {k: str(v) for k, v in ratios.items()}, "aa": str(aa), "must": verdict}
        print(clock, figures[clock])
    print_row("image_step", figures, ("torch", "Pillow", *(["timm"] if "timm" in arms else [])))


if __name__ == "__main__":
    main()
