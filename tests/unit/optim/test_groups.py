"""Decay groups on a toy model, and the partition property on any model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig, StackConfig
from pretrain.config.optim import OptimConfig
from pretrain.model import build_model
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters, split_hidden
from tests.unit.model.tiny import tiny_config


class Toy(nn.Module):
    """An embedding, a block with a norm, and a head that may share the embedding's weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        # The head is registered first, so that the shared weight's first name is not the embedding's.
        self.head = nn.Linear(8, 16, bias=False)
        self.tokens = nn.Embedding(16, 8)
        self.positions = nn.Embedding(4, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.gain = nn.RMSNorm(8)
        if tied:
            self.tokens.weight = self.head.weight


def names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    return {group.name: group.names for group in group_parameters(model)}


def test_matrices_decay_and_norms_biases_embeddings_do_not():
    assert names(Toy(tied=False)) == {
        "decay": ("head.weight", "qkv.weight"),
        "no_decay": ("tokens.weight", "positions.weight", "norm.weight", "norm.bias", "qkv.bias", "gain.weight"),
    }


def test_a_tied_head_is_an_embedding_and_counts_once():
    assert names(Toy(tied=True)) == {
        "decay": ("qkv.weight",),
        "no_decay": ("head.weight", "positions.weight", "norm.weight", "norm.bias", "qkv.bias", "gain.weight"),
    }


def test_a_table_of_learned_positions_is_an_embedding_by_its_name():
    model = nn.ModuleDict({"position": nn.Module(), "composition": nn.Linear(2, 2, bias=False)})
    model["position"].weight = nn.Parameter(torch.zeros(4, 8))
    assert names(model) == {"decay": ("composition.weight",), "no_decay": ("position.weight",)}


@pytest.mark.parametrize("tied", [False, True])
def test_the_real_model_decays_its_projections_only(tied):
    stack = StackConfig(layers=1, width=8, heads=2, ff_width=16, norm="layer", bias=True, position="learned")
    config = ModelConfig(decoder=stack, vocab_size=100, max_seq_len=16, tied_embeddings=tied)
    model = build_model(config, PLAIN_ENGINE, torch.device("meta"))
    block = "decoder.blocks.0"
    projections = ["attention.qkv", "attention.output", "feedforward.gate_up", "feedforward.down"]
    head = [] if tied else ["head.weight"]
    assert list(names(model)["decay"]) == [f"{block}.{name}.weight" for name in projections] + head
    assert {"embedding.weight", "decoder.position.weight"} <= set(names(model)["no_decay"])


MATRICES = {
    # Queries, keys, values and gates of 2 and 4 heads; decays and strengths.
    "qwen3_next-tiny": {"qkv_gate": (12, 12, 40, 40), "rates": (4, 4), "output": (64,)},
    # Gates, values, keys, queries and steps.
    "bamba-tiny": {"input": (192, 192, 24, 24, 6), "output": (96,)},
    "lfm2-tiny": {"input": (64, 64, 64), "output": (64,)},
}


@pytest.mark.parametrize("preset", MATRICES)
def test_matrices_of_a_mixer_are_stepped_one_by_one_and_the_rest_of_it_does_not_decay(preset):
    model = build_model(tiny_config(preset), PLAIN_ENGINE, torch.device("cpu"))
    groups = group_parameters(model)
    matrices, _ = split_hidden(groups[0])
    hidden = dict(zip(matrices.names, matrices.blocks, strict=True))
    place = "decoder.blocks.0.attention."
    found = {name: blocks for name, blocks in hidden.items() if name.startswith(place)}
    rows = {name.split(".")[-2]: tuple(block[0] for block in blocks) for name, blocks in found.items()}
    assert rows == MATRICES[preset]
    others = {name for name, _ in model.named_parameters() if name.startswith(place)} - found.keys()
    assert others <= set(groups[1].names)
    assert {name.removeprefix(place) for name in others} >= {"convolution.weight"}


def test_a_gate_of_queries_is_a_matrix_and_one_of_shared_experts_is_a_score():
    groups = group_parameters(build_model(tiny_config("qwen3_next-tiny"), PLAIN_ENGINE, torch.device("cpu")))
    hidden, rest = split_hidden(groups[0])
    blocks = dict(zip(hidden.names, hidden.blocks, strict=True))
    assert [block[0] for block in blocks["decoder.blocks.3.attention.qkv.weight"]] == [96, 48, 48, 96]
    assert "decoder.blocks.0.feedforward.shared_gate.weight" in rest.names


def test_frozen_parameters_are_in_no_group():
    model = Toy(tied=False)
    model.qkv.requires_grad_(False)
    assert names(model)["decay"] == ("head.weight",)
    assert "qkv.bias" not in names(model)["no_decay"]


def test_a_group_without_members_is_left_out():
    assert [group.name for group in group_parameters(nn.Linear(2, 2, bias=False))] == ["decay"]
    assert [group.name for group in group_parameters(nn.LayerNorm(2))] == ["no_decay"]
    assert group_parameters(nn.ReLU()) == []


LAYERS = [
    lambda: nn.Linear(3, 5),
    lambda: nn.Linear(3, 5, bias=False),
    lambda: nn.Embedding(7, 3),
    lambda: nn.LayerNorm(3),
    lambda: nn.Conv1d(2, 2, 3),
    lambda: nn.ParameterList([torch.zeros(2)]),
]


@given(st.lists(st.sampled_from(LAYERS), max_size=8))
def test_every_parameter_is_in_exactly_one_group_in_registration_order(makers):
    model = nn.Sequential(*(make() for make in makers))
    groups = group_parameters(model)
    order = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    flat = [name for group in groups for name in group.names]
    assert sorted(flat) == sorted(order)
    for group in groups:
        assert [order[name] for name in group.names] == sorted(order[name] for name in group.names)
        assert all(model.get_parameter(name) is p for name, p in zip(group.names, group.parameters, strict=True))
        assert group.decays == (group.name == "decay")


def test_under_layer_decay_each_block_is_slower_than_the_one_above_it():
    config = ModelConfig(
        encoder=StackConfig(layers=2, width=8, heads=2, ff_width=12),
        decoder=StackConfig(layers=1, width=8, heads=2, ff_width=12),
        vocab_size=5,
        max_seq_len=8,
    )
    model = build_model(config, PLAIN_ENGINE, torch.device("meta"))
    groups = group_parameters(model, layer_decay=0.5)
    ratio = {name: group.lr_ratio for group in groups for name in group.names}
    assert ratio["embedding.weight"] == 0.5**4
    assert ratio["encoder.blocks.0.attention.qkv.weight"] == 0.5**3
    assert ratio["encoder.blocks.1.attention_norm.weight"] == 0.5**2
    assert ratio["encoder.norm.weight"] == ratio["decoder.blocks.0.cross.query.weight"] == 0.5
    assert ratio["decoder.blocks.0.feedforward.down.weight"] == 0.5
    assert ratio["decoder.norm.weight"] == ratio["head.weight"] == 1.0
    assert ratio.keys() == {name for name, _ in model.named_parameters()}
    optimizer = build_optimizer(groups, OptimConfig(lr=1.0), torch.device("cpu"))
    assert {group["name"]: group["lr_ratio"] for group in optimizer.param_groups}["decay.1"] == 0.5**3
    for kind, name, own in (("muon", "matrix.1", 0.02), ("adafactor", "decay.1", 1.0)):
        optimizer = build_optimizer(groups, OptimConfig(kind=kind, lr=1.0), torch.device("cpu"))
        ratios = {group["name"]: group["lr_ratio"] for group in optimizer.param_groups}
        assert (ratios[name], ratios["no_decay.1"]) == (own * 0.5**3, 0.5**3), kind
    assert {group.lr_ratio for group in group_parameters(model)} == {1.0}
