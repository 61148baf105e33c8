"""The weights that the forward pass reads on a rank."""

import pytest
import torch
from torch import nn

from pretrain.engine.replicated import working_weights
from tests.helpers.fake_deepspeed import DTYPES
from tests.helpers.thread_ranks import Ranks
from tests.unit.engine.toy import SHAPES, Toy, fakes, names_of


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_they_are_live_in_their_own_precision_whole_or_at_stage_3_the_share(stage, precision):
    for engine, _, names in fakes(Ranks(3), stage, precision):
        weights = dict(working_weights(engine.module, names))
        assert list(weights) == list(SHAPES)
        assert {tensor.dtype for tensor in weights.values()} == {DTYPES[precision]}
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        shares = {"embedding": (7,), "wide": (19,), "gain": (1,), "bias": (1,), "square": (6,)}
        assert shapes == (shares if stage == 3 else SHAPES)
        weights["wide"].fill_(3.0)
        wide = engine.module.wide
        assert (wide.ds_tensor if stage == 3 else wide.data).eq(3.0).all()


def test_what_two_layers_share_is_there_once_and_needs_no_gradient_here():
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    module[1].bias.requires_grad = False
    found = list(working_weights(module, names_of(module)))
    assert [name for name, _ in found] == ["0.weight", "1.bias"]
    assert not any(tensor.requires_grad for _, tensor in found)
    assert found[0][1].data_ptr() == module[0].weight.data_ptr()


def test_a_weight_of_a_single_process_is_the_parameter():
    module = Toy()
    for name, tensor in working_weights(module, names_of(module)):
        assert torch.equal(tensor, getattr(module, name))
