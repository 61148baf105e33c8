"""Every class of every family through `pretrain import` and `pretrain export` alone, at sizes that divide nothing."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

from pretrain.families import FAMILIES
from tests.helpers.cli import run_warm
from tests.helpers.lent import quiet_transformers

VOCAB, POSITIONS = 211, 40
SIZES = {
    "vocab_size": VOCAB, "decoder_vocab_size": VOCAB, "initializer_range": 0.2, "init_std": 0.2,
    **dict.fromkeys(("hidden_size", "n_embd", "dim", "d_model"), 48),
    **dict.fromkeys(("intermediate_size", "n_inner", "hidden_dim", "d_ff", "ffn_hidden_size", "encoder_ffn_dim"), 45),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_decoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_layers", "encoder_layers", "decoder_num_hidden_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 6),
    **dict.fromkeys(("decoder_attention_heads", "decoder_num_attention_heads", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "original_max_position_embeddings"), POSITIONS),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "local_attention"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "num_channels"), 3),
    "decoder_ffn_dim": 35, "embedding_size": 24, "moe_intermediate_size": 21, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 20, "kv_lora_rank": 16,
    "shared_expert_intermediate_size": 19, "shared_intermediate_size": 19, "n_shared_experts": 1,
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2,
    "topk_method": "group_limited_greedy", "rotary_dim": 4,
    "qk_nope_head_dim": 12, "v_head_dim": 10, "decoder_hidden_size": 32, "decoder_intermediate_size": 33,
    "image_size": 30, "patch_size": 10, "sliding_window": 7, "alibi": False, "pad_token_id": 3, "bos_token_id": 1,
    "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "decoder_start_token_id": 3, "forced_eos_token_id": 2,
}  # fmt: skip
"""Of any family, by the keys that its config has."""
WITHOUT = {"gpt_neox": ("num_key_value_heads", "head_dim"), "falcon": ("num_key_value_heads", "head_dim")}
WITHOUT["gpt_bigcode"] = ("num_key_value_heads",)
WITHOUT |= dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), ("head_dim",))
"""Keys that have to follow from others."""
_MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
HYBRIDS: dict[str, dict[str, Any]] = {"qwen3_next": _MIXED, "granitemoehybrid": _MIXED}
HYBRIDS |= {"bamba": {"attn_layer_indices": [1]}}
"""Layers of both kinds: transformers decodes no model without attention."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "MistralForCausalLM, no window": ("mistral", {"sliding_window": None}),
    "LlamaForCausalLM, tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "LlamaModel, tied": ("llama", {"tie_word_embeddings": True}),
    "FalconForCausalLM, sequential": ("falcon", {"parallel_attn": False, "bias": True}),
    "FalconForCausalLM, new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "GptOssForCausalLM, no YaRN": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 66.0}}),
    "GptOssForCausalLM, one expert": ("gpt_oss", {"num_experts_per_tok": 1}),
    "MixtralForCausalLM, one expert": ("mixtral", {"num_experts_per_tok": 1}),
    "T5ForConditionalGeneration, untied": ("t5", {"tie_word_embeddings": False, "scale_decoder_outputs": False}),
    "BertForMaskedLM, gelu_fast": ("bert", {"hidden_act": "gelu_fast"}),
}

DECODERS = ("ForTokenClassification",)
OF_TEXTS = ("ForSequenceClassification", "ForQuestionAnswering")
LACKING = {
    **dict.fromkeys(("t5", "mt5", "umt5"), (*OF_TEXTS, *DECODERS, "EncoderModel")),
    **dict.fromkeys(("marian", "bart", "plbart", "mbart", "pegasus", "blenderbot"), (*OF_TEXTS, "ForCausalLM")),
    **dict.fromkeys(("roberta", "xlm-roberta", "distilbert", "electra"), ()),
    **dict.fromkeys(("camembert", "data2vec-text", "xlm-roberta-xl", "roberta-prelayernorm"), ()),
    **dict.fromkeys(("bert", "megatron-bert"), ("ForNextSentencePrediction",)),
    "modernbert": ("ForQuestionAnswering", "ForMultipleChoice"),
    "vit": ("ForMaskedImageModeling",), "deit": ("ForMaskedImageModeling", "WithTeacher"), "vit_mae": ("ViTMAEModel",),
}  # fmt: skip
"""Endings of classes that no model of ours is; of a decoder `DECODERS`."""
CORE = {
    "ModernBertForTokenClassification", "Phi3ForCausalLM", "GPT2Model", "BartModel", "MixtralForCausalLM",
    "MistralForCausalLM, no window", "GptOssForCausalLM, no YaRN", "MixtralForCausalLM, one expert",
}  # fmt: skip
"""What is tried without the long ones."""

LEFT = r"(encoder|bert|roberta\w*|data2vec_text)\.pooler\..*|cls\.seq_relationship\..*"
LEFT += r"|(model\.)?(en|de)coder\.embed_positions\.weight"
"""Tensors that no output depends on, or that are computed: not written."""
WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "initializer_range",
    # Values of what a class lacks, or of another key that is off; and nulls that mean what is written.
    *("add_final_layer_norm", "classifier_dropout", "decoder_bias", "final_logit_softcapping", "normalize_before"),
    *("global_attn_every_n_layers", "head_dim", "max_window_layers", "n_positions", "normalize_embedding"),
    *("num_kv_heads", "num_ln_in_parallel_attn", "num_nextn_predict_layers", "original_max_position_embeddings"),
    *("multi_query", "partial_rotary_factor", "position_embedding_type", "static_position_embeddings", "hidden_act"),
}  # fmt: skip


def _find_classes() -> dict[str, str]:
    """Every class that transformers' registries have for a family of ours, and its `model_type`."""
    found = {}
    for name, mapping in vars(modeling_auto).items():
        if name.endswith("_MAPPING_NAMES") and name != "CONFIG_MAPPING_NAMES":
            for model_type in FAMILIES.keys() & mapping.keys():
                classes = mapping[model_type]
                found |= dict.fromkeys([classes] if isinstance(classes, str) else classes, model_type)
    # A model over a Qwen 2, of another `model_type`, is listed for it.
    return {name: found[name] for name in sorted(found) if name != "JevForDecision"}


CASES = {name: (model_type, {}) for name, model_type in _find_classes().items()} | VARIANTS


def _config_of(model_type: str, **values: Any) -> Any:
    if model_type == "vision-encoder-decoder":
        parts = _config_of("vit"), _config_of("gpt2", add_cross_attention=True, is_decoder=True)
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*parts)
        config.decoder_start_token_id, config.pad_token_id, config._attn_implementation = 1, 3, "eager"
        return config
    usual = CONFIG_MAPPING[model_type]()
    values = HYBRIDS.get(model_type, {}) | values
    known = {key: value for key, value in SIZES.items() if hasattr(usual, key) and key not in usual.attribute_map}
    if "kv_lora_rank" in known:
        known["num_key_value_heads"] = known["num_attention_heads"]
    config = CONFIG_MAPPING[model_type](
        **{k: v for k, v in known.items() if k not in WITHOUT.get(model_type, ())} | values
    )
    config._attn_implementation = "eager"
    return config


def _build(name: str, model_type: str, values: dict[str, Any]) -> Any:
    """A model of random values, those of biases and norms too."""
    torch.manual_seed(0)
    model = getattr(transformers, name.partition(",")[0])(_config_of(model_type, **values)).eval()
    fixed = {one.data_ptr() for one in model.parameters() if not one.requires_grad}
    with torch.no_grad():
        for tensor in {one.data_ptr(): one for one in model.state_dict().values()}.values():
            if tensor.data_ptr() not in fixed and (tensor.ndim == 1 or tensor.shape[0] == 1):
                tensor.add_(0.2 * torch.randn(tensor.shape))
        if name == "ViTMAEForPreTraining":  # zeros in a new one of transformers 5
            for table in (model.vit.embeddings.position_embeddings, model.decoder.decoder_pos_embed):
                made = build_2d_sinusoidal_position_embedding(3, 3, table.shape[-1], cls_token=True)
                table[0] = torch.cat(made.chunk(2, dim=1)[::-1], dim=1)
    return model


def _outputs(model: Any, name: str) -> list[Tensor]:
    """The first output for tokens, an image or both; those of answers in texts are two."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the width of a grouped product is a multiple of 4
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, VOCAB, (2, 9), generator=generator)
    inputs = {"pixel_values": torch.randn(2, 3, 30, 30, generator=generator)}
    if model.main_input_name == "input_ids":
        inputs = {"input_ids": tokens[None] if "MultipleChoice" in name else tokens}
    elif "MAE" in name:
        inputs["noise"] = torch.arange(9.0).expand(2, -1)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        found = model(**inputs, return_dict=True)
    return list(found.values())[: 2 if "Answering" in name else 1]


def _run(*arguments: str, cwd: Path) -> str:
    result = run_warm(*arguments, cwd=cwd)
    assert result.code == 0, result.stderr
    return result.stdout


def _flat(config: Any, leave: Callable[[str], bool], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in config.items():
        if isinstance(value, dict) and not leave(key):
            found |= _flat(value, leave, f"{prefix}{key}.")
        elif value is not None and not leave(key):
            found[f"{prefix}{key}"] = value
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in CORE else pytest.mark.long) for name in CASES])
def test_a_class_comes_out_as_it_came_in(name, tmp_path):
    model_type, values = CASES[name]
    with quiet_transformers():
        theirs = _build(name, model_type, values)
        theirs.save_pretrained(tmp_path / "a")
    if name.endswith(LACKING.get(model_type, DECODERS)):
        result = run_warm("import", "a", "b", cwd=tmp_path)
        assert result.code == 64 and len(result.errors) == 1 and "a/config.json: " in result.errors[0], result.stderr
        return
    _run("import", "a", "b", cwd=tmp_path)
    _run("export", "b", "c", cwd=tmp_path)
    kind = type(theirs).__name__.replace("BertForPreTraining", "BertForMaskedLM")  # whose second head is left out
    written = json.loads((tmp_path / "c" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == (model_type, [kind])
    expected, found = (load_file(tmp_path / folder / "model.safetensors") for folder in "ac")
    expected = {key.replace("decoder_encoder.layer", "decoder_layers"): one for key, one in expected.items()}
    left = {key for key in expected if re.fullmatch(LEFT, key)} - found.keys()
    assert expected.keys() - left == found.keys()
    assert [key for key in found if not torch.equal(expected[key], found[key])] == []
    with quiet_transformers():
        ours, info = getattr(transformers, kind).from_pretrained(
            tmp_path / "c", output_loading_info=True, attn_implementation="eager"
        )
    assert set(info["missing_keys"]) <= left and not info["unexpected_keys"] and not info["mismatched_keys"]
    for one, other in zip(_outputs(ours.eval(), name), _outputs(theirs, name), strict=True):
        # The order of a sum depends on its place in memory; one spelling of GELU is written.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5 if "gelu" in name else 1e-6)
    has_none = re.search("Classification|Answering", name) or name == "ModernBertModel"
    of_class = {"tie_word_embeddings"} if has_none else set()
    of_class |= {"decoder_start_token_id"} if model_type == "t5" else set()  # null is padding
    of_class |= {"bos_token_id", "eos_token_id"} if model_type == "vision-encoder-decoder" else set()  # its decoder's
    of_class |= {"sliding_window"} if model_type in ("smollm3", "dots1") else set()  # of a flag that is off
    of_class |= {"rope_theta"} if model_type == "gptj" else set()  # which theirs has built in
    configs = [_flat(one.config.to_dict(), (WITHOUT_EFFECT | of_class).__contains__) for one in (theirs, ours)]
    assert configs[0] == configs[1]
