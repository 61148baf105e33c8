"""Graphs of compiled blocks over row lengths, documents and passes: a bounded number, and no fallback to eager."""

from functools import partial

import pytest
import torch

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.model import build_model
from pretrain.model.backends import flex
from pretrain.model.build import init_weights
from pretrain.types import Batch, StackRows

LENGTHS_AND_DOCUMENTS = [(64, 2), (64, 16), (48, 3), (32, 1), (32, 5)]
"""Three lengths of rows; numbers of documents whose longest have different bounds."""


def packed(length, documents, *, has_source):
    tokens = torch.zeros(2, length, dtype=torch.int64)
    numbers = (torch.arange(length) * documents // length).int().expand(2, length).contiguous()
    source = StackRows(tokens, documents_BT=numbers) if has_source else None
    return Batch(tokens, tokens, documents_BT=numbers, source=source)


# Kernels that run on CUDA alone. What they are given decides on the graph, so the stand-ins read it.


def varlen_kernel(q, k, v, prepared, scale):
    return q + (prepared.max_queries + prepared.window[0])


def flex_kernel(q_BNTH, k, v, *, score_mod, block_mask, scale, enable_gqa, kernel_options):
    if score_mod is None or not kernel_options["FORCE_USE_FLEX_ATTENTION"]:
        return q_BNTH + 1
    heads, places = (torch.arange(size, device=q_BNTH.device) for size in q_BNTH.shape[1:3])
    scores_BNT = score_mod(q_BNTH[..., 0], None, heads[:, None], places, places)
    return (q_BNTH + scores_BNT[..., None]).to(q_BNTH.dtype)


@pytest.mark.parametrize(
    ("model", "attention", "scope", "kinds"),
    [
        pytest.param({"preset": "llama-tiny"}, "varlen", "block", 1, marks=pytest.mark.long),
        # The first block has no norm of attention, others are global or local.
        ({"preset": "modernbert-tiny"}, "varlen", "block", 3),
        ({"preset": "t5-tiny", "encoder": {"dropout": 0}, "decoder": {"dropout": 0}}, "flex", "block", 2),
        pytest.param({"preset": "llama-tiny"}, "varlen", "stack", 1, marks=pytest.mark.long),
    ],
    ids=["llama", "modernbert", "t5", "llama, stack"],
)
def test_a_kind_of_block_has_few_graphs_and_none_runs_eagerly(model, attention, scope, kinds, monkeypatch):
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    monkeypatch.setattr(flex, "_compiled", {"flex_attention": flex_kernel, "create_block_mask": lambda *_, **__: 0}.get)
    # Restored at the end: the model raises the limit of the process.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8):
        config = ModelConfig.model_validate(expand_preset({**model, "vocab_size": 64}))
        compiled = {"compile": True, "compile_scope": scope}
        engine = PLAIN_ENGINE.model_copy(update={**compiled, "attention": attention, "precision": "bf16"})
        # Built for no device: a CPU has neither of these backends.
        built = build_model(config, engine, torch.device("meta")).to_empty(device="cpu").to(torch.bfloat16)
        init_weights(built, config, seed=0)
        for stack in built.stacks if attention == "varlen" else ():
            stack.backend.kernel = varlen_kernel
        for length, documents in LENGTHS_AND_DOCUMENTS:
            batch = packed(length, documents, has_source=len(built.stacks) == 2)
            for training in (True, False):
                built.train(training)
                with torch.set_grad_enabled(training):
                    found = built(batch, logits=False)
        with torch.compiler.set_stance("force_eager"):
            plain = built(batch, logits=False)
        assert torch.equal(plain.hidden_BTD, found.hidden_BTD)
    assert 2 * kinds <= len(graphs) <= 6 * kinds
