"""fp32 masters of 16-bit weights: what a step computes, what it moves, and what a checkpoint has of it."""

import math
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor import metrics
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pretrain.config.engine import EngineConfig
from pretrain.config.optim import OptimConfig
from pretrain.dist import World
from pretrain.engine.replicated import TorchEngine
from pretrain.kinds.optimizers import OPTIMIZERS
from pretrain.optim import fused
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters
from tests.unit.engine.toy import SHAPES, Toy, assemble, fill, names_of

X = 0.25
CPU = torch.device("cpu")
FUSED = [kind for kind, record in OPTIMIZERS.items() if record.fused]


class Long(Toy):
    """The toy with parameters that need no padding."""

    def __init__(self):
        nn.Module.__init__(self)
        for name, shape in {"matrix": (64, 50), "bias": (64,)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(3))))


def build(make=Toy, *, compiled=False, clip=1.0, frozen=(), **optim):
    """An engine over a module of bf16 weights; `compiled`: its update is fused, where the optimizer can."""
    module = make()
    for name in frozen:
        getattr(module, name).requires_grad = False
    config = EngineConfig(kind="single", precision="bf16", device="cpu", compile=compiled)
    sections = OptimConfig.model_validate({"lr": 1e-2} | optim)
    optimizer = build_optimizer(group_parameters(module), sections, CPU, fuses=config.fuses_update("cpu"))
    accelerator = SimpleNamespace(prepare_model=lambda module, **_: module, device=CPU)
    return TorchEngine(module, names_of(module), optimizer, accelerator, config, clip, World(0, 1, 0))


@pytest.fixture
def uncompiled(monkeypatch):
    """Runs a fused update operation by operation."""
    monkeypatch.setattr(fused, "_compiled", lambda: fused.update_flat)


def step(engine, *values):
    """A step of micro-batches."""
    for number, value in enumerate(values):
        engine.forward_backward(torch.tensor(value), 1.0, number + 1 == len(values))
    return engine.update(1e-2)


def masters(engine):
    return {name: tensor.clone() for (name, kind), tensor in assemble([engine.state]).items() if kind == "weight"}


def test_weights_begin_rounded_on_addresses_for_fast_products_and_padding_stays_zero():
    engine = build()
    assert all(torch.equal(master, master.bfloat16().float()) for master in masters(engine).values())
    step(engine, X)
    for name, weight in engine.working_weights():
        assert weight.dtype == torch.bfloat16
        assert weight.storage_offset() * weight.element_size() % 128 == 0
        assert torch.equal(weight, masters(engine)[name].bfloat16()), name
    assert {name: tuple(tensor.shape) for name, tensor in masters(engine).items()} == SHAPES
    flats = engine._masters.tensors
    num_parameters = sum(math.prod(shape) for shape in SHAPES.values())
    assert sum(int(flat.count_nonzero()) for flat in flats) == num_parameters < sum(flat.numel() for flat in flats)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_step_is_torch_s_own_of_the_masters_over_gradients_summed_in_bf16(clip):
    engine, exact = build(clip=clip, weight_decay=0), Toy()
    for parameter in exact.parameters():
        parameter.data = parameter.data.bfloat16().float()
    reference = torch.optim.AdamW(exact.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0)
    for _ in range(3):
        update = step(engine, X, 3 * X)
        for parameter in exact.parameters():
            # Half the square of w x, where w was rounded: gradients of micro-batches are in bf16, and so is the sum.
            weight = parameter.detach().bfloat16().float()
            parts = [(weight * x * x).bfloat16() for x in (X, 3 * X)]
            parameter.grad = (parts[0] + parts[1]).float()
        norm = torch.nn.utils.clip_grad_norm_(exact.parameters(), clip or math.inf)
        reference.step()
        assert (update.grad_norm, update.skipped) == (pytest.approx(float(norm), rel=1e-6), False)
        for name, master in masters(engine).items():
            assert torch.allclose(master, getattr(exact, name), rtol=1e-5, atol=1e-7), name
    assert all(parameter.grad is None for parameter in engine.module.parameters())


def test_what_is_loaded_reaches_the_weights_and_training_goes_on_as_if_nothing_had_been():
    engine, other = build(), build()
    step(engine, X)
    saved = {key: tensor.clone() for key, tensor in assemble([engine.state]).items()}
    assert {kind for _, kind in saved} == {"weight", "exp_avg", "exp_avg_sq"}
    with torch.no_grad():
        for fragment in other.state.held_fragments():
            fill(fragment, saved)
    other.state.finish_load(1, {})
    pairs = zip(engine.working_weights(), other.working_weights(), strict=True)
    assert all(torch.equal(one, same) for (_, one), (_, same) in pairs)
    assert step(engine, 2 * X) == step(other, 2 * X)
    after = assemble([other.state])
    assert all(torch.equal(tensor, after[key]) for key, tensor in assemble([engine.state]).items())


def test_a_parameter_without_a_gradient_has_one_of_zeros_and_a_frozen_one_is_16_bits_too():
    engine = build(frozen=("wide",))
    assert engine.module.wide.dtype == torch.bfloat16
    before = masters(engine)
    assert before.keys() == SHAPES.keys() - {"wide"}
    engine.forward_backward(torch.tensor(X), 1.0, True)
    engine.module.bias.grad = None
    assert engine.update(1e-2).grad_norm > 0
    after = masters(engine)
    assert {name for name in before if torch.equal(before[name], after[name])} == {"bias"}


# The fused update.


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_update_is_that_of_the_optimizer_and_skips_what_is_not_finite(uncompiled, kind, cautious):
    optim = {"kind": kind, "cautious_decay": cautious, "grad_clip": 1.0}
    plain, one = build(**optim), build(compiled=True, **optim)
    assert isinstance(one._optimizer, fused.FusedStep)
    for value in (X, math.inf, 2 * X, math.nan, 3 * X):
        first, second = step(plain, value), step(one, value)
        assert first.skipped == second.skipped == (not math.isfinite(value))
        assert first.skipped or second.grad_norm == pytest.approx(first.grad_norm, rel=1e-6)
        found, state = (assemble([engine.state]) for engine in (plain, one))
        for key, tensor in found.items():
            assert torch.allclose(tensor, state[key], rtol=1e-5, atol=1e-6), key
        assert all(torch.equal(weight, masters(one)[name].bfloat16()) for name, weight in one.working_weights())
    before = assemble([one.state])
    one.forward_backward(torch.tensor(X), 1.0, True)
    assert one.update(1e-2, drop=True).skipped
    assert all(torch.equal(tensor, before[key]) for key, tensor in assemble([one.state]).items())


# Bytes that an update moves.


class Moved(TorchDispatchMode):
    """Counts the bytes that operations read and write; not of numbers, that is of tensors without a dimension."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        results = function(*arguments, **(named or {}))
        name = function._schema.name.removeprefix("aten::")
        aliases = [one.alias_info for one in function._schema.arguments]
        moved = [] if "empty" in name else [*arguments] + ([] if any(aliases) else [results])
        for alias, value in zip(aliases, arguments, strict=False):
            if alias is not None and not alias.is_write:  # a view
                moved = []
            elif alias is not None and not name.startswith(("copy_", "_foreach_copy_", "zero_")):
                moved.append(value)  # read, and written
        self.bytes[name] += sum(one.nbytes for one in tree_leaves(moved) if isinstance(one, torch.Tensor) and one.dim())
        return results


def moved_by(engine):
    """Bytes a parameter of an update after the first, by operation."""
    step(engine, X)
    engine.forward_backward(torch.tensor(X), 1.0, True)
    with Moved() as seen:
        engine.update(1e-2)
    return {name: size / (64 * 51) for name, size in seen.bytes.items() if size > 64 * 51}


def test_an_update_in_torch_s_operations_moves_52_bytes_a_parameter():
    # Gradients to fp32; their norm; the clip, in place; AdamW; the weights.
    moved = {"_foreach_copy_": 6, "linalg_vector_norm": 4, "_foreach_mul_": 8, "_fused_adamw_": 28, "copy_": 6}
    moved["_fused_adamw_"] += 4  # by its schema, which writes gradients where it scales them
    assert moved_by(build(Long)) == pytest.approx(moved, rel=1e-2)


@pytest.mark.parametrize(("kind", "kernel"), [("adamw", 28), ("lion", 20)])
@pytest.mark.parametrize("cautious", [False, True])
def test_a_fused_update_moves_6_bytes_a_parameter_beside_those_of_its_kernel(monkeypatch, kind, kernel, cautious):
    kernels = []

    def traced(rule, *inputs, cautious):
        with _disable_current_modes():
            *tensors, betas = inputs
            update = partial(fused.update_flat, rule, betas=betas, cautious=cautious)
            graph = make_fx(lambda *given: update(*given))(*tensors).graph
            kernels.append(sum(bytes_of(graph, tree_leaves(tensors))) / tensors[1].numel())
            update(*tensors)

    monkeypatch.setattr(fused, "_compiled", lambda: traced)
    engine = build(Long, compiled=True, kind=kind, cautious_decay=cautious)
    # Gradients to one tensor, still in bf16, and their norm.
    assert moved_by(engine) == {"_foreach_copy_": 4, "linalg_vector_norm": pytest.approx(2, rel=1e-2)}
    assert set(kernels) == {kernel}


def bytes_of(graph, inputs):
    """Bytes that one kernel of a graph reads, and that it writes; all of it is elementwise, and so one kernel."""
    operations = [node for node in graph.nodes if node.op == "call_function"]
    written = [node.args[0] for node in operations if node.target is torch.ops.aten.copy_.default]
    plain = [node for node in operations if node.target is not torch.ops.aten.copy_.default]
    views = (torch.ops.aten.select.int, torch.ops.aten._to_copy.default)
    assert all(node.target in views or torch.Tag.pointwise in node.target.tags for node in plain)
    sizes = dict(zip((node for node in graph.nodes if node.op == "placeholder"), inputs, strict=True))
    read = [node for node in sizes if any(node in user.all_input_nodes for user in plain)]
    return [sum(sizes[node].nbytes for node in nodes if sizes[node].numel() > 8) for nodes in (read, written)]


@pytest.mark.long
@pytest.mark.parametrize("kind", FUSED)
def test_a_compiled_update_is_one_kernel_for_all_groups(kind):
    plain, one = build(kind=kind), build(compiled=True, kind=kind)
    torch._dynamo.reset()
    metrics.reset()
    for value in (X, math.inf, 2 * X):
        assert step(plain, value).skipped == step(one, value).skipped
    assert len(one._optimizer.param_groups) == 2
    assert metrics.generated_kernel_count == 1
    state = assemble([one.state])
    for key, tensor in assemble([plain.state]).items():
        assert torch.allclose(tensor, state[key], rtol=1e-5, atol=1e-6), key
