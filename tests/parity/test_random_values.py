"""Models of transformers with random values of their config's keys: ours has their logits, or refuses a key."""

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pretrain.errors import PretrainError
from pretrain.families import FAMILIES
from pretrain.types import Batch, StackRows
from tests.helpers.lent import lend, quiet_transformers
from tests.unit.interop.releases import tiny

pytestmark = pytest.mark.long

VOCAB = 61
MODELS = 20
"""Of each family. Few are refused, and fewer by transformers."""
TOLERANCE = 3e-5
"""Of the largest logit, or of 1: random scales make sums of fp32 that end in another order larger."""

OF_TEXT = sorted(name for name, family in FAMILIES.items() if family.reads == "tokens")
T5 = {
    "d_model": 48, "d_ff": 96, "d_kv": 8, "num_heads": 6, "num_layers": 2, "num_decoder_layers": 3,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 6, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 80, "max_position_embeddings": 64, "init_std": 0.2,
    "decoder_start_token_id": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, dict[str, Any]] = {
    "t5": T5, "mt5": T5, "umt5": T5,
    **dict.fromkeys(("bart", "marian", "mbart", "plbart", "pegasus", "blenderbot"), BART),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), GPT2), "gptj": GPT2 | {"rotary_dim": 4},
    "distilbert": {"dim": 48, "hidden_dim": 96, "n_layers": 3, "n_heads": 6, "max_position_embeddings": 64},
}  # fmt: skip
COMMON = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
DEEPSEEK = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 12},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 5},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), DEEPSEEK),
    "dots1": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    # Rounding grows with each of up to 96 layers that are drawn, and faster at 0.2.
    "granitemoe": {"initializer_range": 0.1},
    **{key: {"head_dim": 8} for key in ("helium", "ministral")},
    **{key: {"sliding_window": 5} for key in ("mistral", "olmo3", "cohere2", "starcoder2")},
    "gemma2": {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16},
    "gemma": {"head_dim": 16}, "qwen3": {"head_dim": 12}, "electra": {"embedding_size": 48},
    "modernbert": {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
}  # fmt: skip

POSITIONS = {"max_position_embeddings", "n_positions"}
ACTIVATIONS = ("gelu", "gelu_new", "silu", "relu", "gelu_pytorch_tanh", "tanh", "relu2", "quick_gelu")
PROJECTIONS = ("relu", "gelu", "gated-gelu", "gated-silu", "gated-relu")
FIXED = (
    "vocab_size", "initializer", "init_std", "id2label", "label2id", "architectures", "model_type", "transformers",
    "is_decoder", "is_encoder_decoder", "return_dict", "output_", "dtype", "use_cache", "chunk_size", "problem_type",
    "add_cross_attention", "sparse_prediction", "reference_compile", "classifier", "_",
)  # fmt: skip
"""Keys that are no model's: beginnings of their names."""


def draw_rope(rng: random.Random) -> dict[str, Any]:
    """Returns random parameters of rotary positions."""
    kind = rng.choice(("default", "linear", "dynamic", "yarn", "llama3"))
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice((500.0, 1e4, 5e4))}
    if kind != "default":
        found["factor"] = rng.choice((1.5, 2.0, 4.0, 8.0))
    if kind in ("yarn", "llama3"):
        found["original_max_position_embeddings"] = rng.choice((16, 32, 64))
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        found |= {rng.choice(("mscale", "attention_factor", "beta_fast")): rng.choice((0.7, 1.0, 2.0))}
    return found


def draw_value(key: str, value: Any, rng: random.Random) -> Any:
    """Returns another value of a key, of the kind of its default."""
    if "drop" in key:
        return 0.1
    if key.endswith("_token_id"):
        return rng.choice((value, 3))
    if key == "feed_forward_proj":
        return rng.choice(PROJECTIONS)
    if "activation" in key or key.endswith("_act") or key == "dense_act_fn":
        return rng.choice(ACTIVATIONS)
    if "rope" in key and isinstance(value, dict):
        return draw_rope(rng)
    if key in POSITIONS:
        return rng.choice((32, 64, 128))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 48, 96))
    if isinstance(value, float):
        return rng.choice((value * 2, value / 2, 0.25, 0.5, 1.0, 2.0))
    if value is None:
        return rng.choice((True, False, 1, 2, 8, 0.5, 2.0))
    return rng.sample(value, len(value)) if isinstance(value, list) else value


def draw_model(model_type: str, rng: random.Random, seed: int) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """Returns a small model with one to three drawn keys, these, and inputs that it takes."""
    config_class = type(transformers.AutoConfig.for_model(model_type))
    sizes = {"vocab_size": VOCAB} | SIZES.get(model_type, COMMON) | OWN.get(model_type, {})
    defaults = config_class(**sizes).to_dict()
    keys = [key for key in defaults if not key.startswith(FIXED)]
    drawn = {key: draw_value(key, defaults[key], rng) for key in rng.sample(keys, rng.choice((1, 1, 2, 3)))}
    auto_class = transformers.AutoModelForCausalLM
    torch.manual_seed(seed)
    ids_BT = torch.randint(4, VOCAB, (2, 23))
    inputs = {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)}
    if tiny(FAMILIES[model_type].tiny).shape == "encoder":
        auto_class = transformers.AutoModelForMaskedLM
    elif defaults["is_encoder_decoder"]:
        auto_class = transformers.AutoModelForSeq2SeqLM
        inputs["decoder_input_ids"] = torch.randint(4, VOCAB, (2, 17))
    theirs = auto_class.from_config(config_class(**sizes | drawn), attn_implementation="eager").eval()
    return theirs, drawn, inputs


def distance(theirs: Any, inputs: dict[str, torch.Tensor], folder: Path) -> float:
    """Returns the largest difference of logits after an import, over the largest one. Raises: as an import."""
    lent = lend(theirs, folder)
    ids_BT = inputs["input_ids"]
    batch = Batch(ids_BT, ids_BT)
    if "decoder_input_ids" in inputs:
        batch = Batch(inputs["decoder_input_ids"], inputs["decoder_input_ids"], source=StackRows(ids_BT))
    with torch.no_grad():
        wanted, found = theirs(**inputs).logits, lent.ours(batch).logits_BTV[..., :VOCAB]
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1))


@pytest.mark.parametrize("model_type", OF_TEXT)
def test_random_values_are_imported_exactly_or_refused(model_type):
    outcomes = {"equal": 0, "refused": 0}
    for seed in range(MODELS):
        with quiet_transformers(), tempfile.TemporaryDirectory() as folder:
            try:
                theirs, drawn, inputs = draw_model(model_type, random.Random(f"{model_type} {seed}"), seed)
                theirs(**inputs)
            except Exception:  # random values: theirs raises what it likes
                continue
            try:
                apart = distance(theirs, inputs, Path(folder))
            except PretrainError:
                outcomes["refused"] += 1
                continue
            assert apart < TOLERANCE, (seed, drawn)
            outcomes["equal"] += 1
    assert outcomes["equal"] > MODELS / 4, outcomes
