"""A user's module, named under `extend`, that spoils the steps with certain samples, on whatever rank has them."""

from pathlib import Path

MODULE = """
import os

import torch

from pretrain.training.step import TrainModule

PLAIN = TrainModule.forward
IDS = {int(number) for number in os.environ["POISONED"].split(",")}
FACTOR = float(os.environ["FACTOR"])


def forward(self, batch):
    loss, sums = PLAIN(self, batch)
    if self.training and IDS & set(batch.sample_ids()):
        return loss * FACTOR, sums * torch.tensor([FACTOR, 1.0], dtype=torch.float64)
    return loss, sums


TrainModule.forward = forward
"""


def poison(folder: Path, sample_ids: list[int], factor: float) -> dict[str, str]:
    """Writes the module `poisoned` to a folder; returns the environment that goes with it.

    Args:
        folder: The working folder of the run.
        sample_ids: A micro-batch with one of them has its loss multiplied.
        factor: By this; NaN spoils it.
    """
    (folder / "poisoned.py").write_text(MODULE)
    return {"POISONED": ",".join(map(str, sample_ids)), "FACTOR": repr(factor), "PYTHONPATH": str(folder)}
