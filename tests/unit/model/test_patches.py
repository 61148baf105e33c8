"""Models of image patches: the embedding, positions, and what stands for an image."""

import numpy as np
import pytest
import torch

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig, PatchesConfig
from pretrain.config.presets import expand_preset
from pretrain.model import build_model, init_weights
from pretrain.model.parts.patch_embedding import PatchEmbedding, cut_patches
from pretrain.model.parts.position import sinusoids_2d
from pretrain.model.parts.rotary import PatchRotaryTable, rotate
from pretrain.plan.params import count_parts, parameter_shapes
from pretrain.types import Batch

LABELS = {"kind": "labels", "labels": ["a", "b", "c"]}


def configured(**keys):
    return ModelConfig.model_validate(expand_preset({"preset": "vit-tiny", "head": LABELS} | keys))


def built(config, seed=1):
    model = build_model(config, PLAIN_ENGINE, torch.device("cpu")).eval()
    init_weights(model, config, seed)
    return model


def batch_of(pixels):
    zeros = torch.zeros(len(pixels), 17, dtype=torch.int64)
    return Batch(zeros, zeros, pixels_BCYX=pixels)


def images(count=4):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=generator)


def test_the_embedding_is_a_convolution_of_normalised_pixels():
    config = configured(input={"mean": [0.4, 0.5, 0.6], "std": [0.2]})
    module = built(config).embedding
    assert isinstance(module, PatchEmbedding)
    pixels = images()
    mean = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)
    normal = (pixels / 255 - mean) / 0.2
    kernel = module.projection.weight.view(64, 3, 4, 4)
    expected = torch.nn.functional.conv2d(normal, kernel, module.projection.bias, stride=4).flatten(2).transpose(1, 2)
    found = module(pixels)
    assert found.shape == (4, 17, 64)
    torch.testing.assert_close(found[:, 1:], expected, rtol=1e-5, atol=1e-5)  # another order of sums
    assert torch.equal(found[:, 0], module.before.weight.expand(4, -1))
    assert torch.equal(module(normal), found)


def test_a_patch_is_row_by_row():
    pixels = torch.arange(16).view(1, 1, 4, 4)
    assert cut_patches(pixels, 2)[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


def test_two_dimensional_sinusoids_are_those_of_the_formula():
    table = sinusoids_2d(grid=3, width=8, num_before=1)
    assert table.shape == (10, 8) and not table[0].any()
    for row in range(3):
        for column in range(3):
            angles = [np.array([place, place / 100]) for place in (column, row)]
            expected = np.concatenate([f(angle) for angle in angles for f in (np.sin, np.cos)])
            np.testing.assert_allclose(table[1 + 3 * row + column], expected, atol=1e-7)  # fp32


def test_scores_of_rotated_patches_depend_on_columns_and_rows_between_them_alone():
    patches = PatchesConfig(image=6, size=2, registers=1)
    table = PatchRotaryTable(patches, 8, 100.0)
    q, k = (torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    q, k = (rotate(x.expand(1, 11, 1, 8), table(None, 0, 11, x.device))[0, :, 0] for x in (q, k))
    assert torch.equal(q[0], q[1]), "what comes before the patches is not turned"
    scores = (q @ k.T)[2:, 2:].view(3, 3, 3, 3)  # row and column of a query, then of a key
    torch.testing.assert_close(scores[1:, :, 1:, :], scores[:-1, :, :-1, :], rtol=0, atol=1e-5)
    torch.testing.assert_close(scores[:, 1:, :, 1:], scores[:, :-1, :, :-1], rtol=0, atol=1e-5)
    assert not torch.allclose(scores[0, 0, 0, 1], scores[0, 0, 1, 0], atol=1e-3), "an axis is not the other"
    chosen = table(torch.tensor([[0, 5]]), 0, 2, q.device)
    assert torch.equal(chosen.cos[0], table(None, 0, 11, q.device).cos[[0, 5]])


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"encoder": {"position": "sinusoidal_2d"}},
        {"encoder": {"position": "rotary"}},
        {"encoder": {"position": "rotary_2d", "layer_scale": 0.1}},
        {"input": {"registers": 3}},
        {"input": {"class_token": False}, "head": LABELS | {"mean": True}},
        {"pooler": True, "input": {"channels": 1}},
    ],
    ids=["learned", "2d", "rotary", "rotary 2d", "registers", "mean", "pooler"],
)
def test_a_model_has_the_parameters_that_are_counted(keys):
    config = configured(**keys)
    model = built(config)
    assert {name: tuple(one.shape) for name, one in model.named_parameters()} == parameter_shapes(config)
    assert config.max_seq_len == config.input.positions
    pixels = images()[:, : config.input.channels]
    output = model(batch_of(pixels))
    assert output.logits_BTV.shape == (4, config.input.positions, 3)
    # An image is alone in its row: others change nothing.
    torch.testing.assert_close(model(batch_of(pixels[1:2])).logits_BTV[0], output.logits_BTV[1])


def test_the_class_token_or_the_mean_stands_for_the_image():
    config = configured(input={"class_token": False}, head=LABELS | {"mean": True})
    hidden = built(config)(batch_of(images())).hidden_BTD
    assert torch.equal(hidden[:, 0], hidden[:, 5])
    hidden = built(configured())(batch_of(images())).hidden_BTD
    assert not torch.equal(hidden[:, 0], hidden[:, 5])


def test_patches_of_any_size_begin_with_values_of_one_deviation():
    pixels = torch.randn(8, 3, 16, 16)
    for size in (2, 8):
        module = built(configured(input={"size": size})).embedding
        assert module(pixels)[:, 1:].std().item() == pytest.approx(1.0, rel=0.1)


def test_a_masked_autoencoder_has_the_parameters_that_are_counted():
    config = ModelConfig.model_validate(expand_preset({"preset": "vit_mae-tiny"}))
    model = built(config)
    assert {name: tuple(one.shape) for name, one in model.named_parameters()} == parameter_shapes(config)
    assert sum(count_parts(config).values()) == sum(one.numel() for one in model.parameters())
    assert not model.is_causal and all(block.cross is None for block in model.decoder.blocks)
