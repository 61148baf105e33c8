"""What images need of a model and a run, checked when the config loads."""

import re

import pytest

from pretrain.config.load import load_config
from pretrain.errors import ConfigError

CONFIG = """
run: {{dir: runs, name: images}}
data: {{path: data{data}}}
model: {{preset: {preset}{model}}}
objective: {{kind: {kind}}}
batch: {{global_tokens: 136, seq_len: {seq_len}, micro: 2}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 2}}}}
train: {{steps: 10}}
"""


def load(tmp_path, kind="images", model="", data="", seq_len=17, preset="vit-tiny"):
    (tmp_path / "a.yaml").write_text(CONFIG.format(kind=kind, model=model, data=data, seq_len=seq_len, preset=preset))
    return load_config(tmp_path / "a.yaml")


def test_what_fits_is_taken(tmp_path):
    config = load(tmp_path)
    assert config.model.max_seq_len == 17
    assert config.lengths.image == (3, 16)
    assert load(tmp_path, model=", input: {image: 8, size: 2, registers: 0}").lengths.image == (3, 8)
    assert load(tmp_path, data=", images: {crop: random_resized, scale: [0.2, 1]}").data.images.scale == [0.2, 1.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seq_len": 34}, "batch.seq_len=34 must be 17, the positions of an image (16 patches and a class token)"),
        ({"model": ", max_seq_len: 64"}, "max_seq_len=64 must be 17, the positions of an image (16 patches and a cla"),
        ({"model": ", input: {size: 5}"}, "image=16 must be a multiple of size=5, the side of a patch"),
        ({"model": ", input: {mean: [0.1, 0.2]}"}, "mean has 2 values; give one, or one for each of channels=3"),
        ({"model": ", input: {std: [0]}"}, "std=[0.0] must be positive"),
        ({"model": ", vocab_size: 100"}, "vocab_size is of token ids, which input.kind=patches replaces; leave it out"),
        ({"model": ", ngram_embeddings: 2"}, "ngram_embeddings is of token ids, which input.kind"),
        ({"model": ", encoder: {token_types: 2}"}, "encoder.token_types is of token ids, which input.kind=patches"),
        (
            {"model": ", head: {kind: lm}"},
            "input.kind=patches with head.kind=lm needs an encoder and a decoder; for an encoder alone",
        ),
        (
            {"model": ", input: {class_token: false}", "seq_len": 17},
            "input.class_token=false leaves nothing that stands for the image; set head.mean=true",
        ),
        ({"model": ", encoder: {position: sinusoidal_2d, width: 6, heads: 1}"}, "sinusoidal_2d needs a width that 4"),
        ({"model": ", encoder: {position: rotary_2d, head_width: 6}"}, "rotary_2d positions need a head width that 4"),
        (
            {"model": ", encoder: {position: rotary_2d, rope_fraction: 0.375}"},
            "rope_fraction=0.375 rotates 6 of 16 dimensions of a head; choose one that gives a multiple of 4",
        ),
        (
            {"model": ", encoder: {position: rotary_2d, rope_local_theta: 9}"},
            "rope_local_theta goes with position=rotary, not rotary_2d; leave it out",
        ),
        ({"model": ", encoder: {layers: 1, drop_path: 0.1}"}, "drop_path=0.1 needs 2 layers or more"),
        ({"kind": "classify"}, "objective.kind=classify needs a model that reads tokens, this one reads patches; use"),
        ({"data": ", packing: padded"}, "data.packing=padded is of text; images are one a row, leave it out"),
        (
            {"data": ", images: {resize: 15}"},
            "data.images.resize=15 is smaller than the crop, model.input.image=16; use 16 or more",
        ),
        ({"data": ", images: {padding: 2}"}, "padding=2 goes with crop=random, not center; leave it out"),
        ({"data": ", images: {scale: [0.5, 1]}"}, "scale goes with crop=random_resized, not center; leave it out"),
        (
            {"data": ", images: {crop: random_resized, scale: [0.5, 1.5]}"},
            "scale=[0.5, 1.5] must be two ascending numbers above 0, at most 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(tmp_path, values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, **values)


def test_a_masked_autoencoder_reads_a_quarter_of_an_image(tmp_path):
    config = load(tmp_path, "masked_patches", preset="vit_mae-tiny")
    assert (config.lengths.target, config.lengths.source, config.lengths.before) == (17, 5, 1)
    assert config.objective.head_share == 0.75


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": ", decoder: null"}, "head.kind=pixels needs an encoder and a decoder"),
        ({"model": ", head: {kind: none}"}, "head.kind=none needs an encoder alone; set decoder to null"),
        ({"model": ", encoder: {position: relative}"}, "use another encoder.position, and no window"),
        ({"model": ", decoder: {width: 6, heads: 1}"}, "position=sinusoidal_2d needs a width that 4 divides, not 6"),
        ({"model": ", decoder: {token_types: 2}"}, "decoder.token_types is of token ids, which input.kind=patches"),
        ({"model": ", input: null"}, "head.kind=pixels is of patches; set model.input, or another head"),
        (
            {"kind": "images"},
            "objective.kind=images needs a model with encoder, model.preset=vit_mae-tiny has encoder+",
        ),
    ],
)
def test_a_masked_autoencoder_that_does_not_fit_is_refused_with_the_reason(tmp_path, values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, **{"kind": "masked_patches", "preset": "vit_mae-tiny"} | values)


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_labels_are_mixed_where_there_are_some(tmp_path, name):
    mixed = f", images: {{{name}: 0.5}}"
    assert getattr(load(tmp_path, data=mixed).data.images, name) == 0.5
    message = f"data.images.{name} mixes labels, which objective.kind=masked_patches does not have; leave it out"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, "masked_patches", preset="vit_mae-tiny", data=mixed)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (
            "bert-tiny, tied_embeddings: false, head: {kind: labels}",
            "",
            "needs a model that reads patches, this one re",
        ),
        (
            "bert-tiny, tied_embeddings: false, encoder: {position: sinusoidal_2d}",
            "",
            "encoder.position=sinusoidal_2d is of patches; set model.input, or use sinusoidal",
        ),
        (
            "llama-tiny, decoder: {position: rotary_2d}",
            "",
            "decoder.position=rotary_2d is of patches; set model.input, or use rotary",
        ),
        ("llama-tiny, decoder: {class_token: true}", "", "did you mean 'model.input.class_token'?"),
        ("llama-tiny, registers: 2", "", "did you mean 'model.input.registers'?"),
    ],
)
def test_a_model_of_text_reads_no_images(tmp_path, model, data, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, preset=model, data=data)


def test_settings_of_images_need_images(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.images is of images, which a model without model\.input"):
        load(tmp_path, "causal", preset="llama-tiny", data=", images: {flip: 0.5}")
