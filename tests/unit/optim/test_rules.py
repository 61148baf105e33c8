"""Update rules that torch lacks, against their papers' algorithms written out."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.config.optim import OptimConfig
from pretrain.kinds.optimizers.muon import MuonConfig
from pretrain.optim import muon
from pretrain.optim.build import build_optimizer, state_size
from pretrain.optim.groups import group_parameters
from pretrain.optim.muon import BatchedMuon
from pretrain.optim.rules import AdamW
from pretrain.optim.soap import Soap
from tests.unit.model.tiny import build, tiny_config
from tests.unit.optim.test_muon import CPU, Block, placed

STEPS = 12


def gradients(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def start(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def follow(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, given: list[Tensor]) -> Tensor:
    for gradient in given:
        parameter.grad = gradient.to(parameter.dtype).clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("beta2", [None, 0.9])
def test_rows_of_muon_are_normalised_at_the_norm_of_the_whole_and_decay_is_cautious(beta2, cautious):
    weight, momentum, square = start(5, 3).float(), torch.zeros(5, 3), torch.zeros(5, 1)
    given = [gradient.float() for gradient in gradients(5, 3)]
    parameter = nn.Parameter(weight.clone())
    rule = BatchedMuon([parameter], beta2=beta2, cautious=cautious, lr=0.1, weight_decay=0.5)
    found = follow(rule, parameter, given)
    for gradient in given:
        momentum = 0.95 * momentum + 0.05 * gradient
        # torch's orthogonalisation of this very matrix: a step from zero, without momentum.
        alone = nn.Parameter(torch.zeros(5, 3))
        alone.grad = 0.05 * gradient + 0.95 * momentum
        torch.optim.Muon([alone], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
        update = -alone.detach()
        if beta2 is not None:
            square = beta2 * square + (1 - beta2) * (update**2).mean(dim=1, keepdim=True)
            rows = update / (square.sqrt() + 1e-10)
            update = rows * update.norm() / rows.norm()
        mask = (update * weight >= 0).float() if cautious else 1.0
        weight = weight - 0.1 * 0.5 * mask * weight - 0.1 * update
    # fp32 in another order, whose last bit may change a bf16 rounding in Newton-Schulz.
    torch.testing.assert_close(found, weight, rtol=2e-2, atol=2e-3)


def test_without_its_options_the_rule_is_that_of_torch():
    for momentum in (0.0, 0.9):
        ours, theirs = (nn.Parameter(start(4, 6).float()) for _ in range(2))
        options = {"lr": 0.1, "weight_decay": 0.2, "momentum": momentum}
        found = follow(BatchedMuon([ours], beta2=None, cautious=False, **options), ours, gradients(4, 6))
        wanted = follow(torch.optim.Muon([theirs], **options), theirs, gradients(4, 6))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("nesterov", [True, False])
def test_products_in_fp32_are_those_of_float64(nesterov):
    parameters = [nn.Parameter(start(4, 6).to(dtype)) for dtype in (torch.float32, torch.float64)]
    ours, exact = (
        follow(
            BatchedMuon([parameter], products=parameter.dtype, lr=0.1, weight_decay=0.2, nesterov=nesterov),
            parameter,
            [gradient.to(parameter.dtype) for gradient in gradients(4, 6)],
        )
        for parameter in parameters
    )
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("device", "flags", "dtype"),
    [
        ("cpu", {"avx2": True, "avx512_f": True, "avx512_bf16": False}, torch.float32),
        ("cpu", {"avx512_bf16": True}, torch.bfloat16),
        ("cpu", {"amx_bf16": True}, torch.bfloat16),
        ("cpu", {"neon": True, "bf16": True}, torch.bfloat16),
        ("cpu", None, torch.float32),
        ("cuda", {"avx512_bf16": False}, torch.bfloat16),
    ],
)
def test_products_are_in_bf16_where_the_device_has_fast_ones_and_the_log_says_so(
    device, flags, dtype, monkeypatch, caplog
):
    if flags is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities")
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    made = []
    monkeypatch.setattr(muon, "BatchedMuon", lambda *_, products, **__: made.append(products))
    with caplog.at_level("INFO", logger="pretrain"):
        optimizer = build_optimizer(group_parameters(Block()), OptimConfig(kind="muon", lr=1e-3), torch.device(device))
    for whole in optimizer._groups.values():
        whole.make([])
    assert made == [dtype]
    assert f"Muon: products in {'bf16' if dtype == torch.bfloat16 else 'fp32'} on this {device}" in caplog.text


class ProductCounter(TorchDispatchMode):
    """Counts matrix products, of one matrix or of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.products += function._opname in ("mm", "addmm", "bmm", "baddbmm")
        return function(*arguments, **(options or {}))


SHAPES = [(6, 4), (4, 6), (6, 4), (5, 5), (6, 4), (4, 6), (6, 4), (6, 4)]


def step_matrices(batch_elements: int, **options: Any) -> tuple[list[Tensor], int]:
    """Matrices after three steps, the second without a gradient for one of them, and the products of the last."""
    generator = torch.Generator().manual_seed(3)
    matrices = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    rule = BatchedMuon(matrices, batch_elements=batch_elements, lr=0.1, weight_decay=0.5, **options)
    for step in range(3):
        for number, matrix in enumerate(matrices):
            gradient = torch.randn(matrix.shape, generator=generator)
            matrix.grad = None if (step, number) == (1, 2) else gradient
        with ProductCounter() as counter:
            rule.step()
    return [matrix.detach() for matrix in matrices], counter.products


@pytest.mark.parametrize(
    "options",
    [
        {"beta2": None, "cautious": False},
        {"beta2": 0.9, "cautious": False},
        {"beta2": None, "cautious": True},
        {"beta2": 0.9, "cautious": True, "nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize(("batch_elements", "batches"), [(2**25, 3), (48, 5), (1, 8)])
def test_a_batch_of_matrices_is_stepped_as_each_of_them_alone(batch_elements, batches, options):
    """Batches of any number of matrices, or of two, or of one."""
    alone, products = step_matrices(0, **options)
    steps = options.get("ns_steps", 5)
    assert products == 3 * steps * len(SHAPES)
    found, products = step_matrices(batch_elements, **options)
    assert products == 3 * steps * batches
    for one, other in zip(found, alone, strict=True):
        # Another kernel's order of sums may change a bf16 rounding, of 8 bits, in each iteration.
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2)
        assert batch_elements > 1 or torch.equal(one, other)


def test_a_gpu_steps_matrices_in_batches_and_a_cpu_one_at_a_time(monkeypatch):
    made = []
    monkeypatch.setattr(muon, "BatchedMuon", lambda *_, batch_elements, **__: made.append(batch_elements))
    for device in ("cuda", "cpu"):
        optimizer = build_optimizer(group_parameters(Block()), OptimConfig(kind="muon", lr=1e-3), torch.device(device))
        for whole in optimizer._groups.values():
            whole.make([])
    assert made == [2**25, 0]


def test_heads_are_matrices_of_their_own():
    model = build(tiny_config(heads=4, kv_heads=2, width=64))
    blocks = {
        name: shapes
        for group in group_parameters(model, split_heads=True)
        for name, shapes in zip(group.names, group.blocks, strict=True)
    }
    assert blocks["decoder.blocks.0.attention.qkv.weight"] == ((16, 64),) * 8
    assert blocks["decoder.blocks.0.attention.output.weight"] == ((64, 64),)


@pytest.mark.parametrize("cautious", [False, True])
def test_lion_follows_its_paper(cautious):
    model = nn.Linear(4, 3).double()
    config = OptimConfig(kind="lion", lr=0.01, beta2=0.99, weight_decay=0.3, cautious_decay=cautious)
    optimizer = build_optimizer(group_parameters(model), config, CPU)
    for parameter, decay in ((model.weight, 0.3), (model.bias, 0.0)):
        model.zero_grad()
        value, moment = parameter.detach().clone(), torch.zeros_like(parameter)
        given = gradients(*parameter.shape)
        found = follow(optimizer, parameter, given)
        for gradient in given:
            update = (0.9 * moment + 0.1 * gradient).sign()
            mask = (update * value >= 0).double() if cautious else 1.0
            value = value - 0.01 * (update + decay * mask * value)
            moment = 0.99 * moment + 0.01 * gradient
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-14)


def test_adamw_steps_as_torchs_does_hooks_once_and_differentiates_its_closure():
    weights, results = torch.randn(2, 3, 4), []
    for kind in (torch.optim.AdamW, AdamW):  # an instance of the first has torch put its hooks into the class of both
        parameters, hooked = [nn.Parameter(weight.clone()) for weight in weights], []
        optimizer = kind(parameters, lr=0.1, fused=True)
        optimizer.register_step_pre_hook(lambda *_, hooked=hooked: hooked.append("before"))
        optimizer.register_step_post_hook(lambda *_, hooked=hooked: hooked.append("after"))

        def closure(optimizer=optimizer, parameters=parameters):
            optimizer.zero_grad()
            loss = sum((parameter**4).sum() for parameter in parameters)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        assert hooked == ["before", "after"] * 3
        results.append([*losses, *(parameter.tolist() for parameter in parameters)])
    assert results[0] == results[1]


def test_adamw_decays_where_its_update_agrees_with_the_weight():
    model = nn.Linear(4, 3).double()
    config = OptimConfig(lr=0.01, weight_decay=0.3, cautious_decay=True)
    optimizer = build_optimizer(group_parameters(model), config, CPU)
    assert optimizer.param_groups[0]["fused"]
    value = model.weight.detach().clone()
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    found = follow(optimizer, model.weight, gradients(3, 4))
    for step, gradient in enumerate(gradients(3, 4), start=1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        update = first / (1 - 0.9**step) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        value = value - 0.01 * (update + 0.3 * (update * value >= 0).double() * value)
    torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("max_side", [100, 4, 1])
def test_soap_follows_its_paper(max_side):
    weight, (left, right) = start(5, 4), (torch.zeros(5, 5).double(), torch.zeros(4, 4).double())
    parameter = nn.Parameter(weight.clone())
    options = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.2, "cautious": False}
    rule = Soap([parameter], **options, shampoo_beta=0.8, every=3, max_side=max_side)
    found = follow(rule, parameter, gradients(5, 4))
    bases = [torch.eye(5).double(), torch.eye(4).double()]
    first, second = torch.zeros(5, 4).double(), torch.zeros(5, 4).double()
    for step, gradient in enumerate(gradients(5, 4)):
        if step:
            turned = bases[0].T @ gradient @ bases[1]
            first = 0.9 * first + 0.1 * gradient
            second = 0.95 * second + 0.05 * turned**2
            scaled = (bases[0].T @ first @ bases[1]) / (1 - 0.9**step)
            scaled = scaled / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
            weight = weight - 0.05 * (bases[0] @ scaled @ bases[1].T + 0.2 * weight)
        left = 0.8 * left + 0.2 * gradient @ gradient.T
        right = 0.8 * right + 0.2 * gradient.T @ gradient
        for axis, factor in enumerate((left, right)):
            if factor.shape[0] > max_side:
                continue
            if step == 0:
                bases[axis] = torch.linalg.eigh(factor)[1].flip(1)
            elif step % 3 == 0:
                order = torch.diagonal(bases[axis].T @ factor @ bases[axis]).argsort(descending=True)
                second = second.index_select(axis, order)
                bases[axis] = torch.linalg.qr(factor @ bases[axis][:, order])[0]
    # Eigenvectors of a rank-deficient factor are any of its null space; their sign, as that of QR, leaves no trace.
    torch.testing.assert_close(found, weight, rtol=1e-6, atol=1e-8)
    assert set(rule.state[parameter]) >= {"exp_avg", "exp_avg_sq"}
    assert ("left" in rule.state[parameter], "right" in rule.state[parameter]) == (max_side >= 5, max_side >= 4)


def test_soap_steps_hidden_matrices_and_adamw_the_rest():
    model = Block()
    optimizer = placed(model, OptimConfig(kind="soap", lr=1e-3))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen = {group["name"]: [names[id(p)] for p in group["params"]] for group in optimizer.param_groups}
    assert seen["matrix"] == ["feedforward.gate_up.weight", "feedforward.down.weight"]
    keys = {(f.name, key) for f in optimizer.fragments() for key in f.tensors}
    down = {key for name, key in keys if name == "feedforward.down.weight"}
    sides = {f"{side}{part}.0" for side in ("left", "right") for part in ("", "_basis")}
    assert down == {"exp_avg", "exp_avg_sq", *sides}


def test_normalised_rows_are_counted_with_the_state():
    model = build(tiny_config())
    groups = group_parameters(model)
    plain, rows = (OptimConfig(kind="muon", lr=1e-3, muon=MuonConfig(row_beta2=beta2)) for beta2 in (None, 0.95))
    more = state_size(groups, rows).elements - state_size(groups, plain).elements
    hidden = [p for name, p in model.named_parameters() if ".blocks." in name and p.ndim == 2]
    assert more == sum(parameter.shape[0] for parameter in hidden)


def test_cautious_decay_of_another_optimizer_is_refused():
    with pytest.raises(ValidationError, match="cautious_decay needs kind=adamw or lion or muon or soap, not adafactor"):
        OptimConfig(kind="adafactor", lr=1e-3, cautious_decay=True)
