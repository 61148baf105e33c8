"""Which parameters Muon takes, at which rates, and that it is torch's own on each matrix of a fused weight."""

import pytest
import torch
from torch import nn

from pretrain.config.optim import OptimConfig
from pretrain.engine.replicated import place_whole
from pretrain.errors import LaunchError
from pretrain.kinds.optimizers.muon import MuonConfig
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters
from pretrain.optim.matrices import Span, WeightPiece

CPU = torch.device("cpu")


class Block(nn.Module):
    """A fused layer, as the model names it, and all that is no hidden matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.feedforward = nn.ModuleDict({"gate_up": nn.Linear(4, 12), "down": nn.Linear(6, 4, bias=False)})
        self.norm = nn.RMSNorm(4)
        self.head = nn.Linear(4, 7, bias=False)


def placed(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """An optimizer that has been told, as an engine does, that every parameter is whole."""
    optimizer = build_optimizer(group_parameters(model), config, CPU)
    named = list(model.named_parameters())
    pieces = [
        WeightPiece(Span(name, slot, 0, 0, master.numel()), tuple(master.shape), master)
        for slot, (name, master) in enumerate(named)
    ]
    place_whole(optimizer, [master for _, master in named], pieces)
    return optimizer


def test_hidden_matrices_take_muon_and_all_else_takes_adamw():
    config = OptimConfig(kind="muon", lr=1e-3, weight_decay=0.3, muon=MuonConfig(lr=0.05))
    model = Block()
    optimizer = build_optimizer(group_parameters(model), config, CPU)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen = {group["name"]: [names[id(p)] for p in group["params"]] for group in optimizer.param_groups}
    assert seen == {
        "matrix": ["feedforward.gate_up.weight", "feedforward.down.weight"],
        "decay": ["head.weight"],
        "no_decay": ["embedding.weight", "feedforward.gate_up.bias", "norm.weight"],
    }
    rates = {group["name"]: (group["lr"], group.get("lr_ratio", 1.0)) for group in optimizer.param_groups}
    assert rates == {"matrix": (0.05, 50.0), "decay": (1e-3, 1.0), "no_decay": (1e-3, 1.0)}


@pytest.mark.parametrize(
    "muon",
    [
        MuonConfig(),
        MuonConfig(lr=0.1, momentum=0.8, nesterov=False, ns_steps=3, weight_decay=0.0),
        MuonConfig(adjust_lr_fn="match_rms_adamw"),
    ],
)
def test_each_matrix_of_a_fused_weight_is_stepped_as_torch_steps_it_alone(muon, monkeypatch):
    # torch's own Muon multiplies in bf16 on every processor.
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})
    torch.manual_seed(0)
    model = Block()
    optimizer = placed(model, OptimConfig(kind="muon", lr=1e-3, weight_decay=0.2, muon=muon))
    fused = model.feedforward["gate_up"].weight
    apart = [nn.Parameter(half.detach().clone()) for half in fused.chunk(2)]
    apart.append(nn.Parameter(model.feedforward["down"].weight.detach().clone()))
    kept = muon.model_dump(exclude={"row_beta2", "split_heads"})
    options = kept | {"weight_decay": 0.2 if muon.weight_decay is None else muon.weight_decay}
    reference = torch.optim.Muon(apart, **options)
    others = [parameter for name, parameter in model.named_parameters() if not name.startswith("feedforward")]
    plain = [nn.Parameter(parameter.detach().clone()) for parameter in others]
    adamw = torch.optim.AdamW(plain, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        gradients = [*fused.grad.chunk(2), model.feedforward["down"].weight.grad]
        for parameter, gradient in zip(apart, gradients, strict=True):
            parameter.grad = gradient.clone()
        for parameter, other in zip(plain, others, strict=True):
            parameter.grad = other.grad.clone()
        # The head alone decays among the rest.
        plain[-1].data.mul_(1 - 1e-3 * 0.2)
        optimizer.step()
        reference.step()
        adamw.step()
    assert torch.equal(fused, torch.cat(apart[:2]))
    assert torch.equal(model.feedforward["down"].weight, apart[2])
    for parameter, other in zip(plain, others, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-6, atol=0)


def test_a_matrix_without_a_gradient_is_left_alone():
    model = Block()
    optimizer = placed(model, OptimConfig(kind="muon", lr=1e-3))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.feedforward["down"].weight.grad = torch.ones(4, 6)
    optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {"feedforward.down.weight"}


def test_a_torch_without_muon_is_named(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(LaunchError, match=r"optim.kind=muon needs torch 2.9 or newer, this is .*use optim.kind=adamw"):
        build_optimizer(group_parameters(Block()), OptimConfig(kind="muon", lr=1e-3), CPU)
