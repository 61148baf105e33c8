"""config.json of decoders: published ones become our presets, inexact ones are refused."""

import json

import pytest

from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.errors import ConfigError
from pretrain.families import FAMILIES
from pretrain.interop.choose import facts
from tests.unit.interop.releases import TINY, tiny

HEAD = frozenset({"lm_head.weight"})
MODEL_TYPES = [name for name, preset in TINY.items() if tiny(preset).shape == "decoder"]

# The keys that matter of each release's config.json, spelled and left out as there.
PUBLISHED = {
    "gpt2-124m": """{"model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "bos_token_id": 50256,
        "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "n_ctx": 1024,
        "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50257}""",
    "llama2-7b": """{"model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
        "tie_word_embeddings": false, "torch_dtype": "float16", "vocab_size": 32000}""",
    "llama3.1-8b": """{"model_type": "llama", "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": false, "vocab_size": 128256}""",
    "llama3.2-1b": """{"model_type": "llama", "attention_bias": false, "head_dim": 64, "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0,
        "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": true, "vocab_size": 128256}""",
    "mistral-7b": """{"model_type": "mistral", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": false, "vocab_size": 32000}""",
    "qwen2-0.5b": """{"model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
        "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true,
        "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936}""",
    "qwen3-0.6b": """{"model_type": "qwen3", "attention_bias": false, "attention_dropout": 0.0, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 32768,
        "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
        "tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151936}""",
}


def read(model_type, names=HEAD, /, **values):
    return FAMILIES[model_type].read_config(values, names)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_published_config_is_our_preset(preset):
    values = json.loads(PUBLISHED[preset])
    found = FAMILIES[values["model_type"]].read_config(values, HEAD)
    expected = expand_preset({"preset": preset, "vocab_size": values["vocab_size"]})
    assert facts(found) == facts(ModelConfig.model_validate(expected))


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: only 1 can be represented"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]: only .* some layers would be dense"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1: only 0.0 can be represented"),
        ("mixtral", {"num_experts_per_tok": 9}, "no model of ours has these values: .*top_k=9 exceeds count=8"),
    ],
)
def test_experts_of_another_kind_are_refused(model_type, values, message):
    with pytest.raises(ConfigError, match=message):
        read(model_type, **values)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_has_two_spellings(key):
    assert read("qwen3_moe", **{key: 16}).decoder.experts.count == 16


def test_ids_of_special_tokens_are_read():
    values = json.loads(PUBLISHED["llama3.1-8b"])
    tokens = FAMILIES["llama"].read_config(values, HEAD).special_tokens
    assert (tokens.bos, tokens.eos, tokens.pad) == (128000, 128001, None)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_missing_keys_have_the_defaults_of_transformers(model_type):
    import transformers

    theirs = json.loads(transformers.AutoConfig.for_model(model_type).to_json_string(use_diff=False))
    assert read(model_type) == read(model_type, **theirs)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_is_written_is_read_the_same_by_transformers(model_type):
    import transformers

    family = FAMILIES[model_type]
    config = family.read_config({"rope_theta": 700.0, "sliding_window": 9, "bos_token_id": None}, HEAD)
    theirs = transformers.AutoConfig.for_model(model_type, **family.write_config(config))
    again = json.loads(theirs.to_json_string(use_diff=False))
    assert family.read_config(again, HEAD) == config


def test_new_and_old_spellings_of_rotary_parameters_are_one():
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = read("llama", rope_theta=500.0, rope_scaling=scaling)
    assert old == read("llama", rope_parameters=scaling | {"rope_theta": 500.0})
    assert old == read("llama", rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    assert (old.decoder.rope_theta, old.decoder.rope_scaling.factor) == (500.0, 2.0)


@pytest.mark.parametrize("given", [{}, {"attention_factor": 1.5, "beta_slow": 2, "beta_fast": 20}])
def test_yarn_is_read_with_its_defaults_and_written_the_same(given):
    of_release = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 9}
    config = read("qwen3", rope_scaling=of_release | given)
    scaling = config.decoder.rope_scaling
    found = (scaling.original_max_seq_len, scaling.beta_slow, scaling.beta_fast, scaling.attention_factor)
    assert found == ((9, 2.0, 20.0, 1.5) if given else (9, 1.0, 32.0, None))
    assert FAMILIES["qwen3"].read_config(FAMILIES["qwen3"].write_config(config), HEAD) == config


def test_llama3_scaling_without_a_length_is_that_of_the_config():
    scaling = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = read("llama", rope_scaling=scaling, max_position_embeddings=77)
    assert config.decoder.rope_scaling.original_max_seq_len == 77


@pytest.mark.parametrize(
    ("layers", "values", "windows"),
    [
        (4, {"use_sliding_window": False, "sliding_window": 9}, (None,) * 4),
        (4, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4}, (None,) * 4),
        (4, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, (9,) * 4),
        (4, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (None, 9, 9, 9)),
        (4, {"use_sliding_window": True, "sliding_window": 9,
             "layer_types": ["full_attention", "sliding_attention"] * 2}, (None, 9, None, 9)),
        (2, {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None,) * 2),
        (4, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}, (None, None, 9, 9)),
        (5, {"use_sliding_window": True, "sliding_window": 9,
             "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention",
                             "sliding_attention"]}, (None, 9, 9, None, 9)),
    ],
)  # fmt: skip
def test_windows_of_qwen(layers, values, windows):
    config = read("qwen2", num_hidden_layers=layers, **values)
    assert config.decoder.windows == windows
    again = FAMILIES["qwen2"].read_config(FAMILIES["qwen2"].write_config(config), HEAD)
    assert again.decoder.windows == windows


@pytest.mark.parametrize("window", [None, 7])
def test_windows_of_mistral(window):
    assert set(read("mistral", sliding_window=window).decoder.windows) == {window}
    assert set(read("mistral").decoder.windows) == {4096}


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("gpt2", {"activation_function": "gelu_10"}, "activation_function='gelu_10'"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor is missing"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}},
            "rope_scaling.short_factors are 1 numbers, for 64 pairs of dimensions",
        ),
        ("llama", {"rope_scaling": {"rope_type": "proportional"}}, "rope_scaling.rope_type='proportional'"),
        ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling.rope_type='linear'"),
        (
            "gpt_oss",
            {"attention_bias": False},
            "attention_bias=False: only True can be represented: experts have biases",
        ),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False: only True can be represented"),
        (
            "deepseek_v3",
            {"num_key_value_heads": 8},
            "num_key_value_heads=8: only num_attention_heads=128 has a meaning",
        ),
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            "topk_method='noaux_tc': only 'greedy' and 'group_limited_greedy'",
        ),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"]}, "47 layers can be dense at the beginning alone"),
        ("gptj", {"rotary_dim": 512}, "rotary_dim=512: must be 1 to 256, the width of a head"),
        ("gpt_bigcode", {"multi_query": False}, "multi_query=False: only True can be represented"),
        ("opt", {"word_embed_proj_dim": 512}, "word_embed_proj_dim=512: must be hidden_size=768"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False: only True can be represented"),
        ("helium", {"head_dim": 64}, "head_dim=64: must be hidden_size=2560 by num_attention_heads=20"),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 9}, "max_window_layers=9: without layer_types"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts=0: transformers has 1 or more"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0: only 1.702 can be represented"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 40}},
            "beta_slow=40.0 must be less",
        ),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one rotary embedding for all layers"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("llama", {"hidden_size": 100, "num_attention_heads": 3}, "hidden_size=100"),
        ("llama", {"num_key_value_heads": 5}, "must be a multiple of kv_heads=5"),
        ("llama", {"hidden_act": "relu6"}, "hidden_act='relu6'"),
        ("llama", {"hidden_size": "4096"}, "hidden_size='4096': must be an integer"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias=True: only False can be represented"),
        ("olmo2", {"head_dim": 100}, "head_dim=100: transformers needs 128, hidden_size by heads"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True: only None"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: only None"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0.0: must be more than 0"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0: must be 1 or more"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "only that of full_attention, or none, can be represented",
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0]: must be 0 or 1 for each of 36 layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0: must be 1 or more"),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0.0: must be more than 0"),
        ("phi", {"qk_layernorm": 1}, "qk_layernorm=1: must be true or false"),
        ("phi", {"partial_rotary_factor": 0.15}, "partial_rotary_factor=0.15: 9.6 dimensions"),
        ("falcon", {"alibi": True}, "alibi=True: only False can be represented"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn=False"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2: only 1"),
        ("cohere", {"logit_scale": -1.0}, "head.scale: Input should be greater than 0"),
        ("cohere2", {"layer_types": "full"}, "layer_types='full': must list 40 layers"),
        ("starcoder2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("qwen2", {"layer_types": ["full_attention"]}, "must list 32 layers"),
        ("qwen2", {"num_hidden_layers": 1, "layer_types": ["chunked_attention"]}, "layer_types='chunked_attention'"),
        (
            "qwen2",
            {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
            "needs a sliding_window",
        ),
    ],
)
def test_what_ours_is_not_exactly_is_refused_by_key_and_value(model_type, values, message):
    with pytest.raises(ConfigError) as error:
        read(model_type, **values)
    assert message in str(error.value)


@pytest.mark.parametrize(("model_type", "architecture"), [("gpt2", "GPT2LMHeadModel"), ("llama", "LlamaForCausalLM")])
def test_a_model_has_a_head_where_it_is_tied_stored_or_claimed(model_type, architecture):
    def kind(names, **values):
        return read(model_type, names, **values).head.kind

    assert kind(frozenset(), tie_word_embeddings=True) == "lm"
    assert kind(HEAD, tie_word_embeddings=False) == "lm"
    assert kind(frozenset(), tie_word_embeddings=False, architectures=[architecture]) == "lm"
    assert kind(frozenset(), tie_word_embeddings=False, architectures=["LlamaModel"]) == "none"
    assert kind(frozenset(), tie_word_embeddings=False, architectures=architecture) == "none"
