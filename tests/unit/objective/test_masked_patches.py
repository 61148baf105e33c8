"""Hidden patches of images: which are drawn, and the loss of their pixels."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.lengths import RowLengths, image_lengths
from pretrain.config.model import ModelConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.presets import expand_preset
from pretrain.data.loader import build_batch
from pretrain.model import build_model, init_weights
from pretrain.objective import build_loss, build_rows
from pretrain.objective.masked_patches import hide_patches
from pretrain.objective.row_maker import RowContext
from pretrain.rows import IGNORE_INDEX, TokenRows, Vocabulary, select_rows

NUM_PATCHES, BEFORE, READ = 16, 1, 5
CONFIG = ModelConfig.model_validate(expand_preset({"preset": "vit_mae-tiny"}))


def image_rows(sample_ids, num_tokens=None):
    """Rows of noise; `num_tokens` of 0 stands for an image that could not be read."""
    width = BEFORE + NUM_PATCHES + 1
    pixels = np.random.default_rng(0).integers(0, 256, (len(sample_ids), 3, 16, 16), dtype=np.uint8)
    labels = np.full((len(sample_ids), width), IGNORE_INDEX, np.int16)
    counts = None if num_tokens is None else np.array(num_tokens)
    starts = np.arange(len(sample_ids)) * width
    tokens = np.zeros(labels.shape, np.uint16)
    return TokenRows(tokens, np.array(sample_ids), starts, counts, labels_BT=labels, pixels_BCYX=pixels)


def hide(rows, seed=3):
    return hide_patches(rows, seed, READ, BEFORE)


def test_each_patch_is_read_or_predicted_and_the_class_token_always_read():
    made = hide(image_rows(range(50)))
    places = made.source.positions_BT
    assert places.shape == (50, READ) and (places[:, 0] == 0).all() and (np.diff(places, axis=1) > 0).all()
    for row, targets in zip(places, made.targets_BT, strict=True):
        assert sorted([*row, *np.flatnonzero(targets == 0)]) == list(range(17))
    assert made.num_targets() == 50 * 12 and made.num_tokens() == 50 * (17 + READ)
    # Every patch is hidden now and then.
    assert ((made.targets_BT == 0).mean(axis=0)[1:] > 0.4).all()


def test_what_is_hidden_depends_on_the_seed_and_the_sample_alone():
    rows = image_rows(range(10))
    whole = hide(rows)
    some = hide(select_rows(rows, np.arange(10) % 3 == 1))
    np.testing.assert_array_equal(some.targets_BT, whole.targets_BT[1::3])
    np.testing.assert_array_equal(some.source.positions_BT, whole.source.positions_BT[1::3])
    assert not np.array_equal(hide(rows, seed=4).targets_BT, whole.targets_BT)
    assert len({tuple(row) for row in whole.source.positions_BT.tolist()}) == 10


def test_an_image_that_could_not_be_read_has_no_targets_and_counts_no_tokens():
    made = hide(image_rows(range(3), num_tokens=[18, 0, 18]))
    assert (made.targets_BT[1] == IGNORE_INDEX).all()
    assert made.num_targets() == 24 and made.num_tokens() == 2 * (17 + READ)
    np.testing.assert_array_equal(made.targets_BT[::2], hide(image_rows(range(3))).targets_BT[::2])


def build(objective):
    config = ObjectiveConfig.model_validate({"kind": "masked_patches", "masked_patches": objective})
    lengths = image_lengths(RowLengths(17, 17), config, CONFIG.input)
    vocabulary = Vocabulary(1, 0, np.zeros(1, bool))
    model = build_model(CONFIG, PLAIN_ENGINE, torch.device("cpu"))
    init_weights(model, CONFIG, seed=1)
    return build_rows(config, RowContext(3, vocabulary, lengths, 2)), build_loss(config), model.double()


@pytest.mark.parametrize("normalize", [True, False])
def test_the_loss_is_the_mean_squared_error_of_hidden_patches(normalize):
    make_rows, loss, model = build({"rate": 0.5, "normalize": normalize})
    batch = build_batch(make_rows(image_rows(range(4), num_tokens=[18, 18, 0, 18])))
    assert batch.source.tokens_BT.shape == (4, 9) and batch.num_targets() == 24
    logits = model(batch).logits_BTV
    found = loss(model, batch)
    expected = 0.0
    for row, place in torch.nonzero(batch.targets_BT == 0).tolist():
        y, x = divmod(place - 1, 4)
        patch = batch.pixels_BCYX[row, :, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4].permute(1, 2, 0).flatten().double()
        pixels = (patch / 255 - 0.5) / 0.5
        if normalize:
            pixels = (pixels - pixels.mean()) / (pixels.var() + 1e-6).sqrt()
        expected += (logits[row, place] - pixels).square().mean().item()
    assert found.loss_sum.item() == pytest.approx(expected, rel=1e-6)
    assert found.nll_sum.item() == found.loss_sum.item() and int(found.num_correct) == 0
    torch.testing.assert_close(found.nll_P.sum(), found.nll_sum)


def test_hidden_pixels_are_not_read():
    make_rows, _, model = build({})
    batch = build_batch(make_rows(image_rows(range(2))))
    hidden = (batch.targets_BT[:, 1:] == 0).view(2, 1, 4, 1, 4, 1).expand(2, 3, 4, 4, 4, 4).reshape(2, 3, 16, 16)
    other = replace(batch, pixels_BCYX=torch.where(hidden, 255 - batch.pixels_BCYX, batch.pixels_BCYX))
    assert not torch.equal(other.pixels_BCYX, batch.pixels_BCYX)
    torch.testing.assert_close(model(other).logits_BTV, model(batch).logits_BTV, rtol=0, atol=0)


@pytest.mark.parametrize(("rate", "visible"), [(0.01, 15), (0.95, 0)])
def test_a_share_that_hides_all_patches_is_refused(rate, visible):
    config = ObjectiveConfig.model_validate({"kind": "masked_patches", "masked_patches": {"rate": rate}})
    if visible:
        assert image_lengths(RowLengths(17, 17), config, CONFIG.input).source == visible + 1
        return
    with pytest.raises(ValueError, match=r"rate=0\.95 leaves 0 of 16 patches visible"):
        image_lengths(RowLengths(17, 17), config, CONFIG.input)
