"""Losses and biases that balance experts: of the global batch, however it is cut, and as published."""

import logging

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from pretrain.config.objective import ObjectiveConfig
from pretrain.model.parts.experts import MixtureOfExperts, RoutingSums
from pretrain.objective import build_loss
from pretrain.training.balance import ExpertBalance
from pretrain.training.step import TrainModule
from pretrain.types import Batch
from tests.unit.model.tiny import build, random_batch, tiny_config

COUNT, TOP_K = 6, 2


def module_of(**experts) -> TrainModule:
    """A tiny decoder of two layers with 6 experts, of which a token chooses 2."""
    config = tiny_config(experts={"count": COUNT, "top_k": TOP_K, "width": 32, **experts})
    return TrainModule(build(config), build_loss(ObjectiveConfig())).train()


def follow(module: TrainModule, batch: Batch) -> ExpertBalance:
    """Takes the loads of a batch as those of a step."""
    assert module.balance is not None
    module.balance.follow(module(batch)[1][-module.balance.num_shown :].tolist())
    return module.balance


def rows_of(batch: Batch, *cut: int) -> list[Batch]:
    """The rows of a batch in parts of so many."""
    parts = zip(batch.tokens_BT.split(list(cut)), batch.targets_BT.split(list(cut)), strict=True)
    return [Batch(tokens, targets) for tokens, targets in parts]


def test_the_loss_is_that_of_transformers_of_the_loads_of_the_same_batch():
    module = module_of(balance_weight=0.25)
    batch = random_batch(4, 16)
    logits = []
    for layer in module.modules():
        if isinstance(layer, MixtureOfExperts):
            layer.register_forward_hook(
                lambda layer, inputs, _: logits.append(inputs[0].flatten(0, 1) @ layer.router.weight.T)
            )
    plain = module(batch)[0]  # the first step: an even load has a loss without a gradient
    balance = follow(module, batch)
    logits.clear()
    with_loads = module(batch)[0]
    theirs = sum(load_balancing_loss_func((each,), COUNT, TOP_K) for each in logits) / 2
    tokens = batch.tokens_BT.numel()
    torch.testing.assert_close((with_loads - plain) / tokens, 0.25 * (theirs - TOP_K), rtol=1e-4, atol=1e-6)
    assert theirs > TOP_K + 0.05
    # Its gradient too, with the same loads held fixed: theirs is of P alone.
    of_experts = balance.loss(module.model(batch).routing_LW) / tokens
    routers = [layer.router.weight for layer in module.modules() if isinstance(layer, MixtureOfExperts)]
    logits.clear()
    module.model(batch)
    theirs = 0.25 * sum(load_balancing_loss_func((each,), COUNT, TOP_K) for each in logits) / 2
    gradients = torch.autograd.grad(theirs, routers)
    for ours, gradient in zip(torch.autograd.grad(of_experts, routers), gradients, strict=True):
        torch.testing.assert_close(ours, gradient, rtol=1e-4, atol=1e-7)


def test_an_even_load_has_a_loss_without_a_gradient():
    module = module_of(balance_weight=1.0)
    batch = random_batch(2, 16)
    of_experts = module.balance.loss(module.model(batch).routing_LW)
    assert of_experts.item() == pytest.approx(TOP_K * batch.tokens_BT.numel(), rel=1e-5)
    router = module.model.decoder.blocks[1].feedforward.router.weight
    (gradient,) = torch.autograd.grad(of_experts, [router])
    assert gradient.abs().max() < 1e-4


@pytest.mark.parametrize("cut", [(6,), (1, 1, 1, 1, 1, 1), (4, 2), (1, 5)])
def test_losses_gradients_and_loads_do_not_depend_on_micro_batches(cut):
    module = module_of(balance_weight=0.25, z_loss=0.01)
    whole = random_batch(6, 16)
    follow(module, random_batch(6, 16, seed=1))
    results = []
    for parts in (rows_of(whole, 6), rows_of(whole, *cut)):
        module.zero_grad()
        shown = torch.zeros(len(module.layout), dtype=torch.float64)
        for part in parts:
            loss_sum, values = module(part)
            loss_sum.backward()
            shown += values
        results.append((shown, [parameter.grad.clone() for parameter in module.parameters()]))
    (shown, gradients), (shown_cut, gradients_cut) = results
    torch.testing.assert_close(shown, shown_cut, rtol=1e-6, atol=0)
    loads = slice(2, 2 + 2 * COUNT)
    assert shown[loads].tolist() == shown_cut[loads].tolist()
    for one, other in zip(gradients, gradients_cut, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_the_mean_is_over_tokens_where_only_some_have_a_target():
    module = module_of(balance_weight=0.25)
    batch = random_batch(2, 16)
    follow(module, batch)
    of_experts = module.balance.loss(module.model(batch).routing_LW)
    module.targets_per_token = 0.0
    plain = module(batch)[0]
    module.targets_per_token = 8 / 32
    torch.testing.assert_close((module(batch)[0] - plain) / 8, of_experts / 32, rtol=1e-3, atol=1e-5)


def test_z_loss_is_the_mean_square_of_the_log_of_the_denominator():
    module = module_of(balance="none", z_loss=0.5)
    routing_LW = module.model(random_batch(2, 16)).routing_LW
    expected = 0.5 * RoutingSums.unpack(routing_LW).z.mean()
    torch.testing.assert_close(module.balance.loss(routing_LW), expected)
    assert module_of(balance="none").balance.loss(routing_LW) is None


def test_the_bias_moves_against_the_load_by_its_sign():
    module = module_of(balance="bias", balance_rate=0.25)
    balance = module.balance
    even = 4.0
    balance.follow([7, 1, even, even, even, even, 0, 12, 0, 12, 0, 0, *(0.0, 0.0)])
    biases = [kept.tensor.tolist() for kept in balance.state]
    assert biases == [[-0.25, 0.25, 0, 0, 0, 0], [0.25, -0.25, 0.25, -0.25, 0.25, 0.25]]
    assert module.model.decoder.blocks[0].feedforward.router.balance.bias.tolist() == biases[0]
    balance.follow([0.0] * balance.num_shown)  # a step without tokens
    assert [kept.tensor.tolist() for kept in balance.state] == biases


def test_the_bias_chooses_and_does_not_weigh():
    module = module_of(balance="bias", normalize=False)
    layer = module.model.decoder.blocks[0].feedforward
    layer.router.balance.bias[3] = 10.0
    experts_PJ, weights_PJ, _ = layer.router(torch.randn(9, 64), None)
    assert (experts_PJ[:, 0] == 3).all()
    assert weights_PJ.max() <= 1


def test_metrics_name_loads_by_layer_and_dead_experts_once(caplog):
    balance = module_of().balance
    totals = [6, 0, 6, 4, 4, 4, 4, 4, 4, 4, 4, 4, 18.0, 12.0]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            balance.follow(totals)
            metrics = balance.take()
    assert metrics["expert_load_max"] == metrics["expert_load_max/decoder_0"] == 1.5
    assert (metrics["expert_load_min"], metrics["expert_load_min/decoder_1"]) == (0.0, 1.0)
    assert (metrics["experts_dead"], metrics["experts_dropped"]) == (1, 0)
    assert metrics["router_entropy/decoder_0"] == 1.5  # 12 tokens chose two experts each
    assert [record.message for record in caplog.records] == ["no token chose these experts in 1 step: decoder_0: 1"]
    assert balance.take() == {}
    balance.follow([1.0] * 14)
    balance.forget()
    balance.follow(totals)
    assert balance.take() == metrics


def test_a_dense_model_has_no_balance():
    module = TrainModule(build(tiny_config()), build_loss(ObjectiveConfig()))
    assert module.balance is None
    assert (dict(module.layout.sizes), module.kept) == ({"nll": 1, "correct": 1}, ())
