"""config.json of BERT, ModernBERT, T5 and Marian: published ones become our presets, inexact ones are refused."""

import json

import pytest

from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.errors import ConfigError
from pretrain.families import FAMILIES
from pretrain.interop.choose import facts
from tests.unit.interop.releases import TINY, tiny

HEADS = {
    "bert": frozenset({"cls.predictions.transform.dense.weight", "bert.pooler.dense.weight"}),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "data2vec-text", "xlm-roberta-xl", "roberta-prelayernorm"),
        frozenset({"lm_head.dense.weight"}),
    ),
    "megatron-bert": frozenset({"cls.predictions.transform.dense.weight", "bert.pooler.dense.weight"}),
    "distilbert": frozenset({"vocab_transform.weight"}),
    "electra": frozenset({"generator_predictions.dense.weight"}),
    "modernbert": frozenset({"head.dense.weight"}),
    "t5": frozenset({"shared.weight"}),
    "mt5": frozenset({"shared.weight", "lm_head.weight"}),
    "umt5": frozenset({"shared.weight", "lm_head.weight"}),
    **dict.fromkeys(
        ("marian", "bart", "plbart", "mbart", "pegasus", "blenderbot"),
        frozenset({"model.shared.weight", "final_logits_bias"}),
    ),
    "vit": frozenset({"classifier.weight"}),
    "vit_mae": frozenset({"decoder.mask_token"}),
    "deit": frozenset({"classifier.weight"}),
}
"""Names of tensors that tell what a model has."""
SHAPES = {name: tiny(preset).shape for name, preset in TINY.items()}

# The keys that matter of each release's config.json, spelled and left out as there.
BERT = """{"model_type": "bert", "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "num_attention_heads": 12,
    "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute", "type_vocab_size": 2,
    "vocab_size": 30522}"""
ROBERTA = """{"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 0, "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 514,
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1, "type_vocab_size": 1,
    "vocab_size": 50265}"""
DISTILBERT = """{"model_type": "distilbert", "activation": "gelu", "architectures": ["DistilBertForMaskedLM"],
    "attention_dropout": 0.1, "dim": 768, "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02,
    "max_position_embeddings": 512, "n_heads": 12, "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": false, "tie_weights_": true, "vocab_size": 30522}"""
ELECTRA = """{"model_type": "electra", "architectures": ["ElectraForMaskedLM"], "attention_probs_dropout_prob": 0.1,
    "embedding_size": 128, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 256,
    "initializer_range": 0.02, "intermediate_size": 1024, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
    "num_attention_heads": 4, "num_hidden_layers": 12, "pad_token_id": 0, "type_vocab_size": 2,
    "vocab_size": 30522}"""
MODERNBERT = """{"model_type": "modernbert", "attention_bias": false, "bos_token_id": 50281,
    "classifier_activation": "gelu", "classifier_bias": false, "cls_token_id": 50281, "decoder_bias": true,
    "eos_token_id": 50282, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "hidden_activation": "gelu",
    "hidden_size": 768, "intermediate_size": 1152, "local_attention": 128, "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192, "mlp_bias": false, "norm_bias": false, "norm_eps": 1e-05,
    "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283, "sep_token_id": 50282,
    "vocab_size": 50368}"""
T5 = """{"model_type": "t5", "d_ff": 2048, "d_kv": 64, "d_model": 512, "decoder_start_token_id": 0, "dropout_rate": 0.1,
    "eos_token_id": 1, "is_encoder_decoder": true, "layer_norm_epsilon": 1e-06, "n_positions": 512, "num_heads": 8,
    "num_layers": 6, "pad_token_id": 0, "relative_attention_num_buckets": 32, "vocab_size": 32128}"""
T5_V1_1 = """{"model_type": "t5", "d_ff": 1024, "d_kv": 64, "d_model": 512, "decoder_start_token_id": 0,
    "dropout_rate": 0.1, "eos_token_id": 1, "feed_forward_proj": "gated-gelu", "is_encoder_decoder": true,
    "layer_norm_epsilon": 1e-06, "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8, "pad_token_id": 0,
    "relative_attention_num_buckets": 32, "tie_word_embeddings": false, "vocab_size": 32128}"""
MARIAN = """{"model_type": "marian", "activation_function": "swish", "add_bias_logits": false,
    "add_final_layer_norm": false, "bad_words_ids": [[80034]], "bos_token_id": 0, "d_model": 512,
    "decoder_attention_heads": 8, "decoder_ffn_dim": 2048, "decoder_layers": 6, "decoder_start_token_id": 80034,
    "dropout": 0.1, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048, "encoder_layers": 6, "eos_token_id": 0,
    "is_encoder_decoder": true, "max_length": 512, "max_position_embeddings": 512, "normalize_before": false,
    "normalize_embedding": false, "num_beams": 6, "pad_token_id": 80034, "scale_embedding": true,
    "static_position_embeddings": true, "vocab_size": 80035}"""

BART = """{"model_type": "bart", "activation_function": "gelu", "bos_token_id": 0, "d_model": 1024,
    "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layers": 12, "decoder_start_token_id": 2,
    "dropout": 0.1, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "encoder_layers": 12, "eos_token_id": 2,
    "init_std": 0.02, "is_encoder_decoder": true, "max_position_embeddings": 1024, "normalize_before": false,
    "normalize_embedding": true, "pad_token_id": 1, "scale_embedding": false, "vocab_size": 50265}"""
PLBART = {"model_type": "plbart", "attention_dropout": 0.1, "d_model": 768, "decoder_attention_heads": 12,
          "decoder_ffn_dim": 3072, "decoder_layers": 6, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072,
          "encoder_layers": 6, "scale_embedding": True, "vocab_size": 50005}  # fmt: skip
MBART = {"model_type": "mbart", "add_final_layer_norm": True, "decoder_start_token_id": None, "normalize_before": True,
         "scale_embedding": True, "static_position_embeddings": False, "vocab_size": 250027}  # fmt: skip

PUBLISHED = {
    "bert-base": (BERT, {}),
    "bert-large": (BERT, {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
                          "num_hidden_layers": 24}),
    "roberta-base": (ROBERTA, {}),
    "xlm-roberta-base": (ROBERTA, {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForMaskedLM"],
                                   "vocab_size": 250002}),
    "distilbert-base": (DISTILBERT, {}),
    "electra-small": (ELECTRA, {}),
    "modernbert-base": (MODERNBERT, {}),
    "modernbert-large": (MODERNBERT, {"hidden_size": 1024, "intermediate_size": 2624, "num_attention_heads": 16,
                                      "num_hidden_layers": 28}),
    "t5-small": (T5, {}),
    "t5-11b": (T5, {"d_ff": 65536, "d_kv": 128, "d_model": 1024, "num_heads": 128, "num_layers": 24}),
    "t5-v1.1-small": (T5_V1_1, {}),
    "t5-v1.1-xxl": (T5_V1_1, {"d_ff": 10240, "d_model": 4096, "num_decoder_layers": 24, "num_heads": 64,
                              "num_layers": 24}),
    "mt5-small": (T5_V1_1, {"model_type": "mt5", "vocab_size": 250112}),
    "umt5-small": (T5_V1_1, {"model_type": "umt5", "vocab_size": 256384}),
    "byt5-small": (T5_V1_1, {"d_ff": 3584, "d_model": 1472, "num_decoder_layers": 4, "num_layers": 12,
                             "vocab_size": 384}),
    "marian-base": (MARIAN, {}),
    "bart-large": (BART, {}),
    "plbart-base": (BART, PLBART),
    "mbart-large": (BART, MBART),
}  # fmt: skip


def read(model_type, /, **values):
    return FAMILIES[model_type].read_config(values, HEADS[model_type])


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_published_config_is_our_preset(preset):
    text, changes = PUBLISHED[preset]
    values = json.loads(text) | changes
    own_head = {"lm_head.weight"} if values.get("tie_word_embeddings") is False else set()
    found = FAMILIES[values["model_type"]].read_config(values, HEADS[values["model_type"]] | own_head)
    expected = expand_preset({"preset": preset, "vocab_size": values["vocab_size"]})
    assert facts(found) == facts(ModelConfig.model_validate(expected))


@pytest.mark.parametrize(
    ("text", "pad", "bos", "eos", "start"),
    [
        (BERT, 0, None, None, None),
        (ROBERTA, 1, 0, 2, None),
        (MODERNBERT, 50283, 50281, 50282, None),
        (T5, 0, None, 1, 0),
        (MARIAN, 80034, 0, 0, 80034),
        (BART, 1, 0, 2, 2),
        (BART.replace('"bart"', '"mbart"').replace('_start_token_id": 2', '_start_token_id": 250004'), 1, 0, 2, 250004),
    ],
)
def test_ids_of_special_tokens_are_read_and_written(text, pad, bos, eos, start):
    values = json.loads(text)
    family = FAMILIES[values["model_type"]]
    config = family.read_config(values, HEADS[values["model_type"]])
    tokens = config.special_tokens
    assert (tokens.pad, tokens.bos, tokens.eos, tokens.start) == (pad, bos, eos, start)
    assert read(values["model_type"], **family.write_config(config)).special_tokens == tokens


@pytest.mark.parametrize("model_type", ["bert", "roberta", "modernbert"])
def test_the_id_of_the_mask_comes_back_although_theirs_has_none(model_type):
    config = read(model_type)
    tokens = config.special_tokens.model_copy(update={"mask": 103})
    masked = config.model_copy(update={"special_tokens": tokens})
    assert read(model_type, **FAMILIES[model_type].write_config(masked)).special_tokens.mask == 103


# A captioner has no defaults: its parts are given.
@pytest.mark.parametrize(
    "model_type", [name for name, shape in SHAPES.items() if shape != "decoder" and name != "vision-encoder-decoder"]
)
def test_missing_keys_have_the_defaults_of_transformers(model_type):
    import transformers

    theirs = json.loads(transformers.AutoConfig.for_model(model_type).to_json_string(use_diff=False))
    # The one key that transformers leaves to the caller: a T5 begins with padding.
    theirs = {key: value for key, value in theirs.items() if key != "decoder_start_token_id" or value is not None}
    assert read(model_type) == read(model_type, **theirs)


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("bert", {"hidden_act": "gelu_new", "type_vocab_size": 1}),
        ("bert", {"tie_word_embeddings": False}),
        ("roberta", {"pad_token_id": 7, "hidden_act": "relu", "tie_word_embeddings": False}),
        ("distilbert", {"activation": "relu", "dim": 64, "n_heads": 4}),
        ("electra", {"embedding_size": 256, "type_vocab_size": 1}),
        ("modernbert", {"global_rope_theta": 700.0, "local_rope_theta": 70.0, "global_attn_every_n_layers": 4}),
        ("modernbert", {"global_attn_every_n_layers": 1, "norm_bias": True, "attention_bias": True, "mlp_bias": True,
                        "classifier_bias": True, "decoder_bias": False, "tie_word_embeddings": False}),
        ("t5", {"feed_forward_proj": "gelu_new", "num_decoder_layers": 3, "d_kv": 32}),
        ("t5", {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False, "pad_token_id": None}),
        ("t5", {"feed_forward_proj": "gated-gelu_python", "relative_attention_max_distance": 256}),
        ("mt5", {"feed_forward_proj": "relu", "relative_attention_num_buckets": 10}),
        ("umt5", {"num_decoder_layers": 2, "tie_word_embeddings": True}),
        ("bart", {"activation_function": "relu", "scale_embedding": True, "max_position_embeddings": 40}),
        ("plbart", {"activation_function": "relu", "encoder_layers": 2, "decoder_start_token_id": 3}),
        ("mbart", {"scale_embedding": True, "d_model": 64, "attention_dropout": 0.1}),
        ("marian", {"activation_function": "relu", "scale_embedding": True, "decoder_layers": 2, "eos_token_id": 5}),
        ("vit", {"qkv_bias": False, "image_size": 32, "patch_size": 4, "num_channels": 1, "hidden_act": "relu"}),
        ("deit", {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2}),
        ("vit_mae", {"decoder_hidden_size": 64, "decoder_num_attention_heads": 4, "qkv_bias": False}),
    ],
)  # fmt: skip
def test_what_is_written_is_read_the_same_by_transformers(model_type, values):
    import transformers

    family, config = FAMILIES[model_type], read(model_type, **values)
    theirs = transformers.AutoConfig.for_model(model_type, **family.write_config(config))
    assert read(model_type, **json.loads(theirs.to_json_string(use_diff=False))) == config
    assert read(model_type, **family.write_config(config)) == config


def test_heads_and_poolers_are_told_by_the_tensors():
    bert = FAMILIES["bert"]
    bare = bert.read_config({}, frozenset({"bert.pooler.dense.weight"}))
    assert (bare.head.kind, bare.pooler, bare.tied_embeddings) == ("none", True, False)
    assert not bert.read_config({}, frozenset()).pooler
    # No objective reads a pooler beside a language model's head.
    masked = read("bert")
    assert (masked.head.kind, masked.pooler, masked.tied_embeddings) == ("lm", False, True)
    assert FAMILIES["modernbert"].read_config({}, frozenset()).head.kind == "none"


@pytest.mark.parametrize(
    ("values", "names", "scaled", "tied"),
    [
        ({}, {"lm_head.weight"}, True, True),
        ({"tie_word_embeddings": True}, (), True, True),
        ({"tie_word_embeddings": False}, {"lm_head.weight"}, False, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, {"lm_head.weight"}, False, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, (), False, True),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, {"lm_head.weight"}, True, False),
        ({"transformers_version": "5.1.0"}, {"lm_head.weight"}, True, False),
        ({"transformers_version": "4.57.1"}, {"lm_head.weight"}, True, True),
    ],
)
def test_a_t5_is_told_from_a_v1_1_in_the_spelling_of_each_version(values, names, scaled, tied):
    config = FAMILIES["t5"].read_config(values, frozenset(names))
    assert (config.head.scaled, config.tied_embeddings) == (scaled, tied)


@pytest.mark.parametrize(
    "values",
    [
        {"global_rope_theta": 700.0, "local_rope_theta": 70.0},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 700.0},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 70.0}}},
        {"rope_parameters": {"full_attention": {"rope_theta": 700.0}}, "local_rope_theta": 70.0},
    ],
)  # fmt: skip
def test_rotary_periods_of_modernbert_in_old_and_new_spelling(values):
    stack = read("modernbert", **values).encoder
    assert (stack.rope_theta, stack.rope_local_theta) == (700.0, 70.0)


def test_a_local_period_of_null_is_the_global_one():
    stack = read("modernbert", global_rope_theta=700.0, local_rope_theta=None).encoder
    assert (stack.rope_theta, stack.rope_local_theta) == (700.0, None)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({"global_attn_every_n_layers": 2}, (None, 65, None, 65)),
        ({"global_attn_every_n_layers": 1}, (None,) * 4),
        ({"local_attention": 10}, (None, 6, 6, None)),
        ({"layer_types": [FULL, SLIDING, FULL, SLIDING]}, (None, 65, None, 65)),
        ({"layer_types": [SLIDING] * 4}, (65,) * 4),
        ({"layer_types": [FULL] * 4}, (None,) * 4),
        ({"layer_types": [FULL, SLIDING, SLIDING, SLIDING]}, (None, 65, 65, 65)),
    ],
)
def test_windows_of_modernbert(values, windows):
    assert read("modernbert", num_hidden_layers=4, **values).encoder.windows == windows


REFUSED = [
    ("bert", {"position_embedding_type": "relative_key"}, r"position_embedding_type='relative_key': only 'absolute'"),
    ("bert", {"is_decoder": True}, r"is_decoder=True: only False"),
    ("bert", {"add_cross_attention": True}, r"add_cross_attention=True: only False"),
    ("bert", {"type_vocab_size": 0}, r"type_vocab_size=0: theirs has a table of token types"),
    ("roberta", {"pad_token_id": None}, r"pad_token_id=None: positions begin after it, in a table of max_position"),
    ("roberta", {"pad_token_id": 511}, r"pad_token_id=511: positions begin after it, .*=512 rows"),
    (
        "electra",
        {"architectures": ["ElectraForMultipleChoice"], "summary_type": "mean"},
        r"summary_type='mean': only 'first'",
    ),
    ("bert", {"hidden_act": "gelu_10"}, r"hidden_act='gelu_10': not an activation of ours"),
    ("bert", {"hidden_size": 770}, r"no model of ours has these values: encoder: .*width=770 must be a multiple"),
    ("modernbert", {"norm_bias": True}, r"attention_bias=False: only True can be represented: .* norm_bias is True"),
    ("modernbert", {"mlp_bias": True}, r"mlp_bias=True: only False"),
    ("modernbert", {"classifier_bias": True}, r"classifier_bias=True: only False"),
    ("modernbert", {"classifier_activation": "relu"}, r"classifier_activation='relu': must be hidden_activation"),
    ("modernbert", {"global_attn_every_n_layers": 0}, r"global_attn_every_n_layers=0: must be positive"),
    ("modernbert", {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}, r"layer_types=.*every n-th of the 2"),
    ("modernbert", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, r"rope_type='yarn': only 'default'"),
    ("t5", {"feed_forward_proj": "gated-elu"}, r"feed_forward_proj='gated-elu': must be \[gated-\]NAME"),
    (
        "mt5",
        {"feed_forward_proj": "gated-gelu", "is_gated_act": None},
        "is_gated_act=None: feed_forward_proj says true",
    ),
    ("t5", {"is_encoder_decoder": False}, r"is_encoder_decoder=False: only True"),
    ("t5", {"relative_attention_num_buckets": 3}, r"no model of ours .*: encoder.relative_buckets: .* equal to 4"),
    (
        "marian",
        {"share_encoder_decoder_embeddings": False},
        r"share_encoder_decoder_embeddings=False: .* one table and",
    ),
    ("marian", {"decoder_vocab_size": 7}, r"decoder_vocab_size=7: must be vocab_size"),
    ("marian", {"tie_word_embeddings": False}, r"tie_word_embeddings=False: only True"),
    ("marian", {"normalize_before": True}, r"normalize_before=True: only False"),
    ("marian", {"normalize_embedding": True}, r"normalize_embedding=True: only False"),
    ("marian", {"static_position_embeddings": False}, r"static_position_embeddings=False: only True"),
]


@pytest.mark.parametrize(("model_type", "values", "message"), REFUSED)
def test_what_ours_cannot_represent_is_refused_by_key_and_value(model_type, values, message):
    with pytest.raises(ConfigError, match=message):
        read(model_type, **values)
