"""Captions of images against VisionEncoderDecoderModel: logits, loss, gradients, greedy texts, round trips."""

import pytest
import torch
import transformers

from pretrain.artifact.transfer import export_model, import_model
from pretrain.errors import CheckpointError, ConfigError
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import GREEDY, generate
from pretrain.interop.release import open_release
from pretrain.objective.loss import sum_token_loss
from pretrain.types import IGNORE_INDEX, Batch
from tests.helpers.lent import check_gradients, lend
from tests.parity.exchange import check_round_trip
from tests.unit.interop.releases import change_config

ENCODER = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 96, "image_size": 24,
    "patch_size": 8, "initializer_range": 0.1,
}  # fmt: skip
DECODER = {
    "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 20, "vocab_size": 70, "bos_token_id": 1, "eos_token_id": 1,
    "initializer_range": 0.1, "add_cross_attention": True, "is_decoder": True,
}  # fmt: skip
# Logits are of order 1: two orders of summation of fp32 differ by a few of its last bits.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
POOLER = frozenset({"encoder.pooler.dense.weight", "encoder.pooler.dense.bias"})


def captioner(kind="vit", encoder=None, **decoder):
    configs = {"vit": transformers.ViTConfig, "deit": transformers.DeiTConfig}
    both = (configs[kind](**ENCODER | (encoder or {})), transformers.GPT2Config(**DECODER | decoder))
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*both)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = transformers.VisionEncoderDecoderModel(config)
    model.set_attn_implementation("eager")  # it ignores that of its parts
    return model


MAKERS = {
    "equal-widths": captioner,
    "bridge": lambda: captioner(n_embd=32),
    "untied": lambda: captioner(tie_word_embeddings=False),
    "deit-grey": lambda: captioner("deit", {"num_channels": 1, "qkv_bias": False}, n_inner=80),
}


@pytest.fixture(scope="module", params=MAKERS)
def made(request, tmp_path_factory):
    torch.manual_seed(0)
    return lend(MAKERS[request.param](), tmp_path_factory.mktemp("theirs"))


def batch_of(config, rows=3, length=9):
    """Images of noise as a processor would normalise them, and captions that begin with the start token."""
    generator = torch.Generator().manual_seed(1)
    side = config.input.image
    pixels = torch.randn(rows, config.input.channels, side, side, generator=generator)
    labels = torch.randint(2, config.vocab_size, (rows, length), generator=generator)
    inputs = torch.cat((torch.ones(rows, 1, dtype=torch.int64), labels[:, :-1]), dim=1)
    labels[0, 6:] = IGNORE_INDEX  # a shorter caption
    return Batch(inputs, labels, pixels_BCYX=pixels)


def test_logits_loss_and_gradients_agree(lent):
    theirs, ours, release = lent
    batch = batch_of(release.config)
    expected = theirs(pixel_values=batch.pixels_BCYX, labels=batch.targets_BT)
    logits = theirs(pixel_values=batch.pixels_BCYX, decoder_input_ids=batch.tokens_BT).logits
    torch.testing.assert_close(ours(batch).logits_BTV[..., : logits.shape[-1]], logits, **TOLERANCE)
    found = sum_token_loss(ours, batch).loss_sum / batch.num_targets()
    torch.testing.assert_close(found, expected.loss, rtol=1e-5, atol=0)
    found.backward()
    expected.loss.backward()
    check_gradients(lent)


def test_greedy_captions_are_those_of_transformers(lent):
    theirs, ours, release = lent
    batch = batch_of(release.config)
    expected = theirs.generate(batch.pixels_BCYX, max_new_tokens=10, do_sample=False, num_beams=1)
    found = generate(ours, list(batch.pixels_BCYX), Constraints(10, eos_ids=(1,)), GREEDY)
    for one, row in zip(found, expected.tolist(), strict=True):
        assert row[1 : 1 + len(one.tokens)] == one.tokens and len(one.tokens) > 0


def test_an_export_is_the_model_that_it_came_from(lent, tmp_path):
    batch = batch_of(lent.release.config)
    inputs = {"pixel_values": batch.pixels_BCYX, "decoder_input_ids": batch.tokens_BT}
    assert set(lent.release.ignored) == POOLER  # which nothing reads
    check_round_trip(lent, transformers.VisionEncoderDecoderModel, tmp_path / "ours", POOLER, **inputs)


def test_an_imported_captioner_is_exported_again(tmp_path):
    torch.manual_seed(0)
    lend(captioner(n_embd=32), tmp_path / "theirs")
    import_model(str(tmp_path / "theirs"), tmp_path / "imported")
    report = export_model(tmp_path / "imported", tmp_path / "released")  # compares the scores
    assert report.architecture == "VisionEncoderDecoderModel"
    card = (tmp_path / "released/README.md").read_text()
    assert "pipeline_tag: image-to-text" in card and "layers, width, heads: 2+2, 32, 4" in card


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("encoder", {"model_type": "beit"}, r"encoder\.model_type='beit': only vit or deit can be represented"),
        ("decoder", {"model_type": "trocr"}, r"decoder\.model_type='trocr': only gpt2 can be represented"),
        ("decoder", {"add_cross_attention": False}, r"add_cross_attention=False: only True can be represented"),
        ("decoder", {"cross_attention_hidden_size": 48}, r"cross_attention_hidden_size=48: only None"),
        ("decoder", {"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx=True"),
        ("encoder", {"hidden_act": "mish"}, r"hidden_act='mish': not an activation of ours"),
    ],
)
def test_what_no_model_of_ours_has_is_refused_by_its_key(tmp_path, part, values, message):
    theirs, _, _ = lend(captioner(), tmp_path / "theirs")
    changed = getattr(theirs.config, part).to_dict() | values
    change_config(tmp_path / "theirs", **{part: changed})
    with pytest.raises((ConfigError, CheckpointError), match=message):
        open_release(tmp_path / "theirs")
