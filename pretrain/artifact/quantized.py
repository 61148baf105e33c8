"""Frozen matrices in 4 bits under adapters (QLoRA, Dettmers et al. 2023, section 3), by bitsandbytes.

    W [out, in]  blocks of 64 values: a code of 4 bits each (NormalFloat), a scale of 8 bits
                 blocks of 256 scales: one of fp32, and a mean         0.52 bytes a value in all
    y = x W^T    W in the dtype of x for the time of the product; the gradient of x makes it again

The codes are no parameters: no engine converts, shards, sends or saves them. Dequantising runs on a
CPU too, where bitsandbytes has no fused product.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pretrain.errors import LaunchError, install_fix

_BLOCK = 64
"""Values that share a scale, those of the paper."""


def _functional() -> Any:
    """Returns the functions of bitsandbytes. Raises: LaunchError: It is missing."""
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise LaunchError(
            f"finetune.quantize=nf4 needs the bitsandbytes package: {error}",
            fix=install_fix("qlora"),
        ) from None
    return functional


class QuantizedMatrix:
    """A matrix in NF4 with double quantisation, of the device of `weight`."""

    def __init__(self, weight: Tensor) -> None:
        options = {"blocksize": _BLOCK, "compress_statistics": True, "quant_type": "nf4"}
        self._codes, self._state = _functional().quantize_4bit(weight.contiguous(), **options)

    def read(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix, dequantised."""
        self._state.dtype = dtype
        values: Tensor = _functional().dequantize_4bit(self._codes, self._state)
        return values

    @property
    def num_bytes(self) -> int:
        """Bytes of the codes and scales; tables of all codes, the same for every matrix, left out."""
        scales = self._state.absmax.nbytes + self._state.state2.absmax.nbytes
        return int(self._codes.nbytes + scales + self._state.offset.nbytes)


def round_to_nf4(weight: Tensor) -> Tensor:
    """Returns a matrix with the values that it has in NF4, in its dtype."""
    return QuantizedMatrix(weight).read(weight.dtype)


class _Product(torch.autograd.Function):
    """`x W^T`; the backward pass keeps no W."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, matrix: QuantizedMatrix) -> Tensor:
        ctx.matrix = matrix
        return nn.functional.linear(x_BTD, matrix.read(x_BTD.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTE: Tensor) -> tuple[Tensor, None]:
        return grad_BTE @ ctx.matrix.read(grad_BTE.dtype), None


class QuantizedLinear(nn.Module):
    """A frozen linear layer, in the place of that under an adapter; its bias, if any, stays as it was."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.matrix: QuantizedMatrix | None = None

    def take(self, weight: Tensor) -> None:
        """Quantises a weight, on its device."""
        self.matrix = QuantizedMatrix(weight)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Maps [..., in] to [..., out], in autocast's dtype or the input's."""
        assert self.matrix is not None, "filled by `take`"
        device = x_BTD.device.type
        if torch.is_autocast_enabled(device):
            x_BTD = x_BTD.to(torch.get_autocast_dtype(device))
        y_BTE: Tensor = _Product.apply(x_BTD, self.matrix)
        return y_BTE if self.bias is None else y_BTE + self.bias.to(y_BTE.dtype)
