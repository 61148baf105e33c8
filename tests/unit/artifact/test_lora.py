"""Adapters beside the layers of a model, and which parameters are trained."""

from types import SimpleNamespace

import pytest
import torch

from pretrain.artifact.lora import add_adapters, freeze, initial_adapter, train_beside
from pretrain.artifact.source import A_SUFFIX, B_SUFFIX, MergedModel, is_adapter, name_without_adapter
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.finetune import FinetuneConfig
from pretrain.config.model import ModelConfig, StackConfig
from pretrain.errors import ConfigError
from pretrain.model import build_model, init_weights
from pretrain.types import Batch

CPU = torch.device("cpu")
STACK = StackConfig(layers=2, width=16, heads=4, kv_heads=2, ff_width=24)
CONFIG = ModelConfig(decoder=STACK, vocab_size=11, vocab_multiple=4, max_seq_len=16)
LORA = FinetuneConfig(kind="lora", rank=3, alpha=6)
TOKENS = torch.arange(10).view(2, 5)


def built():
    model = build_model(CONFIG, PLAIN_ENGINE, CPU)
    init_weights(model, CONFIG, seed=1)
    return model.eval()


def with_adapters(config=LORA):
    """A model with adapters as they are drawn, and the layers that have them."""
    model = built()
    layers = add_adapters(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(initial_adapter(name, parameter.shape, seed=1))
    return model.eval(), layers


def logits(model):
    with torch.no_grad():
        return model(Batch(TOKENS, TOKENS)).logits_BTV


def test_adapters_change_nothing_at_first_and_are_all_that_is_trained():
    model, layers = with_adapters()
    assert len(layers) == 2 * 4
    assert torch.equal(logits(model), logits(built()))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {layer + suffix for layer in layers for suffix in (A_SUFFIX, B_SUFFIX)}
    own = {name_without_adapter(name) for name, _ in model.named_parameters() if not is_adapter(name)}
    assert own == {name for name, _ in built().named_parameters()}


def test_adapters_are_a_function_of_seed_and_name():
    (first, _), (second, _) = with_adapters(), with_adapters()
    drawn = {name: p for name, p in first.named_parameters() if name.endswith(A_SUFFIX)}
    assert all(torch.equal(p, second.get_parameter(name)) for name, p in drawn.items())
    assert len({float(p.detach().flatten()[0]) for p in drawn.values()}) == len(drawn)
    name = "decoder.blocks.0.attention.qkv" + A_SUFFIX
    assert drawn[name].shape == (3, 16)
    assert drawn[name].abs().max() <= 16**-0.5


def test_what_is_merged_is_what_adapters_add():
    model, layers = with_adapters()
    with torch.no_grad():
        for layer in layers:
            model.get_parameter(layer + B_SUFFIX).normal_(generator=torch.Generator().manual_seed(2))
    plain = built()

    def shapes_of(model, wanted):
        return {name: tuple(p.shape) for name, p in model.named_parameters() if wanted(name)}

    base = SimpleNamespace(
        shapes=shapes_of(plain, lambda name: True), read=lambda name: plain.get_parameter(name).detach().clone()
    )
    trained = SimpleNamespace(shapes=shapes_of(model, is_adapter), read=lambda name: model.get_parameter(name).detach())
    merged, reader = built(), MergedModel(base, trained, LORA.scale)
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(reader.read(name))
    assert not torch.allclose(logits(merged), logits(plain), atol=1e-2)
    # The same sums of fp32 products in another order; logits are of order 1.
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-5)


def test_targets_name_layers_by_pattern_and_an_unknown_one_lists_what_there_is():
    _, layers = with_adapters(FinetuneConfig(kind="lora", targets=["*.attention.qkv"]))
    assert layers == ["decoder.blocks.0.attention.qkv", "decoder.blocks.1.attention.qkv"]
    with pytest.raises(ConfigError, match=r"'\*\.q_proj' is no linear layer of a block; use \*\.attention\.output or"):
        with_adapters(FinetuneConfig(kind="lora", targets=["*.q_proj"]))


def test_a_rank_that_no_layer_has_is_refused():
    assert with_adapters(FinetuneConfig(kind="lora", rank=16))[1]
    with pytest.raises(
        ConfigError, match=r"finetune\.rank=17 is more than the rank of any layer, 16 at most; lower it"
    ):
        with_adapters(FinetuneConfig(kind="lora", rank=17))


def test_what_begins_anew_and_what_is_named_is_trained_beside_adapters():
    model, _ = with_adapters()
    assert train_beside(model, {"head.weight"}, ["*.norm.weight"]) == ["decoder.norm.weight", "head.weight"]
    assert model.get_parameter("head.weight").requires_grad
    assert not model.get_parameter("embedding.weight").requires_grad
    with pytest.raises(ConfigError, match=r"finetune\.also: 'wte' matches no parameter"):
        train_beside(model, (), ["wte"])
    model.head = None  # tied
    with pytest.raises(
        ConfigError, match=r"'head\.weight' matches no parameter; the head is the embedding here \(tied\)"
    ):
        train_beside(model, (), ["head.weight"])


def test_frozen_parameters_are_named_by_pattern():
    model = built()
    frozen = freeze(model, ["embedding.*", "decoder.blocks.[0].*"])
    names = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert all(name.startswith(("embedding.", "decoder.blocks.0.")) for name in names)
    assert frozen == sum(model.get_parameter(name).numel() for name in names)
    shown = r"names are such as embedding\.weight, decoder\.blocks\.0\.\S+, head\.weight; all: pretrain inspect"
    with pytest.raises(ConfigError, match=rf"init\.freeze: 'decoder\.layers\.\*' matches no parameter; {shown}"):
        freeze(built(), ["decoder.layers.*"])
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        freeze(built(), ["*"])
