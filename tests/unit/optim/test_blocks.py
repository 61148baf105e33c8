"""Fused weights are taken apart where the model fuses them, and nowhere else."""

import pytest
import torch
from torch import nn

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.model import build_model
from pretrain.optim.groups import block_rows, group_parameters, split_hidden

SIZES = {"width": 12, "heads": 6, "kv_heads": 2, "head_width": 4, "ff_width": 10}
TWO_STACKS = {
    "preset": "llama-tiny",
    "vocab_size": 20,
    "vocab_multiple": 1,
    "max_seq_len": 8,
    "encoder": {**SIZES, "layers": 1},
    "decoder": {**SIZES, "layers": 1},
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    config = ModelConfig.model_validate(expand_preset(TWO_STACKS))
    return build_model(config, PLAIN_ENGINE, torch.device("meta"))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("encoder.blocks.0.attention.qkv.weight", (24, 8, 8)),
        ("decoder.blocks.0.cross.key_value.weight", (8, 8)),
        ("decoder.blocks.0.cross.query.weight", (24,)),
        ("decoder.blocks.0.feedforward.gate_up.weight", (10, 10)),
        ("decoder.blocks.0.feedforward.down.weight", (12,)),
        ("embedding.weight", (20,)),
        ("decoder.norm.weight", (12,)),
    ],
)
def test_each_matrix_of_a_fused_weight_is_a_block(model, name, rows):
    assert block_rows(model, name) == rows


@pytest.mark.parametrize(
    ("module", "rows"), [(nn.LSTM(3, 5), (5,) * 4), (nn.GRU(3, 5), (5,) * 3), (nn.RNN(3, 5), (5,))]
)
def test_the_gates_of_a_recurrent_layer_are_blocks(module, rows):
    assert block_rows(nn.ModuleDict({"cell": module}), "cell.weight_hh_l0") == rows
    assert block_rows(module, "weight_ih_l0") == rows
    assert block_rows(module, "bias_ih_l0") == rows


def test_the_gates_of_a_cell_are_blocks():
    assert block_rows(nn.LSTMCell(3, 5), "weight_hh") == (5,) * 4
    assert block_rows(nn.GRUCell(3, 5), "weight_ih") == (5,) * 3


def test_the_blocks_of_a_group_are_its_parameters_one_below_the_other(model):
    for group in group_parameters(model):
        for parameter, blocks in zip(group.parameters, group.blocks, strict=True):
            assert sum(block[0] for block in blocks) == parameter.shape[0]
            assert {block[1:] for block in blocks} == {tuple(parameter.shape[1:])}


@pytest.mark.parametrize("values", [{}, {"experts": {"count": 3, "top_k": 2, "width": 6}}])
def test_a_bias_is_cut_as_its_matrix_is(values):
    one_stack = {key: value for key, value in TWO_STACKS.items() if key != "encoder"}
    config = one_stack | {"decoder": {**SIZES, "layers": 1, "bias": True, **values}}
    model = build_model(ModelConfig.model_validate(expand_preset(config)), PLAIN_ENGINE, torch.device("meta"))
    biases = [name for name, _ in model.named_parameters() if name.endswith(".bias")]
    assert len(biases) >= 4
    for name in biases:
        assert block_rows(model, name) == block_rows(model, name.removesuffix("bias") + "weight"), name
    assert block_rows(model, "decoder.blocks.0.attention.qkv.bias", split_heads=True) == (24, 8, 8)


def test_each_matrix_of_each_expert_is_a_block_and_the_router_none_of_muon():
    experts = {"count": 3, "top_k": 2, "width": 6, "shared": 1}
    values = {k: v for k, v in TWO_STACKS.items() if k != "encoder"} | {"decoder": {**SIZES, "layers": 1}}
    values["decoder"] |= {"experts": experts}
    mixture = build_model(ModelConfig.model_validate(expand_preset(values)), PLAIN_ENGINE, torch.device("meta"))
    (decaying, _) = group_parameters(mixture)
    shapes = dict(zip(decaying.names, decaying.blocks, strict=True))
    layer = "decoder.blocks.0.feedforward"
    assert shapes[f"{layer}.gate_up.weight"] == ((6, 12),) * 6  # gate and up of each expert
    assert shapes[f"{layer}.down.weight"] == ((12, 6),) * 3
    assert shapes[f"{layer}.shared.gate_up.weight"] == ((6, 12),) * 2
    hidden, rest = split_hidden(decaying)
    assert f"{layer}.gate_up.weight" in hidden.names
    assert f"{layer}.router.weight" in rest.names
