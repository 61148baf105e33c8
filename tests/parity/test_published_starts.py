"""Hybrids with decays and steps as published: fp32 is as near float64 as transformers is."""

import copy
import math

import pytest
import torch

from pretrain.families import FAMILIES
from pretrain.types import Batch
from tests.helpers.lent import lend
from tests.helpers.theirs import build_theirs
from tests.unit.interop.releases import TINY, tiny

VOCAB = 61
DECAYING = [
    name for name in FAMILIES if {"delta", "mamba2"} & tiny(TINY[name]).last_stack.replaced_by.keys()
]  # fmt: skip
"""Families with a mixer whose state decays."""


def published(model_type):
    """A model of random weights, with the decays and steps of a new one."""
    torch.manual_seed(0)
    model = build_theirs(model_type)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(1.0, 16.0, generator=generator).log_()
            elif name.endswith("dt_bias"):
                step = weight.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
                weight.copy_(step + torch.log(-torch.expm1(-step)))
    return model


@pytest.mark.parametrize("model_type", DECAYING)
def test_scores_and_gradients_are_as_near_float64_as_those_of_transformers(model_type, tmp_path):
    theirs, ours, _ = lend(published(model_type), tmp_path)
    exact = copy.deepcopy(ours).double()
    tokens = torch.randint(0, VOCAB, (2, 100), generator=torch.Generator().manual_seed(3))
    scores, gradients = [], []
    for model in (ours, exact):
        logits = model(Batch(tokens, tokens)).logits_BTV[..., :VOCAB]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        scores.append(logits.detach())
    wanted = scores[1]
    with torch.no_grad():
        distance = float((theirs(input_ids=tokens).logits - wanted).abs().max())
    assert float((scores[0] - wanted).abs().max()) < max(2 * distance, 1e-6)
    for mine, its in zip(*gradients, strict=True):
        assert float((mine - its).abs().max()) < 2e-5 * max(float(its.abs().max()), 1e-6)
