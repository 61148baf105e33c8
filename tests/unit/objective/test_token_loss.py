"""The head at the places that have a loss: the same numbers as at all of them, for less."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pretrain.config.model import HeadConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.objective import build_loss
from pretrain.objective.loss import sum_token_loss
from pretrain.types import IGNORE_INDEX, Batch, ModelOutput
from tests.unit.model.tiny import build, encoder_config, random_batch


def masked_batch(rows: int, length: int, share: float, seed: int = 0) -> Batch:
    """A batch with targets at a share of the positions, without places."""
    plain = random_batch(rows, length, seed=seed)
    hidden = torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) >= share
    return Batch(plain.tokens_BT, plain.targets_BT.masked_fill(hidden, IGNORE_INDEX))


def with_places(batch: Batch) -> Batch:
    return replace(batch, target_positions_P=torch.nonzero(batch.targets_BT.flatten() != IGNORE_INDEX)[:, 0])


@pytest.mark.parametrize("share", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}], ids=["plain", "smoothed"])
@pytest.mark.parametrize("transform", [False, True])
def test_loss_and_gradients_are_those_of_the_head_at_all_positions(share, options, transform):
    head = HeadConfig(transform=transform, bias=True)
    model = build(encoder_config().model_copy(update={"head": head}), dtype=torch.float64)
    everywhere = masked_batch(4, 12, share)
    found = []
    for batch in (everywhere, with_places(everywhere)):
        model.zero_grad()
        output = sum_token_loss(model, batch, **options)
        output.loss_sum.backward()
        assert output.nll_P is not None
        told = (
            output.nll_P
            if batch.target_positions_P is not None
            else output.nll_P[with_places(batch).target_positions_P]
        )
        found.append([*output[:3], told, {name: p.grad for name, p in model.named_parameters()}])
    assert all(gradient is not None for gradient in found[1][-1].values()), "ZeRO reduces every parameter's"
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-11)


def test_what_the_head_keeps_for_the_backward_pass_goes_with_the_places():
    head = HeadConfig(transform=True, bias=True)
    config = encoder_config(width=32, heads=2, kv_heads=2, layers=1).model_copy(update={"head": head})
    model = build(config)
    everywhere = masked_batch(8, 64, 0.125)
    places = with_places(everywhere).target_positions_P
    assert places is not None

    def saved_bytes(hidden_BTD: Tensor, batch: Batch) -> int:
        """Bytes of the activations that the head and its loss keep; what is a parameter is there anyway."""
        parameters = {parameter.data_ptr() for parameter in model.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in parameters and tensor.shape[:1] != model.head.weight.shape[:1]:
                kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        def read(batch: Batch, logits: bool):
            return ModelOutput(hidden_BTD)

        stub = type("Model", (), {"head": model.head, "vocab_size": 61, "__call__": staticmethod(read)})()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = sum_token_loss(stub, batch).loss_sum
        loss.backward()
        return sum(kept.values())

    hidden = model(everywhere, logits=False).hidden_BTD.detach()
    whole = saved_bytes(hidden.clone().requires_grad_(), everywhere)
    chosen = saved_bytes(hidden.clone().requires_grad_(), with_places(everywhere))
    share = len(places) / everywhere.targets_BT.numel()
    assert whole > 3 * hidden.numel() * 4
    # Places themselves are kept too, eight bytes each.
    assert chosen <= whole * share + 16 * len(places)


def test_a_config_smooths_what_is_minimised_and_not_what_is_shown():
    model, batch = build(encoder_config(), dtype=torch.float64), masked_batch(2, 9, 0.5)
    plain = build_loss(ObjectiveConfig(kind="masked"))(model, batch)
    smooth = build_loss(ObjectiveConfig(kind="masked", label_smoothing=0.2, z_loss=1e-3))(model, batch)
    assert abs(smooth.loss_sum - plain.loss_sum) > 1e-3
    assert torch.equal(smooth.nll_sum, plain.nll_sum)
    torch.testing.assert_close(plain.loss_sum.detach(), plain.nll_sum)
