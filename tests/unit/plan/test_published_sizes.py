"""Every preset has as many parameters as what was published under its name, at the published vocabulary.

The number stands beside the preset. Hugging Face's own model of the configuration that is exported has it too.
"""

import pytest
import torch
import transformers as hf

from pretrain.cli.recipes import USUAL_VOCABULARY, published_vocabulary
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.families import FAMILIES, SIZES
from pretrain.model import build_model
from pretrain.plan.params import count_active, count_parameters, count_parts
from tests.helpers.tables import thinned

META = torch.device("meta")
PUBLISHED = {name: size.of for name, size in SIZES.items() if size.of is not None}
RELEASED = {name: family for family in FAMILIES.values() for name in family.sizes if name in PUBLISHED}
"""Family of each that transformers has a model of."""

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

UNPUBLISHED = {"gpt-shakespeare"}
"""A size that nobody else has; so have the tiny ones of every family."""


def configured(preset: str, vocab_size: int | None) -> ModelConfig:
    """A preset at a vocabulary that is not padded; of images with 1000 labels."""
    values = expand_preset({"preset": preset})
    if vocab_size is not None:
        values |= {"vocab_size": vocab_size, "vocab_multiple": 1}
    elif values["head"]["kind"] == "labels":
        values["head"] |= {"labels": [str(number) for number in range(1000)]}
    return ModelConfig.model_validate(values)


def size_of(family, config) -> int:
    """Parameters that Hugging Face's model is trained by, on the meta device."""
    architecture = family.architecture(config)
    kind = getattr(hf, architecture)
    with META:
        # Tokens that a preset does not say are those of transformers.
        written = family.write_config(config).items()
        given = {key: value for key, value in written if value is not None or not key.endswith("token_id")}
        model = kind(kind.config_class(**given))
    # Not sinusoids, which are parameters there without a gradient; nor a pooler that nothing reads.
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    count = sum(one.numel() for name, one in trained if config.pooler or "pooler" not in name)
    # Marian's bias of the scores is a buffer there.
    count += sum(buffer.numel() for name, buffer in model.named_buffers() if name == "final_logits_bias")
    is_t5 = architecture.endswith("T5ForConditionalGeneration")
    if is_t5 and not config.tied_embeddings:
        # transformers 5 ties a T5's tables whatever the configuration says; the released v1.1 has a head of its own.
        count += model.lm_head.weight.numel()
    return count


def test_every_preset_but_tiny_ones_is_published():
    tiny = {name for name in SIZES if name.endswith("-tiny")} - {"bert-tiny"}
    assert SIZES.keys() - tiny - UNPUBLISHED == PUBLISHED.keys()


@pytest.mark.parametrize("preset", sorted(PUBLISHED))
def test_a_preset_is_as_large_as_published(preset):
    vocab_size, parameters = PUBLISHED[preset]
    assert published_vocabulary(preset) == (vocab_size or USUAL_VOCABULARY), "the one of `pretrain presets`"
    assert count_parameters(configured(preset, vocab_size)) == parameters


@pytest.mark.parametrize("preset", thinned(sorted(RELEASED), 4))  # the numbers; ours are compared with all above
def test_a_preset_is_as_large_as_the_model_of_transformers(preset):
    vocab_size, parameters = PUBLISHED[preset]
    assert size_of(RELEASED[preset], configured(preset, vocab_size)) == parameters


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
    assert count_active(configured(preset, PUBLISHED[preset][0])) == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("preset", ["llama3-70b", "t5-v1.1-xxl", "gpt2-1.5b", "t5-11b", "qwen2-72b"])
def test_the_largest_are_built_without_memory(preset):
    config = configured(preset, PUBLISHED[preset][0])
    model = build_model(config, PLAIN_ENGINE, META)
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.is_meta for tensor in tensors)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[preset][1]


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
