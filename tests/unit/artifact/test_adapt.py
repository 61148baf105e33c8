"""Weights of one model as those of another: added tokens, another head, what is refused, and their identity."""

from types import SimpleNamespace

import pytest
import torch

from pretrain.artifact.source import AdaptedModel
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ExpertsConfig, HeadConfig, ModelConfig, StackConfig
from pretrain.errors import CheckpointError
from pretrain.interop.tensors import parameter_shapes
from pretrain.model import build_model
from pretrain.model.build import init_weights, named_weights
from pretrain.types import Batch

BALANCE = "decoder.blocks.0.feedforward.router.balance.bias"
STACK = StackConfig(layers=1, width=8, heads=2, ff_width=12)


def model(vocab_size=5, multiple=4, **options):
    return ModelConfig(decoder=STACK, vocab_size=vocab_size, vocab_multiple=multiple, max_seq_len=16, **options)


def encoder(**options):
    return ModelConfig(encoder=STACK, vocab_size=5, vocab_multiple=4, max_seq_len=16, **options)


def described(config):
    """A model on disk whose weights are random."""
    generator = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(config).items()}

    def read_part(name, offset, out):
        out.copy_(weights[name].view(-1)[offset : offset + out.numel()])

    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    return SimpleNamespace(
        path="start", config=config, shapes=shapes, read=lambda name: weights[name].clone(), read_part=read_part
    )


def adapted(config, to):
    return AdaptedModel(described(config), to, parameter_shapes(to))


@pytest.mark.parametrize("multiple", [4, 16])
def test_rows_of_added_tokens_are_the_mean_of_the_known_ones(multiple):
    """With 5 tokens padded to 8, the padding is no token; two more make 7, in a table of 8 or of 16 rows."""
    source = adapted(model(), model(vocab_size=7, multiple=multiple))
    before = source.source.read("embedding.weight")
    for name in ("embedding.weight", "head.weight"):
        before, after = source.source.read(name), source.read(name)
        assert torch.equal(after[:5], before[:5])
        assert torch.equal(after[5:7], before[:5].double().mean(0).float().expand(2, 8))
        assert after.shape == (8 if multiple == 4 else 16, 8)
    assert source.describe()[1] == (
        "2 tokens are new to the model of 5: their rows of embedding.weight, head.weight are the mean of the others"
    )


def test_value_embeddings_grow_with_the_vocabulary():
    stack = STACK.model_copy(update={"layers": 2, "value_embeddings": 1})
    small, large = (ModelConfig(decoder=stack, vocab_size=size, vocab_multiple=1, max_seq_len=16) for size in (5, 7))
    source = adapted(small, large)
    before, after = (one.read("decoder.value_embedding.0.weight") for one in (source.source, source))
    assert torch.equal(after, torch.cat((before, before.double().mean(0).float().expand(2, 8))))


def test_a_part_of_a_parameter_is_that_range_of_the_whole():
    source = adapted(model(), model(vocab_size=7))
    for name in ("embedding.weight", "decoder.blocks.0.attention.qkv.weight"):
        part = torch.empty(19)
        source.read_part(name, 30, part)
        assert torch.equal(part, source.read(name).view(-1)[30:49])


def test_another_head_begins_anew_and_the_shapes_of_both_are_said():
    labels = HeadConfig(kind="labels", labels=["a", "b", "c"])
    source = adapted(encoder(), encoder(head=labels, pooler=True))
    assert source.anew == {"head.weight", "pooler.weight", "pooler.bias"}
    assert "embedding.weight" in source
    assert source.describe() == [
        "weights are those of start, but for these, which begin anew: head.weight [3, 8], pooler.bias [8], "
        "pooler.weight [8, 8]; left there: head.weight [8, 8]"
    ]


def test_a_model_that_differs_elsewhere_is_refused():
    wider = ModelConfig(decoder=STACK.model_copy(update={"ff_width": 16}), vocab_size=5, vocab_multiple=4)
    with pytest.raises(
        CheckpointError, match=r"feedforward.gate_up.weight has shape \[32, 8\] in this model, in the che"
    ):
        adapted(model(), wider)
    with pytest.raises(CheckpointError, match=r"head.weight has shape \[8, 8\] in this model, .*no such parameter"):
        adapted(model(tied_embeddings=True), model())


def test_layers_that_are_left_out_are_named():
    deep = ModelConfig(decoder=STACK.model_copy(update={"layers": 2}), vocab_size=5, vocab_multiple=4, max_seq_len=16)
    source = adapted(deep, model())
    assert not source.anew
    assert "left there: decoder.blocks.1.attention.output.weight [8, 8]" in source.describe()[0]


def test_the_identity_is_that_of_every_value_taken_in_whatever_order_it_was_read():
    one, other = adapted(model(), model(vocab_size=7)), adapted(model(), model(vocab_size=7))
    other.read("head.weight")
    assert one.fingerprint() == other.fingerprint()
    changed = adapted(model(), model(vocab_size=7))
    weight = changed.source.read("decoder.norm.weight")
    weight[3] += 1e-6
    read = changed.source.read
    changed.source.read = lambda name: weight if name == "decoder.norm.weight" else read(name)
    assert changed.fingerprint() != one.fingerprint()


def test_modules_that_predict_further_tokens_begin_anew_and_may_be_left():
    with_modules = model().model_copy(update={"multi_token": 1})
    source = adapted(model(), with_modules)
    assert source.anew and all(name.startswith("multi_token.") for name in source.anew)
    left = adapted(with_modules, model())
    assert not left.anew and left.left.keys() == source.anew


@pytest.mark.parametrize("bias", [False, True])
def test_experts_that_are_copies_of_a_dense_layer_begin_as_the_same_function(bias):
    experts, stack = ExpertsConfig(count=4, top_k=2, balance="bias"), STACK.model_copy(update={"bias": bias})
    dense_model = model().model_copy(update={"decoder": stack})
    upcycled = model().model_copy(update={"decoder": stack.model_copy(update={"experts": experts})})
    source = adapted(dense_model, upcycled)
    router = {f"decoder.blocks.0.feedforward.router.{kind}" for kind in ("weight", "bias")}
    assert source.anew == (router | {BALANCE}) & source.shapes.keys()
    assert source.describe()[1:] == ["each feed-forward layer is copied to 4 experts"]
    built = {}
    for config, read in ((dense_model, source.source.read), (upcycled, source.read)):
        built[config.decoder.experts is None] = one = build_model(config, PLAIN_ENGINE, torch.device("cpu"))
        init_weights(one, config, seed=0)
        for name, weight in named_weights(one):
            if name not in source.anew:
                weight.data.copy_(read(name))
    tokens = torch.randint(0, 5, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        dense, mixture = (built[is_dense](Batch(tokens, tokens)).logits_BTV for is_dense in (True, False))
    torch.testing.assert_close(mixture, dense, rtol=1e-5, atol=1e-5)  # sums of two halves
    part = torch.empty(19)
    source.read_part("decoder.blocks.0.feedforward.down.weight", 90, part)
    assert torch.equal(part, source.read("decoder.blocks.0.feedforward.down.weight").view(-1)[90:109])
    for update, name in (({"width": 6}, r"gate_up.weight has shape \[4, 12, 8\]"), ({"shared": 1}, r"shared\.")):
        unfit = STACK.model_copy(update={"experts": experts.model_copy(update=update)})
        with pytest.raises(CheckpointError, match=rf"feedforward\.{name}.*; leave width and shared of its experts out"):
            adapted(model(), model().model_copy(update={"decoder": unfit}))
