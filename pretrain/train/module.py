"""Model and objective as one module, so that an engine's hooks surround everything that reads a parameter."""

from torch import Tensor, nn

from pretrain.model.transformer import Transformer
from pretrain.objective import Objective
from pretrain.types import Batch


class TrainModule(nn.Module):
    """`forward(batch)` returns the sum of the token losses, an fp32 scalar. Parameter names are the model's own."""

    def __init__(self, model: Transformer, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self._objective = objective

    def forward(self, batch: Batch) -> Tensor:
        """Runs the model and its objective on a micro-batch."""
        return self._objective(self.model, batch).loss_sum
