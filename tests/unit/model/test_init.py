"""Initial weights as a function of (seed, name), and their deviations by kind."""

import math

import pytest
import torch
import transformers as hf

from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.presets import expand_preset
from pretrain.model.build import init_weights, initial_weight
from pretrain.objective.loss import sum_token_loss
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters
from tests.unit.model.tiny import CPU, build, random_batch, tiny_config

# The standard error of a deviation from n draws is 1 / sqrt(2 n): 0.2% for 400 x 400, and 1% at most below.
CLOSE = 0.05


def preset(name, **keys):
    """A preset with keys of the model section laid over it."""
    return ModelConfig.model_validate(expand_preset({"preset": name, "vocab_size": 4096, **keys}))


def drawn(config, name, *shape):
    return initial_weight(name, torch.Size(shape), config, 0)


@pytest.mark.parametrize("name", ["gpt2-tiny", "transformer-tiny", "t5-v1.1-tiny", "modernbert-tiny"])
def test_weights_do_not_depend_on_the_order_in_which_they_are_drawn(name):
    config = preset(name)
    model = build(config, seed=7, scale=1.0)
    torch.manual_seed(99)
    for parameter_name, parameter in reversed(list(model.named_parameters())):
        assert torch.equal(parameter, initial_weight(parameter_name, parameter.shape, config, 7)), parameter_name


@pytest.mark.parametrize("init", ["normal", "xavier", "t5"])
def test_seeds_and_names_give_different_weights(init):
    config, shape = tiny_config(model={"init": init}), torch.Size((64, 64))
    first = initial_weight("a.weight", shape, config, 1)
    assert torch.equal(first, initial_weight("a.weight", shape, config, 1))
    assert not torch.equal(first, initial_weight("a.weight", shape, config, 2))
    assert not torch.equal(first, initial_weight("b.weight", shape, config, 1))


@pytest.mark.parametrize(
    ("init", "name", "shape", "values"),
    [
        ("normal", "embedding.weight", (3, 8), [0.051432766, -0.003130943, 0.001589551]),
        ("xavier", "decoder.blocks.0.attention.qkv.weight", (128, 64), [0.005986168, 0.201928794, -0.068834789]),
        ("t5", "decoder.blocks.0.attention.qkv.weight", (128, 64), [0.066078439, -0.295039147, -0.096021682]),
    ],
)
def test_a_weight_never_changes_between_releases(init, name, shape, values):
    weight = initial_weight(name, torch.Size(shape), tiny_config(model={"init": init}), 1234)
    # Not to the last bit: torch's normal draws differ by a rounding between CPU types.
    assert weight[0, :3].tolist() == pytest.approx(values, abs=1e-8)


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("embedding.weight", 0.02),
        ("decoder.blocks.0.attention.qkv.weight", 0.02),
        ("decoder.blocks.0.attention.output.weight", 0.01),
        ("decoder.blocks.1.feedforward.down.weight", 0.01),
    ],
)
def test_residual_projections_start_smaller_by_the_root_of_twice_the_depth(name, std):
    weight = drawn(tiny_config(), name, 400, 400)
    assert weight.std().item() == pytest.approx(std, rel=0.01)
    assert abs(weight.mean().item()) < 0.01 * std * 2


@pytest.mark.parametrize(
    ("name", "branches"),
    [
        ("encoder.blocks.0.attention.output.weight", 2 * 4),
        ("encoder.blocks.0.feedforward.down.weight", 2 * 4),
        ("decoder.blocks.0.attention.output.weight", 3 * 2),
        ("decoder.blocks.1.cross.output.weight", 3 * 2),
        ("decoder.blocks.1.feedforward.down.weight", 3 * 2),
        ("decoder.blocks.1.cross.key_value.weight", 1),
    ],
)
def test_a_decoder_that_reads_an_encoder_has_three_branches_a_block(name, branches):
    config = preset("t5-tiny", init="normal", encoder={"layers": 4})
    assert drawn(config, name, 400, 400).std().item() == pytest.approx(0.02 / math.sqrt(branches), rel=0.01)


def test_unscaled_initialisation_is_one_deviation_for_all():
    config = tiny_config(model={"init_scaled": False, "init_std": 0.1})
    weight = drawn(config, "decoder.blocks.0.attention.output.weight", 400, 400)
    assert weight.std().item() == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("init", ["normal", "xavier", "t5"])
def test_zero_outputs_are_those_of_residual_branches_and_of_an_untied_head(init):
    values = {"init": init, "tied_embeddings": False, "encoder": {"layers": 2}}
    config, plain = (preset("t5-tiny", init_output=output, **values) for output in ("zero", "drawn"))
    zeros = set()
    for name, parameter in build(config).named_parameters():
        weight = initial_weight(name, parameter.shape, config, 0)
        if weight.any():
            assert torch.equal(weight, initial_weight(name, parameter.shape, plain, 0)), name
        else:
            zeros.add(name)
    outputs = {f"{stack}.blocks.{i}.{part}.weight" for stack in ("encoder", "decoder") for i in (0, 1)
               for part in ("attention.output", "feedforward.down")}  # fmt: skip
    assert zeros == outputs | {f"decoder.blocks.{i}.cross.output.weight" for i in (0, 1)} | {"head.weight"}


def test_every_weight_of_a_model_that_starts_with_zero_outputs_is_trained():
    config = tiny_config(model={"init_output": "zero"})
    model, batch = build(config, scale=1.0), random_batch(4, 16)
    optimizer = build_optimizer(group_parameters(model), OptimConfig(lr=1e-3), CPU)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses = []
    # A gradient reaches the head first, then the ends of the branches, then all.
    for _ in range(4):
        loss = sum_token_loss(model, batch).loss_sum / batch.num_targets()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(math.log(61), rel=1e-6), "all scores are 0 at first"
    assert losses == sorted(losses, reverse=True)
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, start[name]), name


def test_xavier_of_fused_matrices_is_that_of_their_parts():
    """Widths of 128 and 256 in, 4 heads of 32 and 2 of them for keys and values; gate and up are F = 256 each."""
    config = preset("transformer-tiny", decoder={"kv_heads": 2, "gated": True})
    qkv = drawn(config, "decoder.blocks.0.attention.qkv.weight", 128 + 2 * 64, 128)
    key_value = drawn(config, "decoder.blocks.0.cross.key_value.weight", 2 * 64, 128)
    gate_up = drawn(config, "decoder.blocks.0.feedforward.gate_up.weight", 2 * 256, 128)
    parts = [*qkv.split([128, 64, 64]), *key_value.split(64), *gate_up.split(256)]
    for part in [*parts, drawn(config, "encoder.blocks.0.feedforward.down.weight", 128, 256)]:
        bound = math.sqrt(6 / sum(part.shape))
        # The largest of 8192 uniform draws is within 0.5% of the bound, all but once in 10^17.
        assert 0.995 * bound < part.abs().max() <= bound
        assert part.std().item() == pytest.approx(bound / math.sqrt(3), rel=CLOSE)


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight", "decoder.position.weight"])
def test_xavier_tables_have_unit_vectors(name):
    """Times sqrt(D), as the model scales them, they have deviation 1 (Vaswani et al. 2017, 3.4)."""
    rows = drawn(preset("transformer-base"), name, 400, 512)
    assert rows.std().item() == pytest.approx(512**-0.5, rel=0.01)
    assert rows.norm(dim=1).mean().item() == pytest.approx(1, rel=0.01)


def hugging_face_t5(config):
    """Deviations of Hugging Face's T5 of the same sizes, by our names."""
    torch.manual_seed(0)
    stack = config.decoder
    theirs = hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=config.vocab_size, d_model=stack.width, d_kv=stack.head_width, d_ff=stack.ff_width,
            num_layers=1, num_heads=stack.heads, feed_forward_proj="gated-gelu",
        )
    )  # fmt: skip
    layer = theirs.decoder.block[0].layer
    own, cross, feedforward = layer[0].SelfAttention, layer[1].EncDecAttention, layer[2].DenseReluDense
    return {
        "embedding.weight": [theirs.shared],
        "decoder.position.weight": [own.relative_attention_bias],
        "decoder.blocks.0.attention.qkv.weight": [own.q, own.k, own.v],
        "decoder.blocks.0.attention.output.weight": [own.o],
        "decoder.blocks.0.cross.query.weight": [cross.q],
        "decoder.blocks.0.cross.key_value.weight": [cross.k, cross.v],
        "decoder.blocks.0.cross.output.weight": [cross.o],
        "decoder.blocks.0.feedforward.gate_up.weight": [feedforward.wi_0, feedforward.wi_1],
        "decoder.blocks.0.feedforward.down.weight": [feedforward.wo],
    }


def test_t5_starts_as_hugging_faces_does():
    config = preset(
        "t5-v1.1-small",
        encoder={"layers": 1},
        decoder={"layers": 1, "relative_buckets": 256, "relative_max_distance": 512},
    )
    weights = dict(build(config, scale=1.0).named_parameters())
    for name, modules in hugging_face_t5(config).items():
        for part, module in zip(weights[name].chunk(len(modules)), modules, strict=True):
            # Their table has an eighth of the rows of ours, 32 x 6 draws: a standard error of 5%.
            tolerance = 0.2 if "position" in name else CLOSE
            assert part.std().item() == pytest.approx(module.weight.std().item(), rel=tolerance), name
            assert abs(part.mean().item()) < tolerance * part.std().item(), name
    assert weights["head.weight"].std().item() == pytest.approx(512**-0.5, rel=CLOSE)


def test_t5_queries_are_smaller_only_where_attention_is_not_scaled():
    config = preset("t5-tiny", decoder={"scaled_attention": True})
    rows = config.encoder.heads * config.encoder.head_width
    for stack, std in (("encoder", (64 * 24) ** -0.5), ("decoder", 64**-0.5)):
        query = drawn(config, f"{stack}.blocks.0.attention.qkv.weight", 3 * rows, 64)[:rows]
        assert query.std().item() == pytest.approx(std, rel=CLOSE)


def test_t5_vectors_that_are_added_to_the_input_are_as_large_as_the_embedding():
    config = preset("t5-tiny", encoder={"position": "learned", "token_types": 2})
    for name in ("embedding.weight", "encoder.position.weight", "encoder.token_type.weight"):
        assert drawn(config, name, 400, 64).std().item() == pytest.approx(1, rel=CLOSE)


@pytest.mark.parametrize(
    "name",
    ["gpt2-tiny", "qwen3-tiny", "gemma3-tiny", "bert-tiny", "modernbert-tiny", "marian-tiny", "t5-tiny"],
)
def test_biases_start_at_zero_and_norms_at_one(name):
    config = preset(name)
    gain = 0 if config.last_stack.norm_offset else 1  # beside the one that is added to it
    model = build(config)
    init_weights(model, config, 0)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            assert not parameter.any(), parameter_name
        elif parameter.ndim == 1:
            assert (parameter == gain).all(), parameter_name
        else:
            assert parameter.std() > 0, parameter_name
