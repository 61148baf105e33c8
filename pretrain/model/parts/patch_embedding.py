"""Images as the input of a stack: patches, each projected to its width (Dosovitskiy et al. 2021, ViT)."""

import torch
from torch import Tensor, nn

from pretrain.config.model import PatchesConfig


class PatchEmbedding(nn.Module):
    """Images to the input of a stack, [B, C, Y, X] to [B, T, D] (Dosovitskiy et al. 2021, 3.1).

    `projection.weight` is [D, C P P], the kernel of a convolution of stride P; `before.weight` has
    the class token, then registers. Pixels of uint8 are normalised, others are taken as they are.
    """

    def __init__(self, config: PatchesConfig, width: int) -> None:
        super().__init__()
        self.size = config.size
        self.image_size = config.image_size
        self.num_before = config.num_before
        # Plain attributes, not buffers: an engine that casts a module to bf16 would round them.
        self._mean = torch.tensor(config.mean, device="cpu").view(-1, 1, 1)
        self._std = torch.tensor(config.std, device="cpu").view(-1, 1, 1)
        self.projection = nn.Linear(config.patch_values, width)
        self.before = nn.Embedding(config.num_before, width) if config.num_before else None

    @property
    def weight(self) -> Tensor:
        """A weight on the module's device, as of a token table."""
        return self.projection.weight

    def forward(self, pixels_BCYX: Tensor, places_BS: Tensor | None = None) -> Tensor:
        """Returns the vectors of a row, or of some places: all before the patches, then others."""
        # Rounded once: 256 levels minus a mean are not exact in 16 bits.
        pixels_BCYX = self.normalize(pixels_BCYX).to(self.projection.weight.dtype)
        patches = cut_patches(pixels_BCYX, self.size)
        if places_BS is not None:
            numbers_BS = places_BS[:, self.num_before :, None] - self.num_before
            patches = patches.gather(1, numbers_BS.expand(-1, -1, patches.shape[2]))
        x_BTD = self.projection(patches)
        if self.before is None:
            return x_BTD
        # By a call of the module: ZeRO stage 3 gathers weights module by module.
        numbers_T = torch.arange(self.before.num_embeddings, device=x_BTD.device)
        before_TD = self.before(numbers_T).to(x_BTD.dtype)
        return torch.cat((before_TD.expand(len(x_BTD), -1, -1), x_BTD), dim=1)

    def patches(self, pixels_BCYX: Tensor) -> Tensor:
        """Returns the normalised pixels of each patch, fp32 [B, patches, P P C] (MAE)."""
        return cut_patches(self.normalize(pixels_BCYX), self.size, channels_last=True)

    def normalize(self, pixels_BCYX: Tensor) -> Tensor:
        """Returns pixels of uint8 in fp32, by `mean` and `std` of the config; others unchanged."""
        if pixels_BCYX.dtype != torch.uint8:
            return pixels_BCYX
        device = pixels_BCYX.device
        if self._mean.device != device:
            self._mean, self._std = self._mean.to(device), self._std.to(device)
        return (pixels_BCYX.float() / 255 - self._mean) / self._std


def cut_patches(pixels_BCYX: Tensor, size: int, *, channels_last: bool = False) -> Tensor:
    """Returns the patches of images row by row, [B, patches, C P P], each flattened from [C, P, P].

    `channels_last`: from [P, P, C].
    """
    rows, channels, height, width = pixels_BCYX.shape
    parts = pixels_BCYX.reshape(rows, channels, height // size, size, width // size, size)
    order = (0, 2, 4, 3, 5, 1) if channels_last else (0, 2, 4, 1, 3, 5)
    return parts.permute(order).flatten(1, 2).flatten(2)
