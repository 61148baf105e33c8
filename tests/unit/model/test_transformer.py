"""The whole model: names, tying, causality, packing, checkpointing, compile, precision."""

import re
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config.engine import PLAIN_ENGINE, EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.model import build as model_build
from pretrain.model import build_model
from pretrain.model.block import _SAVED_OPERATIONS, _policy
from pretrain.model.parts.feedforward import ACTIVATIONS, FeedForward
from pretrain.objective.loss import sum_token_loss
from pretrain.types import Batch
from tests.helpers.tables import pairwise
from tests.unit.model.tiny import (
    CPU,
    build,
    encoder_config,
    packed_batch,
    random_batch,
    single_documents,
    tiny_config,
)

SHAPES = {
    "llama": {},
    "llama tied": {"model": {"tied_embeddings": True}},
    "gpt2": {"preset": "gpt2-tiny"},
    "gpt2 without bias": {"preset": "gpt2-tiny", "bias": False, "activation": "gelu"},
    "post-norm": {"preset": "gpt2-tiny", "norm_placement": "post", "activation": "relu"},
    "norms of outputs and of all heads": {"norm_placement": "output", "qk_norm": "whole"},
    "LayerNorm of heads": {"qk_norm": "layer", "norm": "layer", "norm_bias": True},
    "LayerNorm of heads, each by its weights": {"qk_norm": "heads", "kv_heads": 1},
    "half of each head rotated": {"rope_fraction": 0.5, "activation": "relu2"},
    "values and streams mixed": {"value_residual": True, "value_embeddings": 1, "residual_scalars": True},
    "n-grams": {"model": {"ngram_embeddings": 2, "ngram_rows": 50, "scaled_embeddings": True}},
    "gated gelu, wide heads, no positions": {"head_width": 24, "activation": "gelu", "position": "none", "bias": True},
}


def logits_of(model, batch):
    with torch.no_grad():
        return model(batch).logits_BTV


def gradients(model, batch):
    model.zero_grad()
    output = sum_token_loss(model, batch)
    output.loss_sum.backward()
    return output.loss_sum.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_parameter_names_are_those_of_checkpoints():
    names = [name for name, _ in build(tiny_config()).named_parameters()]
    block = ["attention_norm", "attention.qkv", "attention.output", "feedforward_norm", "feedforward.gate_up"]
    assert names == [
        "embedding.weight",
        *(f"decoder.blocks.{i}.{part}.weight" for i in range(2) for part in [*block, "feedforward.down"]),
        "decoder.norm.weight",
        "head.weight",
    ]
    gpt2 = [name for name, _ in build(tiny_config("gpt2-tiny")).named_parameters()]
    assert "decoder.position.weight" in gpt2
    assert "decoder.blocks.1.feedforward.up.bias" in gpt2
    assert "head.weight" not in gpt2


@pytest.mark.parametrize("gated", [False, True])
def test_relu2_is_the_square_of_what_is_positive(gated):
    layer = FeedForward(tiny_config(activation="relu2", gated=gated).last_stack).double()
    x = torch.randn(3, 5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if gated:
        gate, up = layer.gate_up.weight.chunk(2)
        hidden = (x @ gate.T).clamp(min=0) ** 2 * (x @ up.T)
    else:
        hidden = (x @ layer.up.weight.T).clamp(min=0) ** 2
    torch.testing.assert_close(layer(x), hidden @ layer.down.weight.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_relu2_and_its_gradient_are_those_of_both_functions_bit_by_bit(dtype):
    values = 1e-3 * torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)  # subnormal in fp16
    found = []
    for function in (ACTIVATIONS["relu2"], lambda x: torch.nn.functional.relu(x).square()):
        x = values.clone().requires_grad_()
        out = function(x)
        out.backward(values.roll(1))
        found.append((out, x.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_tied_head_is_the_embedding_itself():
    model = build(tiny_config("gpt2-tiny"))
    assert model.head.weight is model.embedding.weight
    untied = build(tiny_config("gpt2-tiny", model={"tied_embeddings": False}))
    assert untied.head.weight is not untied.embedding.weight


@pytest.mark.parametrize("shape", SHAPES)
def test_causal_positions_do_not_see_the_future(shape):
    model = build(tiny_config(**SHAPES[shape]), dtype=torch.float64)
    batch = random_batch(2, 12)
    embedded = []
    model.embedding.register_forward_hook(
        lambda *args: embedded.append(args[-1].detach().requires_grad_()) or embedded[0]
    )
    hidden = model(batch, logits=False).hidden_BTD[:, 5]
    # Not their sum: a layer norm without bias keeps it at 0, whatever comes in.
    (hidden * torch.linspace(-1, 1, hidden.shape[-1], dtype=hidden.dtype)).sum().backward()
    reach = embedded[0].grad.abs().sum(dim=(0, 2))
    assert (reach[:6] > 0).all()
    assert (reach[6:] == 0).all()


def test_an_encoder_without_positions_is_permutation_equivariant():
    model = build(encoder_config(position="none"), dtype=torch.float64)
    batch = random_batch(1, 9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3))
    shuffled = Batch(batch.tokens_BT[:, order], batch.targets_BT)
    torch.testing.assert_close(logits_of(model, shuffled), logits_of(model, batch)[:, order], rtol=1e-10, atol=1e-10)


@pairwise(shape=list(SHAPES), attention=["eager", "sdpa"], dtype=[torch.float64, torch.float32])
def test_a_packed_row_equals_its_documents_run_one_by_one(shape, attention, dtype):
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4
    config = tiny_config(**SHAPES[shape])
    model = build(config, attention=attention, dtype=dtype, scale=3.0)
    rows = [[7, 1, 12], [20], [10, 10]]
    packed = packed_batch(rows)
    loss, grads = gradients(model, packed)
    found = logits_of(model, packed)
    alone = [document for i, lengths in enumerate(rows) for document in single_documents(packed, i, lengths)]
    for row, lengths in enumerate(rows):
        expected = torch.cat([logits_of(model, d) for d in single_documents(packed, row, lengths)], dim=1)
        torch.testing.assert_close(found[row : row + 1], expected, rtol=tolerance, atol=tolerance)
    losses, each = zip(*(gradients(model, document) for document in alone), strict=True)
    torch.testing.assert_close(loss, sum(losses), rtol=tolerance, atol=tolerance)
    for name, grad in grads.items():
        expected = sum(part[name] for part in each)
        assert (grad - expected).norm() <= tolerance * expected.norm(), name


@settings(max_examples=25)
@given(data=st.data(), attention=st.sampled_from(["eager", "sdpa"]))
def test_changing_one_document_never_changes_the_logits_of_another(data, attention):
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=5))
    changed = data.draw(st.integers(0, len(lengths) - 1))
    model = build(tiny_config(layers=2), attention=attention)
    batch = packed_batch([lengths])
    inside = batch.documents_BT == changed
    other = Batch(
        torch.where(inside, (batch.tokens_BT + 1) % 61, batch.tokens_BT),
        batch.targets_BT,
        positions_BT=batch.positions_BT,
        documents_BT=batch.documents_BT,
    )
    before, after = logits_of(model, batch), logits_of(model, other)
    assert torch.equal(before[~inside], after[~inside])
    assert not torch.equal(before[inside], after[inside])


@pytest.mark.parametrize("shape", SHAPES)
def test_full_checkpointing_is_bit_identical(shape):
    config, batch = tiny_config(**SHAPES[shape]), packed_batch([[9, 6], [15]])
    loss, grads = gradients(build(config), batch)
    again, recomputed = gradients(build(config, checkpointing="full"), batch)
    assert torch.equal(loss, again)
    assert all(torch.equal(grad, recomputed[name]) for name, grad in grads.items())


def test_full_checkpointing_is_bit_identical_with_dropout():
    config, batch = tiny_config(dropout=0.2), random_batch(2, 10)
    torch.manual_seed(5)
    loss, grads = gradients(build(config), batch)
    torch.manual_seed(5)
    again, recomputed = gradients(build(config, checkpointing="full"), batch)
    assert torch.equal(loss, again)
    assert all(torch.equal(grad, recomputed[name]) for name, grad in grads.items())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_selective_checkpointing_agrees(attention):
    config, batch = tiny_config(dropout=0.2), packed_batch([[9, 6], [15]])
    torch.manual_seed(5)
    loss, grads = gradients(build(config, attention=attention), batch)
    torch.manual_seed(5)
    again, recomputed = gradients(build(config, attention=attention, checkpointing="selective"), batch)
    assert torch.equal(loss, again)
    assert all(torch.equal(grad, recomputed[name]) for name, grad in grads.items())


def test_checkpointing_keeps_what_its_mode_says():
    batch = random_batch(2, 64)

    def saved_elements(checkpointing, every=1):
        model, sizes = build(tiny_config(layers=4), checkpointing=checkpointing, every=every), {}
        parameters = {p.data_ptr() for p in model.parameters()}

        def pack(tensor):
            if tensor.data_ptr() not in parameters:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(batch, logits=False)
        assert output.hidden_BTD.requires_grad
        return sum(sizes.values())

    none, full = saved_elements("none"), saved_elements("full")
    assert full < none / 4
    assert saved_elements("full", every=4) > none * 3 / 4
    assert full < saved_elements("full", every=2) < none


def test_dropout_acts_in_training_only():
    model, batch = build(tiny_config(dropout=0.5)), random_batch(1, 8)
    assert not torch.equal(logits_of(model, batch), logits_of(model, batch))
    model.eval()
    assert torch.equal(logits_of(model, batch), logits_of(model, batch))


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_bf16_is_close_to_fp32(shape):
    config, batch = tiny_config(**SHAPES[shape]), packed_batch([[20, 12]])
    exact = build(config, scale=1.0)
    rounded = build(config, scale=1.0, dtype=torch.bfloat16)
    loss, grads = gradients(exact, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast_loss, autocast_grads = gradients(exact, batch)
    bf16_loss, bf16_grads = gradients(rounded, batch)
    assert bf16_loss.dtype == autocast_loss.dtype == torch.float32
    for other_loss, others in ((bf16_loss, bf16_grads), (autocast_loss, autocast_grads)):
        # bf16 keeps 8 bits; the loss is a sum over many roundings, a gradient a product of a few.
        torch.testing.assert_close(other_loss, loss, rtol=2e-3, atol=0)
        for name, grad in grads.items():
            assert (others[name].float() - grad).norm() < 0.03 * grad.norm(), name


def counted_products(checkpointing, monkeypatch):
    """Trains a compiled model of 12 blocks; returns loss, gradients, graphs, and the products and attentions run."""
    products = {"aten::mm", "aten::addmm", "aten::bmm"}
    graphs, run = [], []

    def count(graph, _):
        names = [node.target.name() for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        number = sum(name in products or "_scaled_dot_product" in name for name in names)
        graphs.append(number)

        def execute(*arguments):
            run.append(number)
            return graph.forward(*arguments)

        return make_boxed_func(execute)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "compile", partial(torch.compile, backend=backend))
        engine = {"compile": True, "attention": "sdpa", "activation_checkpointing": checkpointing}
        model = build_model(tiny_config(layers=12), PLAIN_ENGINE.model_copy(update=engine), CPU)
    model.load_state_dict(build(tiny_config(layers=12)).state_dict())
    return *gradients(model, random_batch(2, 16)), len(graphs), sum(run)


@pytest.mark.parametrize(
    "modes", [("selective", "full"), pytest.param(("none", "selective", "full"), marks=pytest.mark.long)]
)
def test_a_compiled_block_recomputes_what_its_mode_says_in_one_graph_for_all(modes, monkeypatch):
    found = {mode: counted_products(mode, monkeypatch) for mode in modes}
    loss, grads, *_ = found[modes[0]]
    for other_loss, others, graphs, _ in found.values():
        assert graphs == 2, "forward and backward, for all blocks"
        torch.testing.assert_close(other_loss, loss)
        torch.testing.assert_close(others, grads)
    products = {mode: run for mode, (*_, run) in found.items()}
    assert len({products[mode] for mode in modes[:-1]}) == 1
    assert products["selective"] < products["full"]


def test_a_block_recomputes_the_products_that_its_mode_says():
    config, batch = tiny_config(), random_batch(2, 16)
    flops = {}
    for mode in ("none", "selective", "full"):
        with FlopCounterMode(display=False) as counter:
            gradients(build(config, checkpointing=mode), batch)
        flops[mode] = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        build(config)(batch, logits=False)
    # Recomputation of a block ends at the last result that its backward pass needs, the input of `down`.
    stack = config.decoder
    down = 2 * batch.tokens_BT.numel() * stack.layers * stack.ff_width * stack.width
    assert flops["none"] == flops["selective"] == flops["full"] - (counter.get_total_flops() - down)


def test_selective_checkpointing_keeps_the_result_of_every_kernel_of_attention():
    import torch.nn.attention.varlen  # registers its operation

    attention = re.compile(r"aten::_scaled_dot_product_(flash|efficient|cudnn)_attention(_for_cpu)?")
    kernels = set(filter(attention.fullmatch, torch._C._dispatch_get_all_op_names()))
    assert len(kernels) == 4
    kernels |= {torch.ops.torch_attn._varlen_attn.default.name(), torch.ops.higher_order.flex_attention.name()}
    assert kernels < _SAVED_OPERATIONS
    assert _policy(None, torch.ops.torch_attn._varlen_attn.default) == CheckpointPolicy.MUST_SAVE


@pytest.mark.long
def test_compiled_blocks_agree_and_keep_their_names():
    config, batch = tiny_config(layers=1), random_batch(2, 16)
    compiled = build_model(config, PLAIN_ENGINE.model_copy(update={"compile": True}), CPU)
    plain = build(config)
    compiled.load_state_dict(plain.state_dict())
    loss, grads = gradients(plain, batch)
    try:
        compiled_loss, compiled_grads = gradients(compiled, batch)
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"no compiler for the CPU: {error}".splitlines()[0])
    torch.testing.assert_close(compiled_loss, loss)
    torch.testing.assert_close(compiled_grads, grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "setting", "compiler", "is_compiled"),
    [
        ("cuda", "auto", "/usr/bin/cc", True),
        ("cuda", "auto", None, False),
        ("cpu", "auto", "/usr/bin/cc", False),
        ("cpu", True, None, True),  # torch says what is missing
        ("cuda", False, "/usr/bin/cc", False),
    ],
)
def test_blocks_are_compiled_on_cuda_where_there_is_a_compiler_unless_told(
    device, setting, compiler, is_compiled, monkeypatch, caplog
):
    monkeypatch.setattr(model_build.shutil, "which", lambda name: compiler)
    engine = EngineConfig(compile=setting)
    model_build._warn_uncompiled.cache_clear()
    assert model_build.compiles_on(engine, torch.device(device)) == is_compiled
    says = "blocks run uncompiled, slower: Triton needs a C compiler"
    assert (says in caplog.text) == (device == "cuda" and setting == "auto" and compiler is None)


def test_a_model_on_the_meta_device_has_no_storage():
    config = ModelConfig.model_validate(expand_preset({"preset": "llama-1b", "vocab_size": 128256}))
    meta = torch.device("meta")
    model = build_model(config, PLAIN_ENGINE, meta)
    assert all(p.is_meta for p in model.parameters())
    assert model.head.weight is model.embedding.weight
    assert sum(p.numel() for p in model.parameters()) == 1_235_814_400


def test_published_gpt2_has_its_published_number_of_parameters():
    over = {"preset": "gpt2-124m", "vocab_size": 50257, "vocab_multiple": 1}
    meta = torch.device("meta")
    model = build_model(ModelConfig.model_validate(expand_preset(over)), PLAIN_ENGINE, meta)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
