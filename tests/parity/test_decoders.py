"""GPT-2 and LLaMA against transformers: logits, loss, gradients, packing and greedy decoding.

A small random model of theirs lends its weights to ours. What exchange does is spelt out here on purpose: query, key
and value stacked, gate and up stacked, GPT-2's Conv1D weights transposed.
"""

import pytest
import torch

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.generate import GREEDY, generate
from pretrain.model import Transformer, build_model
from pretrain.objective.causal import causal_loss
from tests.unit.model.tiny import CPU, packed_batch, random_batch

transformers = pytest.importorskip("transformers")

VOCAB = 61
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def llama_pair():
    theirs_config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-6, initializer_range=0.1,
        tie_word_embeddings=False, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    stack = StackConfig(
        layers=3, width=48, heads=6, kv_heads=2, ff_width=96, norm_eps=1e-6, rope_theta=500.0, position="rotary"
    )
    config = ModelConfig(decoder=stack, vocab_size=VOCAB, vocab_multiple=16, max_seq_len=64)
    theirs, names = transformers.LlamaForCausalLM(theirs_config), {}
    for i in range(3):
        ours, layer = f"decoder.blocks.{i}.", f"model.layers.{i}."
        names[ours + "attention_norm.weight"] = [layer + "input_layernorm.weight"]
        names[ours + "feedforward_norm.weight"] = [layer + "post_attention_layernorm.weight"]
        names[ours + "attention.qkv.weight"] = [layer + f"self_attn.{x}_proj.weight" for x in "qkv"]
        names[ours + "attention.output.weight"] = [layer + "self_attn.o_proj.weight"]
        names[ours + "feedforward.gate_up.weight"] = [layer + f"mlp.{x}_proj.weight" for x in ("gate", "up")]
        names[ours + "feedforward.down.weight"] = [layer + "mlp.down_proj.weight"]
    names["embedding.weight"] = ["model.embed_tokens.weight"]
    names["decoder.norm.weight"] = ["model.norm.weight"]
    names["head.weight"] = ["lm_head.weight"]
    return theirs, *lend(theirs, config, names, transposed=())


def gpt2_pair():
    theirs_config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=6, n_positions=64, initializer_range=0.1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    stack = StackConfig(
        layers=3, width=48, heads=6, ff_width=192, activation="gelu_tanh", gated=False, norm="layer", bias=True,
        position="learned",
    )  # fmt: skip
    config = ModelConfig(decoder=stack, vocab_size=VOCAB, vocab_multiple=16, max_seq_len=64, tied_embeddings=True)
    theirs, names = transformers.GPT2LMHeadModel(theirs_config), {}
    parts = {
        "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj",
        "feedforward_norm": "ln_2", "feedforward.up": "mlp.c_fc", "feedforward.down": "mlp.c_proj",
    }  # fmt: skip
    for i in range(3):
        for ours, their in parts.items():
            for kind in ("weight", "bias"):
                names[f"decoder.blocks.{i}.{ours}.{kind}"] = [f"transformer.h.{i}.{their}.{kind}"]
    names["embedding.weight"] = ["transformer.wte.weight"]
    names["decoder.position.weight"] = ["transformer.wpe.weight"]
    for kind in ("weight", "bias"):
        names[f"decoder.norm.{kind}"] = [f"transformer.ln_f.{kind}"]
    return theirs, *lend(theirs, config, names, transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def lend(theirs, config, names, *, transposed):
    """Gives biases and norms values that matter, then copies all weights to a model of ours."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    ours = build_model(config, attention="sdpa", activation_checkpointing="none", compile=False, device=CPU)
    assert {name for name, _ in ours.named_parameters()} == set(names)
    values = stacked(names, dict(theirs.named_parameters()), transposed)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.zero_()
            parameter[: values[name].shape[0]] = values[name]
    return ours, lambda tensors: stacked(names, tensors, transposed)


def stacked(names, tensors, transposed):
    return {
        ours: torch.cat([tensors[n].t() if n.endswith(transposed) else tensors[n] for n in parts])
        for ours, parts in names.items()
    }


PAIRS = {"llama": llama_pair, "gpt2": gpt2_pair}


@pytest.fixture(params=PAIRS)
def pair(request):
    torch.manual_seed(0)
    return PAIRS[request.param]()


def test_logits_loss_and_gradients_agree(pair):
    theirs, ours, to_ours = pair
    batch = random_batch(3, 40, vocab_size=VOCAB)
    output = theirs(input_ids=batch.tokens_BT)
    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch.targets_BT.flatten())
    loss.backward()
    torch.testing.assert_close(ours(batch).logits_BTV[..., :VOCAB], output.logits, **TOLERANCE)
    found = causal_loss(ours, batch)
    mean = found.loss_sum / found.num_targets
    mean.backward()
    torch.testing.assert_close(mean, loss, **TOLERANCE)
    expected = to_ours({name: p.grad for name, p in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        grad = parameter.grad[: expected[name].shape[0]]
        assert (grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_packed_rows_agree_with_the_documents_alone(pair):
    theirs, ours, _ = pair
    lengths = [9, 1, 20, 10]
    batch = packed_batch([lengths], vocab_size=VOCAB)
    with torch.no_grad():
        found = ours(batch).logits_BTV[0, :, :VOCAB]
        alone = [theirs(input_ids=tokens[None]).logits[0] for tokens in batch.tokens_BT[0].split(lengths)]
    torch.testing.assert_close(found, torch.cat(alone), **TOLERANCE)


def test_greedy_decoding_agrees_token_for_token(pair):
    theirs, ours, _ = pair
    prompt = random_batch(2, 6, vocab_size=VOCAB).tokens_BT
    their_ids = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=25, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    assert isinstance(ours, Transformer)
    assert generate(ours, prompt, 25, GREEDY) == their_ids[:, 6:].tolist()
