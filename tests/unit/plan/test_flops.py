"""FLOPs against torch's own counter, and against the formula written out."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.lengths import RowLengths
from pretrain.config.model import ExpertsConfig, HeadConfig, ModelConfig, StackConfig
from pretrain.config.presets import expand_preset
from pretrain.model import build_model, init_weights
from pretrain.plan.flops import count_flops
from pretrain.plan.task import TrainingTask
from pretrain.types import Batch

GPT2 = ModelConfig(
    decoder=StackConfig(layers=12, width=768, heads=12, ff_width=3072, gated=False, norm="layer", position="learned"),
    vocab_size=50257,
    max_seq_len=1024,
    tied_embeddings=True,
)
TINY = StackConfig(layers=2, width=32, heads=4, head_width=16, ff_width=48)


def flops_of(config, length, **options):
    return count_flops(config, length, **options).whole.total


def test_gpt2_small_by_hand():
    weights = 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 50304 * 768
    assert flops_of(GPT2, 1024) == 1024 * (6 * weights + 12 * 12 * 768 * 1024)


def test_the_transformer_by_hand():
    """A row of S = 30 source and T = 20 target tokens, F = 4 D; the vocabulary is a multiple of 128 already."""
    values = {"preset": "transformer-base", "vocab_size": 37_120}
    config = ModelConfig.model_validate(expand_preset(values))
    layer = 12 * 512 * 512
    source = 6 * (layer + 2 * 512 * 512)
    target = 6 * (layer + 2 * 512 * 512) + 37_120 * 512
    scores = 12 * 6 * 512 * (30 * 30 + 20 * 20 + 20 * 30)
    assert flops_of(config, 20, source_len=30) == 6 * (30 * source + 20 * target) + scores
    assert flops_of(config, 20) == flops_of(config, 20, source_len=20)


def attention_flops(length, *, shape="decoder", **stack):
    """FLOPs of scores and mixing of one row, for each unit of head width, two layers."""
    config = ModelConfig(**{shape: TINY.model_copy(update=stack)}, vocab_size=1)
    return count_flops(config, length).whole.attention / (12 * 4 * 16)


def test_a_window_counts_the_keys_that_it_leaves():
    assert attention_flops(100) == 2 * 100 * 100
    assert attention_flops(100, window=10) == 2 * 100 * 10
    assert attention_flops(100, window=10, global_every=2) == 100 * 100 + 100 * 10
    assert attention_flops(100, window=1000) == 2 * 100 * 100
    assert attention_flops(100, shape="encoder", window=10) == 2 * 100 * 19
    assert attention_flops(100, shape="encoder", window=70) == 2 * 100 * 100


def counted_by_torch(config, batch):
    """Total FLOPs of forward and backward under eager attention: torch sees nothing inside the CPU's flash kernel."""
    model = build_model(config, PLAIN_ENGINE.model_copy(update={"attention": "eager"}), torch.device("cpu"))
    init_weights(model, config, seed=0)
    counter = FlopCounterMode(display=False)
    with counter:
        output = model(batch)
        scores = output.hidden_BTD if output.logits_BTV is None else output.logits_BTV[..., : config.vocab_size]
        scores.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_forward_and_backward_have_as_many_flops_as_torch_counts(gated, kv_heads):
    config = ModelConfig(
        decoder=TINY.model_copy(update={"gated": gated, "kv_heads": kv_heads}), vocab_size=100, max_seq_len=16
    )
    tokens = torch.randint(0, 100, (3, 16))
    assert counted_by_torch(config, Batch(tokens, tokens)) == len(tokens) * flops_of(config, 16)


@pytest.mark.parametrize(
    "head",
    [HeadConfig(transform=True, bias=True), HeadConfig(kind="none")],
    ids=["transform", "none"],
)
def test_an_encoder_has_as_many_flops_as_torch_counts_with_any_head(head):
    stack = TINY.model_copy(update={"position": "learned", "token_types": 2, "input_norm": True, "qk_norm": True})
    config = ModelConfig(encoder=stack, head=head, vocab_size=100, max_seq_len=16)
    tokens = torch.randint(0, 100, (3, 16))
    assert counted_by_torch(config, Batch(tokens, tokens)) == len(tokens) * flops_of(config, 16)


def test_a_mixture_counts_the_experts_that_a_token_chooses():
    experts = ExpertsConfig(count=7, top_k=3, width=20, shared=1)
    dense = ModelConfig(decoder=TINY, vocab_size=100, max_seq_len=16)
    mixture = ModelConfig(decoder=TINY.model_copy(update={"experts": experts}), vocab_size=100, max_seq_len=16)
    matrix = 3 * 32  # gate, up and down, for each unit of hidden width
    weights = 2 * (matrix * (4 * 20 - 48) + 7 * 32)  # of 2 layers: 3 chosen and one shared, the router
    assert flops_of(mixture, 16) - flops_of(dense, 16) == 16 * 6 * weights


@pytest.mark.parametrize("depth", [1, 2])
def test_modules_that_predict_further_tokens_have_as_many_flops_as_torch_counts(depth):
    config = ModelConfig(decoder=TINY, vocab_size=100, max_seq_len=16, multi_token=depth)
    model = build_model(config, PLAIN_ENGINE.model_copy(update={"attention": "eager"}), torch.device("cpu"))
    init_weights(model, config, seed=0)
    tokens = torch.randint(0, 100, (3, 16))
    counter = FlopCounterMode(display=False)
    with counter:
        found = model(Batch(tokens, tokens))
        scores = (found.logits_BTV[..., :100], *(model.head(one)[..., :100] for one in found.ahead))
        sum(one.sum() for one in scores).backward()
    assert counter.get_total_flops() == len(tokens) * flops_of(config, 16)


@pytest.mark.parametrize(("num_places", "transform"), [(1, False), (16, True), (3, True), (0, True)])
def test_a_head_at_some_positions_has_as_many_flops_as_torch_counts(num_places, transform):
    config = ModelConfig(encoder=TINY, head=HeadConfig(transform=transform), vocab_size=100, max_seq_len=16)
    tokens = torch.randint(0, 100, (1, 16))
    model = build_model(config, PLAIN_ENGINE.model_copy(update={"attention": "eager"}), torch.device("cpu"))
    init_weights(model, config, seed=0)
    with FlopCounterMode(display=False) as counter:
        hidden = model(Batch(tokens, tokens), logits=False).hidden_BTD[0, :num_places]
        model.head(hidden)[..., :100].sum().backward()
    assert counter.get_total_flops() == flops_of(config, 16, head_share=num_places / 16)


def test_a_head_of_labels_has_as_many_flops_as_torch_counts():
    head = HeadConfig(kind="labels", transform=True, bias=True, labels=["a", "b", "c"])
    config = ModelConfig(encoder=TINY, head=head, vocab_size=100, max_seq_len=16)
    tokens = torch.randint(0, 100, (2, 16))
    assert counted_by_torch(config, Batch(tokens, tokens)) == 2 * flops_of(config, 16)


def test_a_generator_of_replaced_tokens_has_as_many_flops_as_torch_counts():
    keys = {"tied_embeddings": False, "head": {"kind": "replaced", "transform": True, "bias": True}}
    values = {"preset": "electra-tiny", "vocab_size": 100, "vocab_multiple": 1, "generator_heads": 1}
    config = ModelConfig.model_validate(expand_preset(values | keys))
    model = build_model(config, PLAIN_ENGINE.model_copy(update={"attention": "eager"}), torch.device("cpu"))
    init_weights(model, config, seed=0)
    tokens, places = torch.randint(0, 100, (2, 16)), torch.arange(0, 32, 4)
    batch, generator = Batch(tokens, tokens), model.generator
    with FlopCounterMode(display=False) as counter:
        hidden_PD = generator(batch, logits=False).hidden_BTD.flatten(0, 1)[places]
        (generator.head(hidden_PD).sum() + model(batch).logits_BTV.sum()).backward()
    task = TrainingTask(config, RowLengths(16, 16), generator_share=0.25)
    assert counter.get_total_flops() == 2 * task.flops.whole.total
