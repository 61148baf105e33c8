"""A mixture of experts against its formula, token by token, and what a layer says of its loads."""

import pytest
import torch
from torch.nn import functional

from pretrain.model.parts import grouped
from pretrain.model.parts.experts import MixtureOfExperts, RoutingSums
from pretrain.model.parts.grouped import grouped_linear
from pretrain.types import IGNORE_INDEX, Batch
from tests.unit.model.tiny import build, random_batch, tiny_config

KINDS = {
    "mixtral": {"count": 6, "top_k": 2},
    "olmoe": {"count": 6, "top_k": 3, "normalize": False},
    "switch": {"count": 6, "top_k": 1, "normalize": False, "z_loss": 0.001},
    "deepseek": {"count": 6, "top_k": 3, "scores": "sigmoid", "scale": 2.5, "shared": 2, "balance": "bias"},
}


def layer_of(kind: str, **stack) -> MixtureOfExperts:
    """A layer in float64, of 16 inputs and experts of width 10, with random weights and bias."""
    keys = {"width": 16, "heads": 2, "kv_heads": 2, "ff_width": 10, "experts": KINDS[kind], **stack}
    layer = MixtureOfExperts(tiny_config(**keys).last_stack).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=generator)
        if layer.router.balance is not None:
            layer.router.balance.bias.normal_(generator=generator).mul_(0.2)
    return layer


def by_formula(layer: MixtureOfExperts, x_D: torch.Tensor) -> torch.Tensor:
    """What one token gets: sum over its experts of weight x down(act(gate x) * up x), by loops."""
    config = layer.router.config
    logits = layer.router.weight @ x_D
    scores = logits.softmax(0) if config.scores == "softmax" else logits.sigmoid()
    choice = scores if layer.router.balance is None else scores + layer.router.balance.bias
    chosen = choice.argsort(descending=True)[: config.top_k]
    weights = scores[chosen] / (scores[chosen].sum() if config.normalize else 1) * config.scale
    result = torch.zeros_like(x_D)
    for expert, weight in zip(chosen, weights, strict=True):
        if layer.gated:
            gate, up = (layer.gate_up.weight[expert] @ x_D).chunk(2)
            hidden = layer.gate.activation(gate) * up
        else:
            hidden = layer.gate.activation(layer.up.weight[expert] @ x_D)
        result = result + weight * (layer.down.weight[expert] @ hidden)
    return result if layer.shared is None else result + layer.shared(x_D)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_and_its_gradients_are_those_of_the_formula(kind, gated):
    layer = layer_of(kind, gated=gated)
    x_BTD = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    found, _ = layer(x_BTD)
    expected = torch.stack([by_formula(layer, x_D) for x_D in x_BTD.flatten(0, 1)]).view_as(x_BTD)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    towards = torch.randn_like(found)
    inputs = [x_BTD, *layer.parameters()]
    gradients = torch.autograd.grad((found * towards).sum(), inputs)
    wanted = torch.autograd.grad((expected * towards).sum(), inputs)
    for gradient, one in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, one, rtol=1e-10, atol=1e-10)


def test_experts_without_tokens_have_a_gradient_of_zeros():
    layer = layer_of("mixtral")
    with torch.no_grad():
        layer.router.weight[:] = 0
        layer.router.weight[4:] = 1  # the largest scores for a positive input
    layer(torch.rand(1, 9, 16, dtype=torch.float64))[0].sum().backward()
    for parameter in (layer.gate_up.weight, layer.down.weight):
        assert parameter.grad is not None
        assert not parameter.grad[:4].any()
        assert parameter.grad[4:].flatten(1).any(dim=1).all()


def test_a_token_gets_the_same_whatever_is_beside_it():
    layer = layer_of("deepseek")
    x_BTD = torch.randn(4, 8, 16, dtype=torch.float64)
    alone = torch.cat([layer(x_BTD[row : row + 1])[0] for row in range(4)])
    torch.testing.assert_close(layer(x_BTD)[0], alone, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("sizes", [[3, 0, 5, 8], [0, 0, 16, 0], [16, 0, 0, 0]])
def test_the_loop_and_the_grouped_kernel_of_torch_agree(monkeypatch, sizes):
    if not hasattr(functional, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    offsets_E = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    x_RI = torch.randn(16, 8, requires_grad=True)
    weight_EOI = torch.randn(4, 12, 8, requires_grad=True)
    towards = torch.randn(16, 12)
    results = []
    for has_kernel in (False, True):
        monkeypatch.setattr(grouped, "_has_kernel", lambda *_, has=has_kernel: has)
        out_RO = grouped_linear(x_RI, weight_EOI, offsets_E)
        results.append((out_RO, *torch.autograd.grad(out_RO, (x_RI, weight_EOI), towards)))
    for loop, kernel in zip(*results, strict=True):
        torch.testing.assert_close(loop, kernel, rtol=1e-5, atol=1e-5)


def test_sums_are_of_tokens_without_padding():
    layer = layer_of("olmoe")
    x_BTD = torch.randn(2, 8, 16, dtype=torch.float64)
    counted_BT = torch.arange(8) < torch.tensor([[8], [3]])
    _, packed = layer(x_BTD, counted_BT)
    real = torch.cat((x_BTD[0], x_BTD[1, :3]))
    logits = functional.linear(real, layer.router.weight)
    scores = logits.softmax(-1)
    sums = RoutingSums.unpack(packed)
    assert sums.load_E.tolist() == torch.bincount(scores.topk(3).indices.flatten(), minlength=6).tolist()
    torch.testing.assert_close(sums.score_E, scores.sum(0))
    torch.testing.assert_close(sums.z, logits.logsumexp(-1).square().sum())
    torch.testing.assert_close(sums.entropy, -(scores * scores.log()).sum())


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_activation_checkpointing_changes_neither_loss_nor_gradients(checkpointing):
    config = tiny_config(experts=KINDS["deepseek"])
    batch = random_batch(2, 16)
    found = []
    for mode in ("none", checkpointing):
        model = build(config, checkpointing=mode).train()
        output = model(batch)
        assert output.logits_BTV is not None and output.routing_LW is not None
        loss = functional.cross_entropy(output.logits_BTV[..., :61].flatten(0, 1), batch.targets_BT.flatten())
        (loss + output.routing_LW.square().mean()).backward()
        found.append([output.logits_BTV, output.routing_LW, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_padding_of_a_batch_is_not_counted_and_a_cache_counts_nothing():
    config = tiny_config(experts=KINDS["mixtral"])
    model = build(config).eval()
    tokens = random_batch(2, 8).tokens_BT
    ignored = torch.full_like(tokens, IGNORE_INDEX)
    by_length = model(Batch(tokens, ignored, lengths_B=torch.tensor([8, 3], dtype=torch.int32))).routing_LW
    documents = torch.where(torch.arange(8) < torch.tensor([[8], [3]]), 0, -1).int()
    by_document = model(Batch(tokens, ignored, documents_BT=documents)).routing_LW
    for packed in (by_length, by_document):
        assert RoutingSums.unpack(packed).load_E.sum(dim=1).tolist() == [22.0, 22.0]  # 11 tokens, 2 choices
    assert model(Batch(tokens, ignored), cache=model.new_cache(8)).routing_LW is None


def test_a_conversion_to_16_bits_leaves_the_balance_in_fp32():
    model = build(tiny_config(experts=KINDS["deepseek"]))
    balance = model.decoder.blocks[0].feedforward.router.balance
    before = balance.bias
    model.to(torch.bfloat16)
    assert balance.bias is before
    assert model.decoder.blocks[0].feedforward.down.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("least", [0, 2**12, 2**40])
@pytest.mark.parametrize("loads", [[0, 1, 7, 40, 0, 129], [300], [5, 0], [64, 64, 17], [0, 0]])
def test_products_of_runs_are_those_of_single_rows_by_any_kernel(monkeypatch, loads, least):
    monkeypatch.setattr(grouped, "_is_zen5", lambda: True)  # oneDNN where it can run
    monkeypatch.setattr(grouped, "LEAST_PRODUCTS", least)
    monkeypatch.setattr(grouped, "LEAST_OUTER_PRODUCTS", least)
    generator = torch.Generator().manual_seed(0)
    rows, outputs, inputs = sum(loads), 24, 40
    x_RI = torch.randn(rows, inputs, generator=generator, requires_grad=True)
    weight_EOI = torch.randn(len(loads), outputs, inputs, generator=generator, requires_grad=True)
    grad_RO = torch.randn(rows, outputs, generator=generator)
    found_RO = grouped_linear(x_RI, weight_EOI, torch.tensor(loads, dtype=torch.int32).cumsum(0, dtype=torch.int32))
    found = (found_RO, *torch.autograd.grad(found_RO, (x_RI, weight_EOI), grad_RO))
    of_expert_R = torch.arange(len(loads)).repeat_interleave(torch.tensor(loads))
    by_row = weight_EOI.double()[of_expert_R]
    expected_RO = torch.einsum("ri,roi->ro", x_RI.double(), by_row)
    expected = (expected_RO, *torch.autograd.grad(expected_RO, (x_RI, weight_EOI), grad_RO.double()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-4)  # sums of 300 fp32 products
