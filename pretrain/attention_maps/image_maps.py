"""`pretrain attention --image`: what a ViT attends to in one image, drawn over it and in numbers.

    file -> centre view -> one batch -> record_attention -> the row that stands for the image, of
    each head, or of their rollout -> picture, facts

That row is the class token's; of a model that classifies a mean over positions, the mean of all
rows. Not here: text (`terminal.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pretrain.attention_maps.maps import (
    AttentionMap,
    HeadMap,
    choose_heads,
    parse_numbers,
    record_attention,
    summarize_head,
)
from pretrain.config.data import ImagesConfig
from pretrain.config.model import ModelConfig, PatchesConfig
from pretrain.data.image_view import read_view
from pretrain.errors import ConfigError
from pretrain.model import LanguageModel
from pretrain.tracking.picture_files import check_format, encode_figure, plain_style
from pretrain.types import Batch, StackRows
from pretrain.utils.io import make_dir, write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
PANEL = 1.5  # inches of a side; smaller where a picture would exceed `LONGEST`
LONGEST = 36.0
COLOUR = (0.93, 0.27, 0.0)  # of attention, over the image in grey


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """Options of `pretrain attention --image`. Raises: ConfigError: Unknown format."""

    image: Path
    layers: str = "all"  # or numbers from 0 with commas between
    heads: str = "all"  # the same
    rollout: bool = False  # one map of all layers in place of those of heads
    out: Path | None = None  # picture to write

    def __post_init__(self) -> None:
        if self.out is not None:
            check_format(self.out)
        if self.rollout and (self.layers, self.heads) != ("all", "all"):
            raise ConfigError(
                "--rollout is of all layers and heads",
                fix="leave out --layer and --head",
            )


def see_image(model: LanguageModel, config: ModelConfig, images: ImagesConfig, request: ImageRequest) -> dict[str, Any]:
    """Draws the requested maps of one image; returns a summary of each, and the path.

    `images` has the size and the filter of the view, that of evaluations.

    Raises:
        ConfigError: A layer or head that there is not.
        DataError: The image cannot be read.
        DiskError: The picture cannot be written.
    """
    patches = config.input
    assert patches is not None, "a model of images"
    pixels = read_view(request.image, patches.image_size, images)
    maps = record_attention(model, build_image_row(pixels, config, model))
    maps = [each for each in maps if each.stack == "encoder"]
    layers, heads = parse_numbers(request.layers, "layer"), parse_numbers(request.heads, "head")
    rows = [[roll_out(maps)]] if request.rollout else choose_heads(maps, None, layers, heads)
    averages = config.head.mean or not patches.class_token
    rows = [[_row_of_image(head, averages) for head in row] for row in rows]
    if request.out is not None:
        content = render_image_maps(pixels, rows, patches, request)
        make_dir(request.out.parent)
        write_file(request.out, content)
    keys = _name_positions(patches)
    summaries = [summarize_head(head, keys) for head in chain.from_iterable(rows)]
    out = None if request.out is None else str(request.out)
    if not request.rollout:
        return {"image": str(request.image), "heads": summaries, "out": out}
    figures = {key: summaries[0][key] for key in ("entropy_bits", "strongest_key")}
    return {"image": str(request.image), "rollout": figures, "out": out}


def build_image_row(pixels: np.ndarray, config: ModelConfig, model: LanguageModel) -> Batch:
    """Returns a batch of one image, on the model's device; an autoencoder sees all patches."""
    device = model.embedding.weight.device
    zeros_BT = torch.zeros(1, config.max_seq_len, dtype=torch.int64, device=device)
    source = None
    if config.restores:
        places_BS = torch.arange(config.max_seq_len, device=device)[None]
        source = StackRows(zeros_BT, positions_BT=places_BS)
    pixels_BCYX = torch.from_numpy(np.array(pixels[None])).to(device)
    return Batch(zeros_BT, zeros_BT, source=source, pixels_BCYX=pixels_BCYX)


def roll_out(maps: Sequence[AttentionMap]) -> HeadMap:
    """Returns the rollout of all layers (Abnar and Zuidema 2020, 3), as one head of the last one.

    A layer counts as the mean of its heads and, by half, as its residual connection.
    """
    identity_TT = torch.eye(maps[0].weights_NTS.shape[1])
    rolled_TS = identity_TT
    for each in maps:
        rolled_TS = (each.weights_NTS.mean(dim=0) + identity_TT) / 2 @ rolled_TS
    last = maps[-1]
    return HeadMap(last.stack, last.kind, last.layer, 0, rolled_TS, last.allowed_TS)


def _row_of_image(head: HeadMap, averages: bool) -> HeadMap:
    """Returns a head with the one row that stands for the image."""
    weights_TS = head.weights_TS
    row_1S = weights_TS.mean(dim=0, keepdim=True) if averages else weights_TS[:1]
    return replace(head, weights_TS=row_1S, allowed_TS=head.allowed_TS[:1])


def _name_positions(patches: PatchesConfig) -> list[str]:
    names = ["class token"] if patches.class_token else []
    names += [f"register {number}" for number in range(patches.registers)]
    places = (divmod(number, patches.grid) for number in range(patches.grid**2))
    return names + [f"patch row {row} column {column}" for row, column in places]


def render_image_maps(
    pixels: np.ndarray, rows: Sequence[Sequence[HeadMap]], patches: PatchesConfig, request: ImageRequest
) -> bytes:
    """Returns the picture: the image, and a map for each head, layers down and heads across."""
    assert request.out is not None, "a picture is asked for"
    with plain_style():
        figure = _draw_maps(pixels, rows, patches, rollout=request.rollout)
        return encode_figure(figure, check_format(request.out))


def _draw_maps(
    pixels: np.ndarray, rows: Sequence[Sequence[HeadMap]], patches: PatchesConfig, *, rollout: bool
) -> "Figure":
    from matplotlib.figure import Figure

    columns = 1 + max(map(len, rows))
    panel = min(PANEL, (LONGEST - 0.5) / max(columns, len(rows)))
    size = (columns * panel, len(rows) * panel + 0.5)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    legend = "orange: weight of a patch, from 0\nto the number above its map"
    figure.supxlabel(legend, fontsize=6.5, color="#606060")
    all_axes = figure.subplots(len(rows), columns, squeeze=False)
    for axes in all_axes.flat:
        axes.set_axis_off()
    all_axes[0][0].imshow(_as_shown(pixels), cmap="gray", vmin=0, vmax=255)
    all_axes[0][0].set_title("image", fontsize=6.5, pad=2)
    for row, heads in zip(all_axes, rows, strict=True):
        for axes, head in zip(row[1:], heads, strict=False):
            name = "rollout" if rollout else f"layer {head.layer} head {head.head}"
            _draw_over(axes, pixels, head.weights_TS[0, patches.num_before :], name)
    return figure


def _as_shown(pixels: np.ndarray) -> np.ndarray:
    """Returns the pixels as matplotlib has them, [Y, X] or [Y, X, 3]."""
    return pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)


def _draw_over(axes: "Axes", pixels: np.ndarray, weights_P: Tensor, name: str) -> None:
    """Draws the weights of the patches over the image in pale grey."""
    grid = round(len(weights_P) ** 0.5)
    most = float(weights_P.max())
    side = pixels.shape[-1]
    # Half as dark as it is, so that colour stands out on black and on white.
    axes.imshow(127 + pixels.mean(axis=0) / 2, cmap="gray", vmin=0, vmax=255)
    shades = np.zeros((grid, grid, 4))
    shades[..., :3] = COLOUR
    shades[..., 3] = 0.9 * weights_P.reshape(grid, grid).numpy() / (most or 1.0)
    place = (-0.5, side - 0.5, side - 0.5, -0.5)
    axes.imshow(shades, extent=place, interpolation="nearest")
    axes.set_title(f"{name}: {most:.3f}", fontsize=6.5, pad=2)
