"""Model and objective as one module, so that an engine's hooks surround everything that reads a parameter."""

import numpy as np
import torch
from torch import Tensor, nn

from pretrain.data.mixture import source_of
from pretrain.model import LanguageModel
from pretrain.objective import Loss
from pretrain.types import IGNORE_INDEX, Batch


class TrainModule(nn.Module):
    """Parameter names are the model's own.

    Args:
        model: The trained model.
        loss: Loss of the objective.
        num_sources: Sources of the mixture; from 2 on, the shown values include each source in training mode.
    """

    def __init__(self, model: LanguageModel, loss: Loss, num_sources: int = 1) -> None:
        super().__init__()
        self.model = model
        self._loss, self._num_sources = loss, num_sources

    @property
    def num_shown(self) -> int:
        """Length of what is shown in training mode."""
        return 2 + (2 * self._num_sources if self._num_sources > 1 else 0)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Runs the model and its loss on a micro-batch.

        Returns:
            The sum of the losses that is minimised, a scalar, and what is shown, detached: float64 [2], the sum of
            -log p(target) and the number of targets held for the likeliest. Of a mixture, in training mode: then that
            sum for each source, then the targets of each.
        """
        found = self._loss(self.model, batch)
        shown = torch.stack((found.nll_sum.double(), found.num_correct.double()))
        if self.training and self._num_sources > 1:
            shown = torch.cat((shown, sum_by_source(batch, found.nll_P, self._num_sources).flatten()))
        return found.loss_sum, shown


def sum_by_source(batch: Batch, nll_P: Tensor | None, num_sources: int) -> Tensor:
    """Returns the loss and the number of targets of each source of a mixture: float64 [2, sources].

    Zeros where the loss of each token is not known.
    """
    targets_BT = batch.targets_BT
    sums = torch.zeros(2, num_sources, dtype=torch.float64, device=targets_BT.device)
    if nll_P is None:
        return sums
    rows, width = targets_BT.shape
    nll_B = torch.zeros(rows, dtype=torch.float64, device=targets_BT.device)
    if batch.target_positions_P is None:
        nll_B += nll_P.view(rows, width).sum(dim=1, dtype=torch.float64)
    else:
        nll_B.index_add_(0, batch.target_positions_P // width, nll_P.double())
    counts_B = (targets_BT != IGNORE_INDEX).sum(dim=1).double()
    sources_B = torch.from_numpy(source_of(np.array(batch.sample_ids, dtype=np.int64))).to(sums.device)
    return sums.index_add_(1, sources_B, torch.stack((nll_B, counts_B)))
