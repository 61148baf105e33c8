"""Next-token prediction on a model."""

import torch
from torch.nn import functional

from pretrain.config.model import HeadConfig
from pretrain.objective.loss import sum_token_loss
from pretrain.types import IGNORE_INDEX, Batch
from tests.unit.model.tiny import build, random_batch, tiny_config


def ragged_batch():
    batch = random_batch(3, 10)
    targets = batch.targets_BT.clone()
    targets[0, 4:] = IGNORE_INDEX
    targets[2] = IGNORE_INDEX
    return Batch(batch.tokens_BT, targets)


def test_loss_is_the_sum_over_the_targets_that_count():
    model, batch = build(tiny_config(), dtype=torch.float64), ragged_batch()
    output = sum_token_loss(model, batch)
    logits = model(batch).logits_BTV
    expected = functional.cross_entropy(
        logits.flatten(0, 1), batch.targets_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    torch.testing.assert_close(output.loss_sum, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(output.nll_sum, expected.detach(), rtol=1e-12, atol=0)
    assert output.num_correct == ((logits.argmax(-1) == batch.targets_BT) & (batch.targets_BT >= 0)).sum()


def test_rows_add_up_to_the_batch_in_loss_and_gradient():
    model, batch = build(tiny_config(), dtype=torch.float64), ragged_batch()
    sum_token_loss(model, batch).loss_sum.backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for row in range(3):
        part = Batch(batch.tokens_BT[row : row + 1], batch.targets_BT[row : row + 1])
        sum_token_loss(model, part).loss_sum.backward()
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, whole, rtol=1e-10, atol=1e-12)


def test_padding_the_vocabulary_does_not_change_the_loss():
    losses = []
    for multiple in (1, 128):
        model = build(tiny_config(model={"vocab_multiple": multiple}), dtype=torch.float64)
        narrow = build(tiny_config(model={"vocab_multiple": 1}), dtype=torch.float64)
        with torch.no_grad():
            for name, parameter in narrow.named_parameters():
                dict(model.named_parameters())[name][: parameter.shape[0]] = parameter
        losses.append(sum_token_loss(model, ragged_batch()).loss_sum)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)


def test_capped_scores_are_those_that_the_loss_reads():
    config = tiny_config()
    model = build(config.model_copy(update={"head": HeadConfig(soft_cap=0.5)}), dtype=torch.float64)
    batch, plain = ragged_batch(), build(config, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    logits = model(batch).logits_BTV[..., : model.vocab_size]
    free = plain(batch).logits_BTV[..., : model.vocab_size]
    torch.testing.assert_close(logits, 0.5 * (free / 0.5).tanh(), rtol=1e-12, atol=0)
    expected = functional.cross_entropy(
        logits.flatten(0, 1), batch.targets_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    torch.testing.assert_close(sum_token_loss(model, batch).loss_sum, expected, rtol=1e-12, atol=0)
