"""ViT, DeiT and MAE against transformers: logits, hidden states, pooler, loss, gradients; read, written, read again."""

import json

import pytest
import torch
import transformers
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

from pretrain.artifact.model_path import open_source
from pretrain.artifact.source import AdaptedModel
from pretrain.artifact.transfer import export_model, import_model
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.interop.release import open_release
from pretrain.interop.tensors import parameter_shapes
from pretrain.model import build_model
from pretrain.model.build import fill_weights
from pretrain.objective.loss import sum_token_loss
from pretrain.objective.masked_patches import sum_patch_loss
from pretrain.types import IGNORE_INDEX, Batch, StackRows
from tests.helpers.lent import check_gradients, lend
from tests.helpers.theirs import makers
from tests.parity.exchange import check_round_trip
from tests.unit.interop.releases import change_config

TINY = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 96, "image_size": 24,
    "patch_size": 8, "initializer_range": 0.1, "attn_implementation": "eager",
}  # fmt: skip
DECODER = {
    "decoder_hidden_size": 32, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 4,
    "decoder_intermediate_size": 64,
}  # fmt: skip
NAMES = {"id2label": dict(enumerate(["cat", "dog", "bird"]))}
# Logits and hidden states are of order 1: two orders of summation of fp32 differ by a few of its last bits.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def vit(**values):
    return transformers.ViTForImageClassification(transformers.ViTConfig(**TINY | NAMES | values))


def bare_vit(**values):
    return transformers.ViTModel(transformers.ViTConfig(**TINY), **values)


def deit(**values):
    return transformers.DeiTForImageClassification(transformers.DeiTConfig(**TINY | NAMES | values))


def mae(**values):
    """A masked autoencoder; the tables of positions are zeros in a new one of transformers 5, and not in releases."""
    model = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**TINY | DECODER | values))
    tables = (model.vit.embeddings.position_embeddings, model.decoder.decoder_pos_embed)
    with torch.no_grad():
        for table in tables:
            made = build_2d_sinusoidal_position_embedding(3, 3, table.shape[-1], cls_token=True)
            table[0] = torch.cat(made.chunk(2, dim=1)[::-1], dim=1)
    return model


MAKERS = {
    **makers("encoder", reads="patches"),
    "vit": vit,
    "vit-plain-queries": lambda: vit(qkv_bias=False, num_channels=1, hidden_act="gelu_pytorch_tanh"),
    "bare-vit": bare_vit,
    "bare-vit-no-pooler": lambda: bare_vit(add_pooling_layer=False),
    "deit": deit,
    "bare-deit": lambda: transformers.DeiTModel(transformers.DeiTConfig(**TINY)),
}
MAES = {
    "mae": mae,
    "mae-normalized": lambda: mae(norm_pix_loss=True),
    "mae-grey-half": lambda: mae(num_channels=1, mask_ratio=0.5, qkv_bias=False, decoder_hidden_size=48),
}


@pytest.fixture(params=MAKERS)
def lent(request, tmp_path):
    torch.manual_seed(0)
    return lend(MAKERS[request.param](), tmp_path / "theirs")


def batch_of(config, rows=4):
    """Images of noise as a processor would normalise them, with a label at the first position of each."""
    generator = torch.Generator().manual_seed(1)
    side = config.input.image
    pixels = torch.randn(rows, config.input.channels, side, side, generator=generator)
    zeros = torch.zeros(rows, config.input.positions, dtype=torch.int64)
    targets = torch.full_like(zeros, IGNORE_INDEX)
    targets[:, 0] = torch.randint(3, (rows,), generator=generator)
    return Batch(zeros, targets, pixels_BCYX=pixels)


def test_outputs_loss_and_gradients_agree(lent):
    theirs, ours, release = lent
    batch = batch_of(release.config)
    if ours.head is not None:
        expected = theirs(pixel_values=batch.pixels_BCYX, labels=batch.targets_BT[:, 0])
        torch.testing.assert_close(ours(batch).logits_BTV[:, 0], expected.logits, **TOLERANCE)
        found, loss = sum_token_loss(ours, batch).loss_sum / 4, expected.loss
    else:
        weights = torch.randn(48, generator=torch.Generator().manual_seed(3))
        hidden, expected = ours(batch).hidden_BTD, theirs(pixel_values=batch.pixels_BCYX)
        torch.testing.assert_close(hidden, expected.last_hidden_state, **TOLERANCE)
        found, loss = ((one @ weights).sigmoid().sum() for one in (hidden, expected.last_hidden_state))
        if ours.pooler is not None:
            torch.testing.assert_close(ours.pooler(hidden), expected.pooler_output, **TOLERANCE)
            found, loss = found + (ours.pooler(hidden) @ weights).sum(), loss + (expected.pooler_output @ weights).sum()
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
    found.backward()
    loss.backward()
    check_gradients(lent)


def test_an_export_is_the_model_that_it_came_from(lent, tmp_path):
    auto = transformers.AutoModel if lent.ours.head is None else transformers.AutoModelForImageClassification
    if lent.release.config.head.kind == "none" and not lent.release.config.pooler:
        pytest.skip("the class of transformers makes a pooler that is not in the files")
    check_round_trip(lent, auto, tmp_path / "ours", pixel_values=batch_of(lent.release.config).pixels_BCYX)


def hidden_batch(config, noise, rate):
    """Images of which the patches of the lowest noise are visible."""
    batch = batch_of(config, len(noise))
    kept = int(noise.shape[1] * (1 - rate))
    places = torch.cat((torch.zeros(len(noise), 1, dtype=torch.int64), 1 + noise.argsort()[:, :kept].sort()[0]), dim=1)
    targets = torch.zeros_like(batch.tokens_BT).scatter(1, places, IGNORE_INDEX)
    return Batch(
        batch.tokens_BT,
        targets,
        target_positions_P=torch.nonzero(targets.flatten() != IGNORE_INDEX)[:, 0],
        source=StackRows(torch.zeros_like(places), positions_BT=places),
        pixels_BCYX=batch.pixels_BCYX,
    )


@pytest.mark.parametrize("maker", MAES)
def test_a_masked_autoencoder_agrees_with_the_same_patches_hidden(tmp_path, maker):
    torch.manual_seed(0)
    lent = lend(MAES[maker](), tmp_path / "theirs")
    theirs, ours, release = lent
    noise = torch.rand(4, 9, generator=torch.Generator().manual_seed(2))
    batch = hidden_batch(release.config, noise, theirs.config.mask_ratio)
    expected = theirs(pixel_values=batch.pixels_BCYX, noise=noise)
    torch.testing.assert_close(ours(batch).logits_BTV[:, 1:], expected.logits, **TOLERANCE)
    output = sum_patch_loss(ours, batch, normalize=theirs.config.norm_pix_loss)
    found = output.loss_sum / batch.num_targets()
    torch.testing.assert_close(found, expected.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(output.nll_P.sum(), output.nll_sum)
    found.backward()
    expected.loss.backward()
    check_gradients(lent)
    # Both are of the objective here, and no part of the model: an export has the defaults.
    theirs.config.update({"mask_ratio": 0.75, "norm_pix_loss": False})
    auto = transformers.AutoModelForPreTraining
    check_round_trip(lent, auto, tmp_path / "ours", pixel_values=batch.pixels_BCYX, noise=noise)


def test_other_positions_than_those_of_a_mae_are_refused(tmp_path):
    model = mae()
    with torch.no_grad():
        model.decoder.decoder_pos_embed[0, 3, 5] += 0.1
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="decoder_pos_embed has other values than the fixed ones of vit_mae"):
        open_release(tmp_path)


def test_an_encoder_of_a_mae_without_its_decoder_is_refused(tmp_path):
    transformers.ViTMAEModel(transformers.ViTMAEConfig(**TINY)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="only a ViTMAEForPreTraining, which has its decoder too, is read"):
        open_release(tmp_path)


def test_an_imported_mae_is_exported_again(tmp_path):
    torch.manual_seed(0)
    lend(mae(), tmp_path / "theirs")
    import_model(str(tmp_path / "theirs"), tmp_path / "imported")
    report = export_model(tmp_path / "imported", tmp_path / "released")  # compares the scores
    assert report.architecture == "ViTMAEForPreTraining"
    card = (tmp_path / "released/README.md").read_text()
    assert "AutoModelForPreTraining" in card and "layers, width, heads: 3+2, 32, 4" in card


def test_normalisation_is_that_of_the_processor(tmp_path):
    torch.manual_seed(0)
    lend(vit(), tmp_path / "theirs")
    facts = {"do_normalize": True, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.2, 0.3]}
    (tmp_path / "theirs/preprocessor_config.json").write_text(json.dumps(facts))
    import_model(str(tmp_path / "theirs"), tmp_path / "imported")
    patches = open_source(tmp_path / "imported").config.input
    assert (patches.mean, patches.std) == (facts["image_mean"], facts["image_std"])
    export_model(tmp_path / "imported", tmp_path / "released")  # compares the scores
    written = json.loads((tmp_path / "released/preprocessor_config.json").read_text())
    assert facts.items() <= written.items() and written["size"] == {"height": 24, "width": 24}
    assert open_release(tmp_path / "released").config.input == patches
    card = (tmp_path / "released/README.md").read_text()
    assert "pipeline_tag: image-classification" in card and "image: 24 x 24 x 3" in card
    (tmp_path / "theirs/preprocessor_config.json").write_text(json.dumps(facts | {"image_mean": "grey"}))
    with pytest.raises(ConfigError, match=r"image_mean='grey': must be a number for each channel"):
        open_release(tmp_path / "theirs")


@pytest.mark.parametrize("side", [40, 16])
@pytest.mark.parametrize("maker", ["vit", "deit"])
def test_at_another_resolution_positions_are_those_that_transformers_interpolates(tmp_path, maker, side):
    torch.manual_seed(0)
    theirs, _, release = lend(MAKERS[maker](), tmp_path / "theirs")
    values = release.config.model_dump() | {"input": release.config.input.model_dump() | {"image": side}}
    config = ModelConfig.model_validate(values | {"max_seq_len": (side // 8) ** 2 + release.config.input.num_before})
    source = AdaptedModel(open_source(tmp_path / "theirs"), config, parameter_shapes(config))
    assert source.describe()[1].startswith("encoder.position.weight is resized from 1")
    ours = build_model(config, PLAIN_ENGINE, torch.device("cpu")).eval()
    fill_weights(ours, lambda name, shape: source.read(name))
    batch = batch_of(config)
    expected = theirs(pixel_values=batch.pixels_BCYX, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(ours(batch).logits_BTV[:, 0], expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pooler_act": "relu"}, r"pooler_act='relu': only 'tanh' can be represented"),
        ({"patch_size": 7}, r"image=24 must be a multiple of size=7"),
        ({"hidden_act": "gelu_10"}, r"hidden_act='gelu_10': not an activation of ours"),
        ({"num_channels": 4}, r"channels.* should be 1 or 3"),
    ],
)
def test_what_no_model_of_ours_has_is_refused(tmp_path, values, message):
    lend(vit(), tmp_path / "theirs")
    change_config(tmp_path / "theirs", **values)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        open_release(tmp_path / "theirs")


def test_a_teacher_is_refused(tmp_path):
    transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**TINY)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no model of ours has the second head of a DeiT with its teacher"):
        open_release(tmp_path)
