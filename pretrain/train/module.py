"""Model and objective as one module, so that an engine's hooks surround everything that reads a parameter."""

import torch
from torch import Tensor, nn

from pretrain.model import LanguageModel
from pretrain.objective import Loss
from pretrain.types import Batch


class TrainModule(nn.Module):
    """Parameter names are the model's own."""

    def __init__(self, model: LanguageModel, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Runs the model and its loss on a micro-batch.

        Returns:
            The sum of the losses that is minimised, a scalar, and what is shown, detached: float64 [2], the sum of
            -log p(target) and the number of targets held for the likeliest.
        """
        found = self._loss(self.model, batch)
        return found.loss_sum, torch.stack((found.nll_sum.double(), found.num_correct.double()))
