"""Masked autoencoder (He et al. 2022): the pixels of hidden patches from the visible ones.

    a number of each patch, by (seed, sample)  -->  patches with the lowest stay visible
    source    places of class token, registers and visible patches: what the encoder reads
    targets   0 at the places of hidden patches, where the loss is

    loss of a patch = mean over its pixels of (predicted - pixel)^2

With `normalize`, pixels are taken minus the mean of their patch, divided by its standard deviation.
"""

from functools import partial

import numpy as np
import torch

from pretrain.kinds.objectives.masked_patches import MaskedPatchesConfig
from pretrain.objective.loss import LossOutput, Model
from pretrain.objective.row_maker import RowContext, count_padding
from pretrain.rows import IGNORE_INDEX, TokenRows
from pretrain.types import Batch, ModelRows, RowMaker, StackRows
from pretrain.utils.rng import draw_uniform


def build_masked_patches(section: MaskedPatchesConfig, context: RowContext) -> RowMaker:
    """Hides patches of images; the lengths of the context say how many."""
    assert context.lengths.source is not None, "a model of images, by `image_lengths`"
    read, before = context.lengths.source, context.lengths.before
    return partial(hide_patches, seed=context.seed, num_read=read, before=before)


def hide_patches(rows: TokenRows, seed: int, num_read: int, before: int) -> ModelRows:
    """Draws the patches of each image that the encoder reads, by the seed and the sample.

    `num_read` vectors of a row are read, `before` of them come before its patches. An image that
    could not be read has no targets.
    """
    num_rows, length = len(rows.tokens_BT), rows.tokens_BT.shape[1] - 1
    numbers = draw_uniform("masked patches", seed, rows.sample_ids_B, length - before)
    order = np.argsort(numbers, axis=1, kind="stable") + before
    visible = np.sort(order[:, : num_read - before], axis=1)
    hidden = order[:, num_read - before :]
    if rows.num_tokens_B is not None:
        hidden = hidden[rows.num_tokens_B > 0]
    targets = np.full((num_rows, length), IGNORE_INDEX, dtype=np.int64)
    kept = np.arange(num_rows) if rows.num_tokens_B is None else np.flatnonzero(rows.num_tokens_B)
    targets[kept[:, None], hidden] = 0
    places = np.concatenate([np.tile(np.arange(before), (num_rows, 1)), visible], axis=1)
    return Batch(
        np.zeros((num_rows, length), dtype=np.int64),
        targets,
        **rows.carried(),
        target_positions_P=np.flatnonzero(targets != IGNORE_INDEX),
        source=StackRows(np.zeros_like(places), positions_BT=places),
        num_padding=count_padding(rows, length) + num_read * (num_rows - len(kept)),
    )


def sum_patch_loss(model: Model, batch: Batch, normalize: bool) -> LossOutput:
    """Sums the mean squared errors of hidden patches, in fp32 (fp64 for fp64); none is correct."""
    chosen_P = batch.target_positions_P
    assert chosen_P is not None and batch.pixels_BCYX is not None, "rows of `hide_patches`"
    hidden_PD = model(batch, logits=False).hidden_BTD.flatten(0, 1).index_select(0, chosen_P)
    predicted = model.head(hidden_PD)
    exact = torch.promote_types(predicted.dtype, torch.float32)
    patches = model.embedding.patches(batch.pixels_BCYX).to(exact)  # [B, patches, C P P]
    # A row has places before its patches, which have no pixels.
    before = batch.tokens_BT.shape[1] - patches.shape[1]
    rows_P = chosen_P.div(batch.tokens_BT.shape[1], rounding_mode="floor")
    pixels = patches.flatten(0, 1).index_select(0, chosen_P - before * (rows_P + 1))
    if normalize:
        variance, mean = torch.var_mean(pixels, dim=-1, keepdim=True)
        pixels = (pixels - mean) / (variance + 1e-6).sqrt()
    loss_P = (predicted.to(exact) - pixels).square().mean(dim=-1)
    loss_sum = loss_P.sum()
    num_correct = torch.zeros_like(chosen_P[:1]).sum()
    return LossOutput(loss_sum, loss_sum.detach(), num_correct, loss_P.detach())
