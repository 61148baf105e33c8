"""Decoders against transformers: logits, loss, gradients, padding, packing, caches, exchange."""

from types import MappingProxyType

import pytest
import torch
import transformers

from pretrain.model import KVCache
from pretrain.objective.loss import sum_token_loss
from pretrain.training.step import TrainModule
from pretrain.types import IGNORE_INDEX, Batch
from tests.helpers.lent import check_gradients, lend
from tests.helpers.tables import thinned
from tests.helpers.theirs import build_theirs, makers
from tests.parity.exchange import check_round_trip
from tests.unit.model.tiny import packed_batch, random_batch

VOCAB = 61
LENGTH = 40
WINDOW = 5
# Logits are of order 1, so that this is of the last bits of fp32 sums taken in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
}  # fmt: skip
# Read-only, because a config of transformers adds keys to the mapping that it is given: each takes a copy of its own.
LLAMA3_SCALING = MappingProxyType({
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
})  # fmt: skip
YARN_SCALING = MappingProxyType({
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 2.0, "beta_slow": 0.1,
})  # fmt: skip


def gpt2(**values):
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=6, n_positions=64, initializer_range=0.1, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, attn_implementation="eager", **values,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(**values):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | {"head_dim": 8} | values)))


def mistral(**values):
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=WINDOW, **values))


def qwen2(**values):
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**(SIZES | values)))


def qwen3(**values):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=12, **values))


def mixtral(**values):
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**(SIZES | {"num_local_experts": 5} | values)))


def qwen3_moe(**values):
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(SIZES | experts | values), head_dim=12))


def olmo(**values):
    return transformers.OlmoForCausalLM(transformers.OlmoConfig(**(SIZES | values)))


def olmo2(**values):
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**(SIZES | values)))


def olmoe(**values):
    experts = {"num_experts": 6, "num_experts_per_tok": 3}
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**(SIZES | experts | values)))


def gpt_oss(**values):
    sizes = SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20, "head_dim": 12}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**(sizes | {"sliding_window": WINDOW} | values)))


def deepseek_v3(**values):
    sizes = SIZES | {"num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    sizes |= {"qk_nope_head_dim": 12, "v_head_dim": 10, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    sizes |= {"num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 1}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**(sizes | values)))


def olmo3(**values):
    sizes = SIZES | {"num_hidden_layers": 4, "sliding_window": WINDOW}
    return transformers.Olmo3ForCausalLM(transformers.Olmo3Config(**(sizes | values)))


def smollm3(**values):
    sizes = SIZES | {"num_hidden_layers": 4}
    return transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**(sizes | values)))


def granite(**values):
    factors = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7}
    sizes = SIZES | factors | {"logits_scaling": 1.5}
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**(sizes | values)))


def phi3(**values):
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**(SIZES | {"sliding_window": WINDOW} | values)))


def gemma(**values):
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**(SIZES | {"head_dim": 12} | values)))


def gemma2(**values):
    # Caps that these small scores reach.
    sizes = SIZES | {"head_dim": 12, "sliding_window": WINDOW, "query_pre_attn_scalar": 3}
    sizes |= {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.3}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**(sizes | values)))


def gemma3(**values):
    sizes = SIZES | {"head_dim": 12, "sliding_window": WINDOW, "query_pre_attn_scalar": 20}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**(sizes | values)))


NO_KV_HEADS = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}


def gpt_neox(**values):
    sizes = NO_KV_HEADS | {"rotary_pct": 0.5}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**(sizes | values)))


def phi(**values):
    return transformers.PhiForCausalLM(transformers.PhiConfig(**(SIZES | values)))


def stablelm(**values):
    sizes = SIZES | {"partial_rotary_factor": 0.5}
    return transformers.StableLmForCausalLM(transformers.StableLmConfig(**(sizes | values)))


def falcon(**values):
    sizes = NO_KV_HEADS | {"ffn_hidden_size": 96, "alibi": False}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**(sizes | values)))


def cohere(**values):
    return transformers.CohereForCausalLM(transformers.CohereConfig(**(SIZES | {"logit_scale": 0.3} | values)))


def cohere2(**values):
    sizes = SIZES | {"logit_scale": 0.3, "num_hidden_layers": 4, "sliding_window": WINDOW}
    return transformers.Cohere2ForCausalLM(transformers.Cohere2Config(**(sizes | values)))


def starcoder2(**values):
    return transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**(SIZES | values)))


DYNAMIC = MappingProxyType({"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.7})
LONGROPE = MappingProxyType({
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.1, 1.3, 1.9],
    "long_factor": [2.0, 3.0, 5.5, 8.0], "original_max_position_embeddings": 16,
})  # fmt: skip
MAKERS = {
    **makers("decoder"),
    "gpt2-unusual": lambda: gpt2(
        tie_word_embeddings=False, scale_attn_weights=False, n_inner=80, activation_function="gelu"
    ),
    "llama": lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rms_norm_eps=1e-5),
    "llama-3": lambda: llama(rope_parameters=dict(LLAMA3_SCALING), tie_word_embeddings=True),
    "llama-relu2": lambda: llama(hidden_act="relu2"),
    "llama-yarn": lambda: llama(rope_parameters=dict(YARN_SCALING)),
    "llama-yarn-exact": lambda: llama(rope_parameters=YARN_SCALING | {"truncate": False}, hidden_act="quick_gelu"),
    "llama-unusual": lambda: llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        attention_bias=True, mlp_bias=True, num_key_value_heads=6, head_dim=10, hidden_act="gelu",
    ),
    "granitemoehybrid-dense": lambda: build_theirs("granitemoehybrid", decoder={"experts": None}),
    "mamba2-biases": lambda: build_theirs("mamba2", decoder={"mamba2": {"bias": True, "groups": 3}}),
    "qwen2": lambda: qwen2(tie_word_embeddings=True),
    "qwen2-windows": lambda: qwen2(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "mixtral-windows": lambda: mixtral(sliding_window=WINDOW, router_aux_loss_coef=0.0),
    "qwen3_moe": lambda: qwen3_moe(norm_topk_prob=True),
    "qwen3_moe-unusual": lambda: qwen3_moe(use_sliding_window=True, sliding_window=WINDOW, tie_word_embeddings=True),
    "olmo-unusual": lambda: olmo(tie_word_embeddings=True, num_key_value_heads=6, attention_bias=True),
    "olmo2-unusual": lambda: olmo2(tie_word_embeddings=True, num_key_value_heads=6, rms_norm_eps=1e-3),
    "olmoe-unusual": lambda: olmoe(norm_topk_prob=True, num_key_value_heads=6, rms_norm_eps=1e-3),
    "gpt_oss-unusual": lambda: gpt_oss(
        rope_parameters=dict(YARN_SCALING), layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        tie_word_embeddings=True, num_key_value_heads=6, swiglu_limit=0.1, rms_norm_eps=1e-3,
    ),
    "deepseek_v3-unusual": lambda: deepseek_v3(
        rope_parameters=YARN_SCALING | {"mscale": 0.7, "mscale_all_dim": 1.5}, q_lora_rank=None, n_group=1,
        topk_group=1, first_k_dense_replace=0, n_shared_experts=1, norm_topk_prob=False, v_head_dim=20,
        tie_word_embeddings=True,
    ),
    "starcoder2": lambda: starcoder2(sliding_window=WINDOW),
    "starcoder2-unusual": lambda: starcoder2(
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        tie_word_embeddings=False, num_key_value_heads=6, head_dim=10, hidden_act="relu", norm_epsilon=1e-3,
    ),
    "starcoder2-norm-biases": lambda: starcoder2(use_bias=False),
    "llama-attention-biases": lambda: llama(attention_bias=True),
    "llama-mlp-biases": lambda: llama(mlp_bias=True, rope_parameters=dict(LONGROPE), max_position_embeddings=64),
    "qwen2-any-windows": lambda: qwen2(
        use_sliding_window=True, sliding_window=WINDOW, num_hidden_layers=5,
        layer_types=[f"{'sliding' if slides else 'full'}_attention" for slides in (0, 1, 1, 0, 1)],
    ),
    "qwen3-attention-biases": lambda: qwen3(attention_bias=True),
    "olmo3-unusual": lambda: olmo3(
        rope_parameters={
            "full_attention": YARN_SCALING | {"rope_theta": 700.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
        },
        attention_bias=True, tie_word_embeddings=True, layer_types=["full_attention", "sliding_attention"] * 2,
        initializer_range=0.2,
    ),
    "smollm3-unusual": lambda: smollm3(
        no_rope_layers=[0, 1, 1, 0], use_sliding_window=True, sliding_window=WINDOW, attention_bias=True,
        rope_parameters=dict(LLAMA3_SCALING), tie_word_embeddings=False,
    ),
    "granite-unusual": lambda: granite(
        attention_bias=True, tie_word_embeddings=True, rope_parameters=YARN_SCALING | {"mscale": 0.7,
        "mscale_all_dim": 1.5}, logits_scaling=7.0, num_key_value_heads=6,
    ),
    "phi3-longrope": lambda: phi3(
        sliding_window=None, head_dim=8, partial_rotary_factor=0.5, original_max_position_embeddings=16,
        rope_parameters=LONGROPE | {"short_factor": [1.0, 1.1], "long_factor": [2.0, 5.5]}, tie_word_embeddings=True,
    ),
    "gemma": lambda: gemma(num_key_value_heads=1),
    "gemma-unusual": lambda: gemma(attention_bias=True, tie_word_embeddings=False, head_dim=8),
    "gemma2": gemma2,
    "gemma2-unusual": lambda: gemma2(
        attn_logit_softcapping=None, layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        attention_bias=True, tie_word_embeddings=False, final_logit_softcapping=None,
    ),
    "gemma3_text": lambda: gemma3(num_hidden_layers=6),
    "gemma3-unusual": lambda: gemma3(
        layer_types=["full_attention", "full_attention", "sliding_attention"], final_logit_softcapping=1.3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "gpt_neox-unusual": lambda: gpt_neox(
        use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True, hidden_act="silu",
        rope_parameters={"rope_type": "linear", "factor": 2.5, "partial_rotary_factor": 0.25, "rope_theta": 77.0},
    ),
    "phi-norms": lambda: phi(qk_layernorm=True, layer_norm_eps=1e-2),
    "stablelm-unusual": lambda: stablelm(
        use_parallel_residual=True, use_qkv_bias=True, num_key_value_heads=6, tie_word_embeddings=True,
    ),
    "stablelm-norms": lambda: stablelm(qk_layernorm=True, use_parallel_residual=True, layer_norm_eps=1e-2),
    "stablelm-norm-of-one-head": lambda: stablelm(qk_layernorm=True, num_key_value_heads=1),
    "falcon-new": lambda: falcon(new_decoder_architecture=True, num_kv_heads=2, tie_word_embeddings=False),
    "falcon-unusual": lambda: falcon(
        multi_query=False, parallel_attn=False, bias=True, activation="silu", ffn_hidden_size=None,
    ),
    "cohere-unusual": lambda: cohere(attention_bias=True, tie_word_embeddings=False, num_key_value_heads=6),
    "cohere-norms": lambda: cohere(use_qk_norm=True, layer_norm_eps=1e-2),
    "cohere-norm-of-one-head": lambda: cohere(use_qk_norm=True, num_key_value_heads=1),
}  # fmt: skip


# One for each way to mix tokens, to place them, and to route; the others differ in what the whole row shows.
MIXES = pytest.mark.parametrize(
    "made",
    thinned(
        MAKERS,
        len(MAKERS),
        [
            "gpt2", "llama", "mixtral", "gpt_oss-unusual", "deepseek_v3-unusual", "deepseek_v2", "olmo_hybrid",
            "qwen3_next", "bamba", "lfm2", "mamba2-biases", "granitemoehybrid", "granitemoehybrid-dense", "falcon-new",
            "cohere2", "gemma3-unusual", "olmo3-unusual", "smollm3-unusual", "phi3-longrope", "qwen2-any-windows",
            "starcoder2-unusual", "stablelm-norm-of-one-head", "glm4_moe_lite", "flex_olmo",
        ],
    ),
    indirect=True,
)  # fmt: skip


@pytest.fixture(scope="module", params=MAKERS)
def made(request, tmp_path_factory):
    torch.manual_seed(0)
    return lend(MAKERS[request.param](), tmp_path_factory.mktemp("theirs"))


def padded_batch():
    """Rows of 40, 1 and 17 tokens, padded at the end; True where a token is real."""
    plain = random_batch(3, LENGTH, vocab_size=VOCAB)
    lengths = torch.tensor([LENGTH, 1, 17], dtype=torch.int32)
    real = torch.arange(LENGTH) < lengths[:, None]
    targets = plain.targets_BT.masked_fill(~real, IGNORE_INDEX)
    return Batch(plain.tokens_BT, targets, lengths_B=lengths), real


def check_loss_and_gradients(lent, batch, logits):
    """Asserts that losses over the targets of a batch agree, and their gradients."""
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten())
    expected.backward()
    found = sum_token_loss(lent.ours, batch)
    mean = found.loss_sum / batch.num_targets()
    mean.backward()
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=0)
    check_gradients(lent)


def test_logits_loss_and_gradients_agree(lent):
    batch = random_batch(3, LENGTH, vocab_size=VOCAB)
    expected = lent.theirs(input_ids=batch.tokens_BT).logits
    torch.testing.assert_close(lent.ours(batch).logits_BTV[..., :VOCAB], expected, **TOLERANCE)
    check_loss_and_gradients(lent, batch, expected)


@pytest.mark.parametrize("maker", [mixtral, qwen3_moe, olmoe, gpt_oss])
def test_the_loss_with_that_of_the_router_agrees_and_so_do_gradients(maker, tmp_path):
    torch.manual_seed(0)
    # Theirs mixes the loads of all layers; of one layer it is the published loss.
    lent = lend(maker(num_hidden_layers=1, router_aux_loss_coef=0.5, output_router_logits=True), tmp_path / "theirs")
    batch = random_batch(3, LENGTH, vocab_size=VOCAB)
    output = lent.theirs(input_ids=batch.tokens_BT, labels=batch.targets_BT, shift_labels=batch.targets_BT)
    output.loss.backward()
    module = TrainModule(lent.ours, sum_token_loss).train()
    shown = module(batch)[1]
    module.balance.follow(shown[-module.balance.num_shown :].tolist())  # the loads of this very batch
    loss = module(batch)[0] / batch.num_targets()
    loss.backward()
    torch.testing.assert_close(loss, output.loss, rtol=1e-5, atol=0)
    assert output.aux_loss > 2
    check_gradients(lent)


@MIXES
def test_padded_rows_agree(lent):
    batch, real = padded_batch()
    expected = lent.theirs(input_ids=batch.tokens_BT, attention_mask=real.long()).logits
    torch.testing.assert_close(lent.ours(batch).logits_BTV[real][:, :VOCAB], expected[real], **TOLERANCE)
    check_loss_and_gradients(lent, batch, expected)


@MIXES
def test_packed_rows_agree_with_the_documents_alone(lent):
    lengths = [9, 1, 20, 10]
    batch = packed_batch([lengths], vocab_size=VOCAB)
    with torch.no_grad():
        found = lent.ours(batch).logits_BTV[0, :, :VOCAB]
        alone = [lent.theirs(input_ids=tokens[None]).logits[0] for tokens in batch.tokens_BT[0].split(lengths)]
    torch.testing.assert_close(found, torch.cat(alone), **TOLERANCE)


@MIXES
def test_a_cache_filled_step_by_step_agrees_with_the_whole_row(lent):
    tokens = random_batch(2, LENGTH, vocab_size=VOCAB).tokens_BT
    cache = KVCache(lent.ours.num_layers, capacity=LENGTH)
    with torch.no_grad():
        # A prompt at once, then token by token.
        pieces = [lent.ours(Batch(part, part), cache=cache).logits_BTV for part in tokens.split([7] + [1] * 33, dim=1)]
        expected = lent.theirs(input_ids=tokens).logits
    torch.testing.assert_close(torch.cat(pieces, dim=1)[..., :VOCAB], expected, **TOLERANCE)


def test_an_export_is_the_model_that_was_imported(lent, tmp_path):
    tokens = random_batch(2, LENGTH, vocab_size=VOCAB).tokens_BT
    check_round_trip(lent, transformers.AutoModelForCausalLM, tmp_path / "ours", input_ids=tokens)


@pytest.mark.parametrize("factor", [2.7, 1.0])
def test_frequencies_that_follow_the_length_agree_in_one_pass_and_step_by_step(factor, tmp_path):
    torch.manual_seed(0)
    theirs = llama(rope_parameters=DYNAMIC | {"factor": factor}, max_position_embeddings=16)
    lent = lend(theirs, tmp_path / "theirs")
    # Their limit is where the frequencies begin to change; ours is the context that they are stretched to.
    limit = int(16 * factor)
    assert lent.ours.max_seq_len == limit
    tokens = random_batch(2, limit, vocab_size=VOCAB).tokens_BT
    cache = KVCache(lent.ours.num_layers, capacity=limit)
    past, steps = None, []
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits
        torch.testing.assert_close(lent.ours(Batch(tokens, tokens)).logits_BTV[..., :VOCAB], expected, **TOLERANCE)
        theirs(input_ids=tokens[:, :5])  # forgets the length of the last row
        for part in tokens.split([7] + [1] * (limit - 7), dim=1):
            output = theirs(input_ids=part, past_key_values=past, use_cache=True)
            past = output.past_key_values
            steps.append((lent.ours(Batch(part, part), cache=cache).logits_BTV[..., :VOCAB], output.logits))
    for found, their_logits in steps:
        torch.testing.assert_close(found, their_logits, **TOLERANCE)
    check_round_trip(lent, transformers.AutoModelForCausalLM, tmp_path / "ours", input_ids=tokens)


@pytest.mark.parametrize("maker", [gpt2, llama, qwen3, starcoder2, gpt_neox, gemma3, falcon])
def test_a_model_without_a_head_is_exchanged_as_one(maker, tmp_path):
    torch.manual_seed(0)
    lent = lend(maker(tie_word_embeddings=False).base_model, tmp_path / "theirs")
    assert lent.release.config.head.kind == "none"
    batch = random_batch(2, LENGTH, vocab_size=VOCAB)
    with torch.no_grad():
        expected = lent.theirs(input_ids=batch.tokens_BT).last_hidden_state
        torch.testing.assert_close(lent.ours(batch).hidden_BTD, expected, **TOLERANCE)
    check_round_trip(lent, transformers.AutoModel, tmp_path / "ours", input_ids=batch.tokens_BT)
