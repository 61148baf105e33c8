"""Attention over an image: the row that stands for it, its rollout, and the picture."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.attention_maps.image_maps import (
    ImageRequest,
    build_image_row,
    render_image_maps,
    roll_out,
    see_image,
)
from pretrain.attention_maps.maps import AttentionMap, HeadMap, record_attention
from pretrain.config.data import ImagesConfig
from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.data.image_view import read_view
from pretrain.errors import ConfigError, DataError
from tests.helpers.images import encode, noise
from tests.unit.model.tiny import build

LABELS = {"kind": "labels", "labels": ["a", "b"]}
MEAN = {"input": {"class_token": False, "channels": 1}, "head": LABELS | {"mean": True}}
MODELS = {
    "class token": {"head": LABELS, "input": {"registers": 1}},
    "mean": MEAN,
    "autoencoder": {"preset": "vit_mae-tiny"},
}


def model_of(name):
    config = ModelConfig.model_validate(expand_preset({"preset": "vit-tiny"} | MODELS[name]))
    return build(config), config


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.png"
    path.write_bytes(encode(noise(20, 30)))
    return path


@pytest.mark.parametrize("name", MODELS)
def test_every_head_is_drawn_and_summarised_by_the_row_that_stands_for_the_image(name, photo, tmp_path):
    model, config = model_of(name)
    request = ImageRequest(photo, layers="1", out=tmp_path / "new" / "map.png")
    facts = see_image(model, config, ImagesConfig(), request)
    pixels = read_view(photo, config.input.image_size, ImagesConfig())
    (found,) = (
        each
        for each in record_attention(model, build_image_row(pixels, config, model))
        if each.stack == "encoder" and each.layer == 1
    )
    assert found.weights_NTS.shape == (4, config.max_seq_len, config.max_seq_len), "an autoencoder sees all"
    for head, weights_TS in zip(facts["heads"], found.weights_NTS, strict=True):
        row_S = weights_TS.mean(dim=0) if name == "mean" else weights_TS[0]
        assert head["strongest_key"]["index"] == int(row_S.argmax())
        assert head["strongest_key"]["mean_weight"] == pytest.approx(float(row_S.max()), abs=1e-4)
    with Image.open(request.out) as picture:
        wide, high = picture.size
    assert wide > 3 * high, "the image and four heads beside each other"
    first = request.out.read_bytes()
    see_image(model, config, ImagesConfig(), request)
    assert request.out.read_bytes() == first


def test_colour_lies_on_the_patch_that_has_the_weight(photo, tmp_path):
    patches = model_of("mean")[1].input
    weights_1S = torch.zeros(1, 16)
    weights_1S[0, 7] = 0.5  # row 1, column 3
    head = HeadMap("encoder", "self", 0, 0, weights_1S, torch.ones(1, 16, dtype=torch.bool))
    request = ImageRequest(photo, out=tmp_path / "map.png")
    picture = render_image_maps(np.zeros((1, 16, 16), np.uint8), [[head]], patches, request)
    colours = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"), dtype=int)
    colours = colours[:, colours.shape[1] // 2 :]  # the map, beside the image
    red, blue = colours[..., 0], colours[..., 2]
    orange, grey = (red > 200) & (blue < 60), (abs(red - 127) < 2) & (abs(blue - 127) < 2)
    for axis, share in ((0, 0.375), (1, 0.875)):
        places = [np.flatnonzero(mask.sum(axis=1 - axis) > 30) for mask in (orange, orange | grey)]
        middle, first, last = places[0].mean(), places[1][0], places[1][-1]
        assert (middle - first) / (last - first) == pytest.approx(share, abs=0.02)


def test_a_rollout_is_the_product_of_layers_with_their_residual_connection(photo, tmp_path):
    generator = torch.Generator().manual_seed(1)
    allowed = torch.ones(3, 3, dtype=torch.bool)
    weights = [torch.rand(2, 3, 3, generator=generator).softmax(dim=-1) for _ in range(2)]
    maps = [AttentionMap("encoder", "self", layer, one, allowed) for layer, one in enumerate(weights)]
    first, second = (0.5 * one.mean(dim=0) + 0.5 * torch.eye(3) for one in weights)
    found = roll_out(maps).weights_TS
    torch.testing.assert_close(found, second @ first)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(3))
    model, config = model_of("class token")
    request = ImageRequest(photo, rollout=True, out=tmp_path / "map.svg")
    facts = see_image(model, config, ImagesConfig(), request)
    assert set(facts["rollout"]) == {"entropy_bits", "strongest_key"} and "heads" not in facts
    assert b"<!-- rollout: " in request.out.read_bytes()


def test_what_cannot_be_drawn_is_refused_by_name(photo, tmp_path):
    model, config = model_of("class token")
    plain = ImageRequest(photo)
    with pytest.raises(ConfigError, match="--layer 9: there are 2"):
        see_image(model, config, ImagesConfig(), replace(plain, layers="9"))
    with pytest.raises(ConfigError, match="--rollout is of all layers and heads; leave out --layer"):
        replace(plain, rollout=True, heads="1")
    with pytest.raises(ConfigError, match=r"no picture format is called '\.bmp'"):
        replace(plain, out=tmp_path / "map.bmp")
    for content, message in ((None, "No such file"), (b"text", "not an image in a format that is read")):
        path = tmp_path / "other.png"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            see_image(model, config, ImagesConfig(), ImageRequest(path))
