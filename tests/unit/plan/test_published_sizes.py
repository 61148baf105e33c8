"""Every preset has as many parameters as what was published under its name, at the published vocabulary.

Twice over: the number that is printed with the release, and the parameters of Hugging Face's own model of that
configuration, written out below as it is in the released `config.json`.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf

from pretrain.cli.recipes import published_vocabulary
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig
from pretrain.config.presets import PRESETS, expand_preset
from pretrain.model import build_model
from pretrain.plan.params import count_active, count_parameters, count_parts

META = torch.device("meta")


@dataclass(frozen=True)
class Release:
    """A released model.

    Attributes:
        vocab_size: Rows of its table.
        parameters: What is printed with it. None: only rounded, and then not here.
        model: Hugging Face's class.
        config: Its configuration, `vocab_size` aside.
    """

    vocab_size: int
    parameters: int | None
    model: type
    config: dict[str, Any]


def gpt2(layers: int, width: int, heads: int, parameters: int) -> Release:
    return Release(50257, parameters, hf.GPT2LMHeadModel, {"n_layer": layers, "n_embd": width, "n_head": heads})


def rotary(
    model: type, vocab: int, parameters: int | None, layers: int, width: int, ff: int, heads: int, kv: int, **rest
):
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": ff, "num_attention_heads": heads}
    return Release(vocab, parameters, model, sizes | {"num_key_value_heads": kv, "tie_word_embeddings": False} | rest)


def qwen_experts(width: int) -> dict[str, Any]:
    return {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": width, "head_dim": 128}


def bert(layers: int, width: int, heads: int, ff: int, parameters: int | None) -> Release:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": ff}
    return Release(30522, parameters, hf.BertForMaskedLM, sizes)


def like_bert(model: type, vocab: int, layers: int, width: int, heads: int, ff: int, **rest: int) -> Release:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": ff}
    return Release(vocab, None, model, sizes | rest)


def modernbert(layers: int, width: int, heads: int, ff: int) -> Release:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": ff}
    return Release(50368, None, hf.ModernBertForMaskedLM, sizes)


def marian(vocab: int, layers: int, width: int, heads: int, ff: int) -> Release:
    sizes = {f"{stack}_{key}": n for stack in ("encoder", "decoder") for key, n in
             (("layers", layers), ("attention_heads", heads), ("ffn_dim", ff))}  # fmt: skip
    config = {"d_model": width, "scale_embedding": True, "max_position_embeddings": 512, "pad_token_id": 0}
    return Release(vocab, None, hf.MarianMTModel, sizes | config | {"decoder_start_token_id": 0})


def gated_t5(model: type, vocab: int, encoder: int, decoder: int, width: int, heads: int, ff: int) -> Release:
    sizes = {"num_layers": encoder, "num_decoder_layers": decoder, "d_model": width, "num_heads": heads, "d_ff": ff}
    return Release(vocab, None, model, sizes | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False})


def bart(layers: int, width: int, heads: int, ff: int, vocab: int = 50265, name: str = "Bart") -> Release:
    sizes = {f"{stack}_{key}": n for stack in ("encoder", "decoder") for key, n in
             (("layers", layers), ("attention_heads", heads), ("ffn_dim", ff))}  # fmt: skip
    return Release(vocab, None, getattr(hf, f"{name}ForConditionalGeneration"), sizes | {"d_model": width})


def t5(
    layers: int, width: int, heads: int, head_width: int, ff: int, parameters: int, *, gated: bool = False
) -> Release:
    sizes = {"num_layers": layers, "d_model": width, "num_heads": heads, "d_kv": head_width, "d_ff": ff}
    return Release(
        32128,
        parameters,
        hf.T5ForConditionalGeneration,
        sizes | {"feed_forward_proj": "gated-gelu" if gated else "relu", "tie_word_embeddings": not gated},
    )


def neox(vocab: int, parameters: int, layers: int, width: int, heads: int) -> Release:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return Release(vocab, parameters, hf.GPTNeoXForCausalLM, sizes | {"intermediate_size": 4 * width})


def phi(parameters: int, layers: int, width: int) -> Release:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
    return Release(51200, parameters, hf.PhiForCausalLM, sizes)


def falcon(parameters: int, **sizes: Any) -> Release:
    return Release(65024, parameters, hf.FalconForCausalLM, sizes)


MT5, UMT5, T5 = hf.MT5ForConditionalGeneration, hf.UMT5ForConditionalGeneration, hf.T5ForConditionalGeneration
LLAMA, MISTRAL, QWEN2, QWEN3 = hf.LlamaForCausalLM, hf.MistralForCausalLM, hf.Qwen2ForCausalLM, hf.Qwen3ForCausalLM
STARCODER2 = hf.Starcoder2ForCausalLM
MIXTRAL, QWEN3_MOE = hf.MixtralForCausalLM, hf.Qwen3MoeForCausalLM
OLMO2, OLMOE = hf.Olmo2ForCausalLM, hf.OlmoeForCausalLM
GPT_OSS = hf.GptOssForCausalLM
OLMO3, SMOLLM3, GRANITE, PHI3 = hf.Olmo3ForCausalLM, hf.SmolLM3ForCausalLM, hf.GraniteForCausalLM, hf.Phi3ForCausalLM
GEMMA, GEMMA2, GEMMA3 = hf.GemmaForCausalLM, hf.Gemma2ForCausalLM, hf.Gemma3ForCausalLM
STABLELM, COHERE, COHERE2 = hf.StableLmForCausalLM, hf.CohereForCausalLM, hf.Cohere2ForCausalLM
ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1}
TIED = {"tie_word_embeddings": True}

RELEASES = {
    "gpt2-124m": gpt2(12, 768, 12, 124_439_808),
    "gpt2-350m": gpt2(24, 1024, 16, 354_823_168),
    "gpt2-774m": gpt2(36, 1280, 20, 774_030_080),
    "gpt2-1.5b": gpt2(48, 1600, 25, 1_557_611_200),
    "llama2-7b": rotary(LLAMA, 32000, 6_738_415_616, 32, 4096, 11008, 32, 32),
    "llama2-13b": rotary(LLAMA, 32000, 13_015_864_320, 40, 5120, 13824, 40, 40),
    "llama2-70b": rotary(LLAMA, 32000, 68_976_648_192, 80, 8192, 28672, 64, 8),
    "llama3-8b": rotary(LLAMA, 128256, 8_030_261_248, 32, 4096, 14336, 32, 8),
    "llama3-70b": rotary(LLAMA, 128256, 70_553_706_496, 80, 8192, 28672, 64, 8),
    "llama3.1-8b": rotary(LLAMA, 128256, 8_030_261_248, 32, 4096, 14336, 32, 8),
    "llama3.1-70b": rotary(LLAMA, 128256, 70_553_706_496, 80, 8192, 28672, 64, 8),
    "llama3.2-1b": rotary(LLAMA, 128256, 1_235_814_400, 16, 2048, 8192, 32, 8, **TIED),
    "llama-1b": rotary(LLAMA, 128256, 1_235_814_400, 16, 2048, 8192, 32, 8, **TIED),
    "mistral-7b": rotary(MISTRAL, 32000, 7_241_732_096, 32, 4096, 14336, 32, 8),
    "mixtral-8x7b": rotary(MIXTRAL, 32000, None, 32, 4096, 14336, 32, 8),
    "mixtral-8x22b": rotary(MIXTRAL, 32000, None, 56, 6144, 16384, 48, 8),
    "qwen2-0.5b": rotary(QWEN2, 151936, 494_032_768, 24, 896, 4864, 14, 2, **TIED),
    "qwen2-1.5b": rotary(QWEN2, 151936, 1_543_714_304, 28, 1536, 8960, 12, 2, **TIED),
    "qwen2-7b": rotary(QWEN2, 152064, 7_615_616_512, 28, 3584, 18944, 28, 4),
    "qwen2-72b": rotary(QWEN2, 152064, 72_706_203_648, 80, 8192, 29568, 64, 8),
    "qwen3-0.6b": rotary(QWEN3, 151936, 596_049_920, 28, 1024, 3072, 16, 8, head_dim=128, **TIED),
    "qwen3-1.7b": rotary(QWEN3, 151936, 1_720_574_976, 28, 2048, 6144, 16, 8, head_dim=128, **TIED),
    "qwen3-4b": rotary(QWEN3, 151936, 4_022_468_096, 36, 2560, 9728, 32, 8, head_dim=128, **TIED),
    "qwen3-8b": rotary(QWEN3, 151936, 8_190_735_360, 36, 4096, 12288, 32, 8, head_dim=128),
    "qwen3-14b": rotary(QWEN3, 151936, 14_768_307_200, 40, 5120, 17408, 40, 8, head_dim=128),
    "qwen3-32b": rotary(QWEN3, 151936, 32_762_123_264, 64, 5120, 25600, 64, 8, head_dim=128),
    "qwen3_moe-30b-a3b": rotary(QWEN3_MOE, 151936, None, 48, 2048, 6144, 32, 4, **qwen_experts(768)),
    "qwen3_moe-235b-a22b": rotary(QWEN3_MOE, 151936, None, 94, 4096, 12288, 64, 4, **qwen_experts(1536)),
    "olmo-1b": rotary(hf.OlmoForCausalLM, 50304, 1_176_764_416, 16, 2048, 8192, 16, 16, tie_word_embeddings=True),
    "olmo-7b": rotary(hf.OlmoForCausalLM, 50304, 6_888_095_744, 32, 4096, 11008, 32, 32),
    "olmo2-1b": rotary(OLMO2, 100352, None, 16, 2048, 8192, 16, 16),
    "olmo2-7b": rotary(OLMO2, 100352, None, 32, 4096, 11008, 32, 32),
    "olmo2-13b": rotary(OLMO2, 100352, None, 40, 5120, 13824, 40, 40),
    "olmo2-32b": rotary(OLMO2, 100352, None, 64, 5120, 27648, 40, 8),
    "olmoe-1b-7b": rotary(OLMOE, 50304, None, 16, 2048, 1024, 16, 16),
    "gpt_oss-20b": rotary(GPT_OSS, 201088, None, 24, 2880, 2880, 64, 8, num_local_experts=32),
    "gpt_oss-120b": rotary(GPT_OSS, 201088, None, 36, 2880, 2880, 64, 8, num_local_experts=128),
    "deepseek_v3-671b": Release(129280, None, hf.DeepseekV3ForCausalLM, {}),  # defaults of transformers
    "starcoder2-3b": rotary(STARCODER2, 49152, 3_030_371_328, 30, 3072, 12288, 24, 2, **TIED),
    "starcoder2-7b": rotary(STARCODER2, 49152, 7_173_923_840, 32, 4608, 18432, 36, 4, **TIED),
    "olmo3-7b": rotary(OLMO3, 100278, 7_298_011_136, 32, 4096, 11008, 32, 32),
    "olmo3-32b": rotary(OLMO3, 100278, 32_233_522_176, 64, 5120, 27648, 40, 8),
    "smollm3-3b": rotary(SMOLLM3, 128256, 3_075_098_624, 36, 2048, 11008, 16, 4, **TIED),
    "granite3-2b": rotary(GRANITE, 49155, 2_533_531_648, 40, 2048, 8192, 32, 8, **TIED),
    "granite3-8b": rotary(GRANITE, 49155, 8_170_848_256, 40, 4096, 12800, 32, 8, **TIED),
    "phi3-mini": rotary(PHI3, 32064, 3_821_079_552, 32, 3072, 8192, 32, 32),
    "phi3-medium": rotary(PHI3, 32064, 13_960_238_080, 40, 5120, 17920, 40, 10),
    "gemma-2b": rotary(GEMMA, 256000, 2_506_172_416, 18, 2048, 16384, 8, 1, head_dim=256, **TIED),
    "gemma-7b": rotary(GEMMA, 256000, 8_537_680_896, 28, 3072, 24576, 16, 16, head_dim=256, **TIED),
    "gemma2-2b": rotary(GEMMA2, 256000, 2_614_341_888, 26, 2304, 9216, 8, 4, head_dim=256, **TIED),
    "gemma2-9b": rotary(GEMMA2, 256000, 9_241_705_984, 42, 3584, 14336, 16, 8, head_dim=256, **TIED),
    "gemma2-27b": rotary(GEMMA2, 256000, 27_227_128_320, 46, 4608, 36864, 32, 16, head_dim=128, **TIED),
    "gemma3-270m": rotary(GEMMA3, 262144, 268_098_176, 18, 640, 2048, 4, 1, head_dim=256, **TIED),
    "gemma3-1b": rotary(GEMMA3, 262144, 999_885_952, 26, 1152, 6912, 4, 1, head_dim=256, **TIED),
    "gemma3-4b": rotary(GEMMA3, 262144, 3_880_099_328, 34, 2560, 10240, 8, 4, head_dim=256, **TIED),
    "gemma3-12b": rotary(GEMMA3, 262144, 11_765_788_416, 48, 3840, 15360, 16, 8, head_dim=256, **TIED),
    "gemma3-27b": rotary(GEMMA3, 262144, None, 62, 5376, 21504, 32, 16, head_dim=128, **TIED),
    "pythia-70m": neox(50304, 70_426_624, 6, 512, 8),
    "pythia-160m": neox(50304, 162_322_944, 12, 768, 12),
    "pythia-410m": neox(50304, 405_334_016, 24, 1024, 16),
    "pythia-1b": neox(50304, 1_011_781_632, 16, 2048, 8),
    "pythia-1.4b": neox(50304, 1_414_647_808, 24, 2048, 16),
    "pythia-2.8b": neox(50304, 2_775_208_960, 32, 2560, 32),
    "pythia-6.9b": neox(50432, 6_857_302_016, 32, 4096, 32),
    "pythia-12b": neox(50688, 11_846_072_320, 36, 5120, 40),
    "phi-1.5": phi(1_418_270_720, 24, 2048),
    "phi-2": phi(2_779_683_840, 32, 2560),
    "stablelm-3b": rotary(STABLELM, 50304, 2_795_443_200, 32, 2560, 6912, 32, 32),
    "stablelm2-1.6b": rotary(STABLELM, 100352, None, 24, 2048, 5632, 32, 32, use_qkv_bias=True),
    # 12,143,605,760 are printed with it: 82 vectors more than the model of transformers has.
    "stablelm2-12b": rotary(
        STABLELM, 100352, None, 40, 5120, 13824, 32, 8, qk_layernorm=True, use_parallel_residual=True
    ),
    "falcon-7b": falcon(6_921_720_704),
    "falcon-40b": falcon(
        41_303_293_952, hidden_size=8192, num_hidden_layers=60, num_attention_heads=128, num_kv_heads=8,
        new_decoder_architecture=True,
    ),
    "cohere-aya-8b": rotary(COHERE, 256000, 8_028_033_024, 32, 4096, 14336, 32, 8, **TIED),
    "cohere-r-35b": rotary(COHERE, 256000, 34_980_831_232, 40, 8192, 22528, 64, 64, **TIED),
    "cohere-r-plus": rotary(COHERE, 256000, 103_810_674_688, 64, 12288, 33792, 96, 8, use_qk_norm=True, **TIED),
    "cohere2-r7b": rotary(COHERE2, 256000, 8_028_033_024, 32, 4096, 14336, 32, 8, **TIED),
    "bert-base": bert(12, 768, 12, 3072, 109_514_298),
    "bert-large": bert(24, 1024, 16, 4096, None),
    "bert-tiny": bert(2, 128, 2, 512, None),
    "roberta-base": like_bert(hf.RobertaForMaskedLM, 50265, 12, 768, 12, 3072, **ROBERTA),
    "roberta-large": like_bert(hf.RobertaForMaskedLM, 50265, 24, 1024, 16, 4096, **ROBERTA),
    "xlm-roberta-base": like_bert(hf.XLMRobertaForMaskedLM, 250002, 12, 768, 12, 3072, **ROBERTA),
    "xlm-roberta-large": like_bert(hf.XLMRobertaForMaskedLM, 250002, 24, 1024, 16, 4096, **ROBERTA),
    "distilbert-base": Release(30522, 66_985_530, hf.DistilBertForMaskedLM, {}),  # defaults of transformers
    "electra-small": like_bert(hf.ElectraForMaskedLM, 30522, 12, 256, 4, 1024, embedding_size=128),
    "electra-base": like_bert(hf.ElectraForMaskedLM, 30522, 12, 768, 12, 3072, embedding_size=768),
    "electra-large": like_bert(hf.ElectraForMaskedLM, 30522, 24, 1024, 16, 4096, embedding_size=1024),
    "modernbert-base": modernbert(22, 768, 12, 1152),
    "modernbert-large": modernbert(28, 1024, 16, 2624),
    # English to Italian.
    "marian-base": marian(80035, 6, 512, 8, 2048),
    "bart-base": bart(6, 768, 12, 3072),
    "bart-large": bart(12, 1024, 16, 4096),
    "plbart-base": bart(6, 768, 12, 3072, 50005, "PLBart"),
    "mbart-large": bart(12, 1024, 16, 4096, 250027, "MBart"),
    "mt5-small": gated_t5(MT5, 250112, 8, 8, 512, 6, 1024),
    "mt5-base": gated_t5(MT5, 250112, 12, 12, 768, 12, 2048),
    "mt5-large": gated_t5(MT5, 250112, 24, 24, 1024, 16, 2816),
    "mt5-xl": gated_t5(MT5, 250112, 24, 24, 2048, 32, 5120),
    "mt5-xxl": gated_t5(MT5, 250112, 24, 24, 4096, 64, 10240),
    "umt5-small": gated_t5(UMT5, 256384, 8, 8, 512, 6, 1024),
    "umt5-base": gated_t5(UMT5, 256384, 12, 12, 768, 12, 2048),
    "umt5-xl": gated_t5(UMT5, 256384, 24, 24, 2048, 32, 5120),
    "umt5-xxl": gated_t5(UMT5, 256384, 24, 24, 4096, 64, 10240),
    "byt5-small": gated_t5(T5, 384, 12, 4, 1472, 6, 3584),
    "byt5-base": gated_t5(T5, 384, 18, 6, 1536, 12, 3968),
    "byt5-large": gated_t5(T5, 384, 36, 12, 1536, 16, 3840),
    "byt5-xl": gated_t5(T5, 384, 36, 12, 2560, 32, 6720),
    "byt5-xxl": gated_t5(T5, 384, 36, 12, 4672, 64, 12352),
    "t5-small": t5(6, 512, 8, 64, 2048, 60_506_624),
    "t5-base": t5(12, 768, 12, 64, 3072, 222_903_552),
    "t5-large": t5(24, 1024, 16, 64, 4096, 737_668_096),
    "t5-3b": t5(24, 1024, 32, 128, 16384, 2_851_598_336),
    "t5-11b": t5(24, 1024, 128, 128, 65536, 11_307_321_344),
    "t5-v1.1-small": t5(8, 512, 6, 64, 1024, 76_961_152, gated=True),
    "t5-v1.1-base": t5(12, 768, 12, 64, 2048, 247_577_856, gated=True),
    "t5-v1.1-large": t5(24, 1024, 16, 64, 2816, 783_150_080, gated=True),
    "t5-v1.1-xl": t5(24, 2048, 32, 64, 5120, 2_849_757_184, gated=True),
    "t5-v1.1-xxl": t5(24, 4096, 64, 64, 10240, 11_135_332_352, gated=True),
}  # fmt: skip

ROUNDED = {
    # Vaswani et al. 2017: 65 and 213 million (table 3), with about 37,000 tokens (5.1); by the layers of that table it
    # is 63 and 214.
    "transformer-base": (37_000, [63e6, 65e6], 0.04),
    "transformer-big": (37_000, [213e6, 214e6], 0.04),
    "bert-large": (30_522, [340e6], 0.02),
    "mixtral-8x7b": (32_000, [46.7e9], 0.001),
    "mixtral-8x22b": (32_000, [141e9], 0.005),
    "qwen3_moe-30b-a3b": (151_936, [30.5e9], 0.002),
    "qwen3_moe-235b-a22b": (151_936, [235e9], 0.001),
    "olmo2-1b": (100_352, [1.48e9], 0.005),
    "olmo2-7b": (100_352, [7.3e9], 0.005),
    "olmo2-13b": (100_352, [13.7e9], 0.005),
    "olmo2-32b": (100_352, [32.2e9], 0.005),
    "olmoe-1b-7b": (50_304, [6.9e9], 0.005),
    "gpt_oss-20b": (201_088, [20.91e9], 0.001),
    "deepseek_v3-671b": (129_280, [671e9], 0.001),
    "gpt_oss-120b": (201_088, [116.83e9], 0.001),
    "gemma3-27b": (262_144, [27e9], 0.005),
    "stablelm2-1.6b": (100_352, [1.64e9], 0.005),
    "stablelm2-12b": (100_352, [12.1436e9], 0.0001),
    "bert-tiny": (30_522, [4.4e6], 0.02),
    # Lewis et al. 2020, as released; Xue et al. 2021 and 2022, table 1 of each.
    "bart-base": (50_265, [139e6], 0.01),
    "bart-large": (50_265, [406e6], 0.01),
    # As released (680 million in Liu et al. 2020, 2.2); Ahmad et al. 2021, 2.1.
    "mbart-large": (250_027, [610e6], 0.005),
    "plbart-base": (50_005, [140e6], 0.01),
    "mt5-small": (250_112, [300e6], 0.01),
    "mt5-base": (250_112, [580e6], 0.01),
    "mt5-large": (250_112, [1.2e9], 0.03),
    "mt5-xl": (250_112, [3.7e9], 0.02),
    "mt5-xxl": (250_112, [13e9], 0.02),
    "byt5-small": (384, [300e6], 0.01),
    "byt5-base": (384, [582e6], 0.01),
    "byt5-large": (384, [1.23e9], 0.01),
    "byt5-xl": (384, [3.74e9], 0.01),
    "byt5-xxl": (384, [12.9e9], 0.01),
    # Liu et al. 2019 and Conneau et al. 2020; Sanh et al. 2019, table 3; Clark et al. 2020, table 1.
    "roberta-base": (50_265, [125e6], 0.005),
    "roberta-large": (50_265, [355e6], 0.005),
    "xlm-roberta-base": (250_002, [270e6], 0.04),
    "xlm-roberta-large": (250_002, [550e6], 0.02),
    "distilbert-base": (30_522, [66e6], 0.02),
    "electra-small": (30_522, [14e6], 0.04),
    "electra-base": (30_522, [110e6], 0.01),
    "electra-large": (30_522, [335e6], 0.01),
    "modernbert-base": (50_368, [149e6], 0.01),
    "modernbert-large": (50_368, [395e6], 0.01),
}

OWN = {"gpt-shakespeare", "llama-5m", "modded-2m"}
"""Sizes of nobody else's, which have no publication to agree with; so have the tiny ones of every family."""


def configured(preset: str, vocab_size: int) -> ModelConfig:
    """A preset at a vocabulary that is not padded."""
    values = {"preset": preset, "vocab_size": vocab_size, "vocab_multiple": 1}
    return ModelConfig.model_validate(expand_preset(values))


VITS = {
    "vit-ti16": (192, 12, 3, 16, 5_717_416),
    "vit-s16": (384, 12, 6, 16, 22_050_664),
    "vit-s32": (384, 12, 6, 32, 22_878_952),
    "vit-b16": (768, 12, 12, 16, 86_567_656),
    "vit-b32": (768, 12, 12, 32, 88_224_232),
    "vit-l16": (1024, 24, 16, 16, 304_326_632),
    "vit-l32": (1024, 24, 16, 32, 306_535_400),
    "vit-h14": (1280, 32, 16, 14, 632_045_800),
    "deit-ti16": (192, 12, 3, 16, 5_717_800),
    "deit-s16": (384, 12, 6, 16, 22_051_432),
    "deit-b16": (768, 12, 12, 16, 86_569_192),
}
"""Width, layers, heads, side of a patch; parameters with the 1000 classes of ImageNet, as timm prints them;
of DeiT one vector and one position more."""


@pytest.mark.parametrize("preset", sorted(VITS))
def test_a_vit_is_as_large_as_its_release(preset):
    width, layers, heads, patch, parameters = VITS[preset]
    labels = [str(number) for number in range(1000)]
    config = ModelConfig.model_validate(expand_preset({"preset": preset, "head": {"labels": labels}}))
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width}
    with META:
        name = "DeiT" if preset.startswith("deit") else "ViT"
        facts = getattr(hf, f"{name}Config")(hidden_size=width, patch_size=patch, num_labels=1000, **sizes)
        theirs = getattr(hf, f"{name}ForImageClassification")(facts)
    assert count_parameters(config) == sum(one.numel() for one in theirs.parameters()) == parameters


MAES = {
    "vit_mae-b16": (768, 12, 12, 16),
    "vit_mae-l16": (1024, 24, 16, 16),
    "vit_mae-h14": (1280, 32, 16, 14),
}
"""Width, layers, heads, side of a patch."""


@pytest.mark.parametrize("preset", sorted(MAES))
def test_a_masked_autoencoder_is_as_large_as_its_release(preset):
    width, layers, heads, patch = MAES[preset]
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width}
    with META:
        theirs = hf.ViTMAEForPreTraining(hf.ViTMAEConfig(hidden_size=width, patch_size=patch, **sizes))
    # Their tables of positions are parameters without a gradient.
    expected = sum(one.numel() for one in theirs.parameters() if one.requires_grad)
    assert count_parameters(ModelConfig.model_validate(expand_preset({"preset": preset}))) == expected


def test_a_captioner_is_as_large_as_the_model_of_transformers_without_the_pooler_that_nothing_reads():
    both = (hf.ViTConfig(), hf.GPT2Config(add_cross_attention=True, is_decoder=True))
    with META:
        theirs = hf.VisionEncoderDecoderModel(hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*both))
    named = theirs.named_parameters()
    expected = sum(one.numel() for name, one in named if "pooler" not in name)
    assert count_parameters(configured("vit_gpt2-b16", 50257)) == expected


def size_of(release: Release) -> int:
    """Parameters that Hugging Face's model is trained by, on the meta device."""
    with META:
        model = release.model(release.model.config_class(vocab_size=release.vocab_size, **release.config))
    # Not Marian's sinusoids, which are parameters there without a gradient.
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    # Marian's bias of the scores is a buffer there.
    count += sum(buffer.numel() for name, buffer in model.named_buffers() if name == "final_logits_bias")
    if "ForConditionalGeneration" in type(model).__name__ and not release.config.get("tie_word_embeddings", True):
        # transformers 5 ties a T5's tables whatever the configuration says; the released v1.1 has a head of its own.
        count += model.lm_head.weight.numel()
    return count


def test_every_preset_is_compared_with_its_publication():
    tiny = {name for name in PRESETS if name.endswith("-tiny")} - {"bert-tiny"}
    others = {"transformer-base", "transformer-big", "vit_gpt2-b16", *VITS, *MAES}
    assert set(PRESETS) - tiny - OWN == set(RELEASES) | others


@pytest.mark.parametrize("preset", sorted(RELEASES))
def test_a_preset_is_as_large_as_the_release(preset):
    release = RELEASES[preset]
    assert published_vocabulary(preset) == release.vocab_size, "the one of `pretrain presets`"
    counted = count_parameters(configured(preset, release.vocab_size))
    assert counted == size_of(release)
    if release.parameters is not None:
        assert counted == release.parameters


@pytest.mark.parametrize("preset", sorted(ROUNDED))
def test_a_preset_is_as_large_as_the_paper_says(preset):
    vocab_size, published, tolerance = ROUNDED[preset]
    for size in published:
        assert count_parameters(configured(preset, vocab_size)) == pytest.approx(size, rel=tolerance)


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("mixtral-8x7b", 12.9e9), ("mixtral-8x22b", 39e9), ("qwen3_moe-30b-a3b", 3.3e9), ("qwen3_moe-235b-a22b", 22e9),
        ("olmoe-1b-7b", 1.3e9),
        ("deepseek_v3-671b", 37e9),
        # Published without the embedding, which a token meets in one row: 3.61B and 5.13B.
        ("gpt_oss-20b", 3.61e9 + 201_088 * 2880), ("gpt_oss-120b", 5.13e9 + 201_088 * 2880),
    ],
)  # fmt: skip
def test_a_mixture_has_as_many_active_parameters_as_published(preset, published):
    assert count_active(configured(preset, RELEASES[preset].vocab_size)) == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("preset", ["llama3-70b", "t5-v1.1-xxl", "gpt2-1.5b", "t5-11b", "qwen2-72b"])
def test_the_largest_are_built_without_memory(preset):
    config = configured(preset, RELEASES[preset].vocab_size)
    model = build_model(config, PLAIN_ENGINE, META)
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.is_meta for tensor in tensors)
    assert sum(parameter.numel() for parameter in model.parameters()) == RELEASES[preset].parameters


def test_the_parts_of_bert():
    parts = count_parts(configured("bert-base", 30522))
    assert parts["embedding"] == (30522 + 2) * 768
    assert parts["position"] == 512 * 768
    # Two a layer and the one over the embeddings; none at the end.
    assert parts["norm"] == 25 * 2 * 768
    assert parts["head"] == 768 * 768 + 768 + 2 * 768 + 30522
    assert parts["pooler"] == 0
    with_pooler = configured("bert-base", 30522).model_copy(update={"pooler": True})
    assert count_parts(with_pooler)["pooler"] == 768 * 768 + 768
