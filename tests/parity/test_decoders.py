"""Decoders against transformers: logits, loss, gradients, padding, packing, caches, exchange."""

import pytest
import torch
import transformers

from pretrain.model import KVCache
from pretrain.objective.loss import sum_token_loss
from pretrain.train.step import TrainModule
from pretrain.types import IGNORE_INDEX, Batch
from tests.helpers.lent import check_gradients, lend
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
LLAMA3_SCALING = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_SCALING = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 2.0, "beta_slow": 0.1,
}  # fmt: skip


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
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, **values))


def qwen3(**values):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=12, **values))


def mixtral(**values):
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**(SIZES | {"num_local_experts": 5} | values)))


def qwen3_moe(**values):
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(SIZES | experts | values), head_dim=12))


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


def starcoder2(**values):
    return transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**(SIZES | values)))


MAKERS = {
    "gpt2": gpt2,
    "gpt2-unusual": lambda: gpt2(
        tie_word_embeddings=False, scale_attn_weights=False, n_inner=80, activation_function="gelu"
    ),
    "llama": lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rms_norm_eps=1e-5),
    "llama-3": lambda: llama(rope_parameters=LLAMA3_SCALING, tie_word_embeddings=True),
    "llama-relu2": lambda: llama(hidden_act="relu2"),
    "llama-yarn": lambda: llama(rope_parameters=YARN_SCALING),
    "llama-yarn-exact": lambda: llama(rope_parameters=YARN_SCALING | {"truncate": False}, hidden_act="quick_gelu"),
    "llama-unusual": lambda: llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        attention_bias=True, mlp_bias=True, num_key_value_heads=6, head_dim=10, hidden_act="gelu",
    ),
    "mistral": mistral,
    "qwen2": lambda: qwen2(tie_word_embeddings=True),
    "qwen2-windows": lambda: qwen2(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": qwen3,
    "mixtral": mixtral,
    "mixtral-windows": lambda: mixtral(sliding_window=WINDOW, router_aux_loss_coef=0.0),
    "qwen3_moe": lambda: qwen3_moe(norm_topk_prob=True),
    "qwen3_moe-unusual": lambda: qwen3_moe(use_sliding_window=True, sliding_window=WINDOW, tie_word_embeddings=True),
    "olmo2": olmo2,
    "olmo2-unusual": lambda: olmo2(tie_word_embeddings=True, num_key_value_heads=6, rms_norm_eps=1e-3),
    "olmoe": olmoe,
    "olmoe-unusual": lambda: olmoe(norm_topk_prob=True, num_key_value_heads=6, rms_norm_eps=1e-3),
    "gpt_oss": gpt_oss,
    "gpt_oss-unusual": lambda: gpt_oss(
        rope_parameters=YARN_SCALING, layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        tie_word_embeddings=True, num_key_value_heads=6, swiglu_limit=0.1, rms_norm_eps=1e-3,
    ),
    "deepseek_v3": deepseek_v3,
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
}  # fmt: skip


@pytest.fixture(params=MAKERS)
def lent(request, tmp_path):
    torch.manual_seed(0)
    return lend(MAKERS[request.param](), tmp_path / "theirs")


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
    module.balance.follow(shown[-module.num_routed :].tolist())  # the loads of this very batch
    loss = module(batch)[0] / batch.num_targets()
    loss.backward()
    torch.testing.assert_close(loss, output.loss, rtol=1e-5, atol=0)
    assert output.aux_loss > 2
    check_gradients(lent)


def test_padded_rows_agree(lent):
    batch, real = padded_batch()
    expected = lent.theirs(input_ids=batch.tokens_BT, attention_mask=real.long()).logits
    torch.testing.assert_close(lent.ours(batch).logits_BTV[real][:, :VOCAB], expected[real], **TOLERANCE)
    check_loss_and_gradients(lent, batch, expected)


def test_packed_rows_agree_with_the_documents_alone(lent):
    lengths = [9, 1, 20, 10]
    batch = packed_batch([lengths], vocab_size=VOCAB)
    with torch.no_grad():
        found = lent.ours(batch).logits_BTV[0, :, :VOCAB]
        alone = [lent.theirs(input_ids=tokens[None]).logits[0] for tokens in batch.tokens_BT[0].split(lengths)]
    torch.testing.assert_close(found, torch.cat(alone), **TOLERANCE)


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


@pytest.mark.parametrize("maker", [gpt2, llama, qwen3, starcoder2])
def test_a_model_without_a_head_is_exchanged_as_one(maker, tmp_path):
    torch.manual_seed(0)
    lent = lend(maker(tie_word_embeddings=False).base_model, tmp_path / "theirs")
    assert lent.release.config.head.kind == "none"
    batch = random_batch(2, LENGTH, vocab_size=VOCAB)
    with torch.no_grad():
        expected = lent.theirs(input_ids=batch.tokens_BT).last_hidden_state
        torch.testing.assert_close(lent.ours(batch).hidden_BTD, expected, **TOLERANCE)
    check_round_trip(lent, transformers.AutoModel, tmp_path / "ours", input_ids=batch.tokens_BT)
