"""The weights that the forward pass reads on this rank, in the precision that it reads them in."""

from collections.abc import Iterator

from torch import Tensor, nn


def working_weights(module: nn.Module, names: dict[int, str]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in checkpoints, live tensor) of each parameter, shared ones once: whole, or at ZeRO 3 the share."""
    for parameter in module.parameters():
        share = getattr(parameter, "ds_tensor", None)
        yield names[id(parameter)], parameter.data if share is None else share.data
