"""Matrices in 4 bits: their size and error, products and gradients, and what a model of them has no more."""

import pytest
import torch
from torch.nn.functional import linear

from pretrain.artifact.lora import add_adapters
from pretrain.artifact.quantized import QuantizedLinear, QuantizedMatrix, round_to_nf4
from pretrain.config.engine import PLAIN_ENGINE, EngineConfig
from pretrain.config.finetune import FinetuneConfig
from pretrain.config.lengths import RowLengths
from pretrain.config.load import load_config
from pretrain.errors import ConfigError, LaunchError
from pretrain.model import build_model
from pretrain.plan.cluster import Cluster
from pretrain.plan.gpus import find_gpu
from pretrain.plan.memory import NF4_BYTES, rank_memory
from pretrain.plan.task import ParallelLayout, TrainingTask
from pretrain.plan.trained import plan_trained
from tests.unit.model.tiny import CPU, random_batch, tiny_config

pytest.importorskip("bitsandbytes")

NF4 = FinetuneConfig(kind="lora", rank=4, quantize="nf4")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(seed: int = 0, bias: bool = True) -> tuple[QuantizedLinear, torch.nn.Linear]:
    """A layer in 4 bits, and one with the matrix that it stands for."""
    plain = torch.nn.Linear(36, 50, bias=bias)
    layer = QuantizedLinear(plain)
    layer.take(drawn(50, 36, seed=seed))
    with torch.no_grad():
        plain.weight.copy_(round_to_nf4(drawn(50, 36, seed=seed)))
    return layer, plain


def test_a_value_takes_a_quarter_of_16_bits_and_is_near():
    weight = drawn(512, 768)
    matrix = QuantizedMatrix(weight)
    assert matrix.num_bytes / weight.numel() == pytest.approx(NF4_BYTES, rel=1e-4)
    assert matrix.num_bytes < 0.26 * weight.to(torch.bfloat16).nbytes
    found = matrix.read(torch.float32)
    # 16 levels that are equally likely under a normal distribution: a tenth of a standard deviation.
    assert (found - weight).square().mean().sqrt() < 0.11
    assert len((found[0, :64] / found[0, :64].abs().max()).unique()) <= 16
    torch.testing.assert_close(matrix.read(torch.bfloat16), found.to(torch.bfloat16), rtol=2**-7, atol=0)
    assert torch.equal(round_to_nf4(weight), found)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_are_those_of_the_dequantised_matrix(dtype, bias):
    layer, plain = filled(bias=bias)
    layer, plain = layer.to(dtype), plain.to(dtype)
    inputs = [drawn(3, 5, 36, seed=1).to(dtype).requires_grad_() for _ in range(2)]
    found, wanted = layer(inputs[0]), plain(inputs[1])
    assert found.dtype == dtype
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 0.1}
    torch.testing.assert_close(found, wanted, **tolerance)
    for result in (found, wanted):
        (result.float() ** 2).sum().backward()
    ours, theirs = (x.grad.float() for x in inputs)
    assert (ours - theirs).norm() < (1e-5 if dtype == torch.float32 else 2**-7) * theirs.norm()


def test_autocast_decides_the_dtype_of_a_product():
    layer, _ = filled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(drawn(2, 36)).dtype == torch.bfloat16
    assert layer(drawn(2, 36)).dtype == torch.float32


def test_the_backward_pass_keeps_no_matrix():
    layer, plain = filled(bias=False)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        layer(drawn(2, 36).requires_grad_())
        assert kept == []
        linear(drawn(2, 36).requires_grad_(), plain.weight.detach())
    assert kept == [50 * 36]


def test_a_model_has_its_adapted_matrices_in_4_bits_alone():
    config = tiny_config()
    model = build_model(config, PLAIN_ENGINE, CPU, storage=False)
    layers = add_adapters(model, NF4)
    model.to_empty(device=CPU)
    model.tie()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    for name in layers:
        part = model.get_submodule(f"{name}.base_layer")
        assert isinstance(part, QuantizedLinear)
        part.take(0.1 * drawn(part.out_features, part.in_features))
    names = [name for name, _ in model.named_parameters()]
    assert len(layers) == 4 * config.last_stack.layers and not any("base_layer" in name for name in names)
    assert not list(model.named_buffers())
    scores = model(random_batch(2, 8)).logits_BTV
    scores[..., : config.vocab_size].square().mean().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name in names if ".lora_" in name}


def test_the_plan_counts_a_quarter_of_the_frozen_matrices():
    config = tiny_config("llama-5m", vocab_size=512)
    tasks = [
        TrainingTask(config, RowLengths(64, 64), trained=plan_trained(config, [], NF4.model_copy(update=over)))
        for over in ({"quantize": "none"}, {})
    ]
    layout = ParallelLayout(EngineConfig(zero_stage=2, precision="bf16"), 1, 1)
    cluster = Cluster(1, 1, find_gpu("h100"))
    whole, quantized = (rank_memory(task, layout, cluster) for task in tasks)
    matrices = tasks[1].values.quantized
    assert matrices > 0.5 * tasks[1].values.weights
    assert whole.weights - quantized.weights == pytest.approx((2 - NF4_BYTES) * matrices, abs=2)


REFUSED = {
    "full": (["finetune.quantize=nf4"], "quantize goes with kind=lora, not full"),
    "dora": (
        ["finetune={kind: lora, quantize: nf4, dora: true}"],
        "dora takes norms of whole matrices, which quantize",
    ),
    "stage 3": (
        ["finetune={kind: lora, quantize: nf4}", "init.from=models/x", "engine.zero_stage=3"],
        "finetune.quantize keeps whole matrices, which engine.zero_stage=3 divides",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_matrix_to_quantise_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config("configs/run/llama_1b.yaml", overrides)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(LaunchError, match="needs the bitsandbytes package"):
        QuantizedMatrix(drawn(4, 4))
