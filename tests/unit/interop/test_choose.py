"""A model is exported as the family that represents it exactly, and refused by key where none does."""

import json

import pytest

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.config.presets import PRESETS
from pretrain.errors import ConfigError
from pretrain.families import FAMILIES
from pretrain.interop.choose import choose_family, differences, facts
from pretrain.interop.tensors import parameter_shapes
from tests.unit.interop.releases import TINY, tiny

OWN = {"gpt-shakespeare", "modded-2m", "hybrid-1m", "hybrid-tiny"}  # of no family
# Of the tiny ones, the paper's Transformer and the hybrid have no family.
EXPORTED = [name for name in PRESETS if name.endswith("-tiny") and name not in {"transformer-tiny", *OWN}]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_family_writes_something_for_any_model(family):
    # Of each kind the tiny one: families times presets are many.
    for preset in {*TINY.values(), *OWN}:
        config = tiny(preset)
        if config.reads != family.reads:
            assert differences(config, family) == [
                f"no such model: {family.model_type} reads {family.reads}, not {config.reads}"
            ]
            continue
        json.dumps(family.write_config(config))
        assert family.architecture(config)
        assert family.weights(config)


@pytest.mark.parametrize("preset", EXPORTED)
def test_the_weights_of_the_family_are_the_parameters_of_the_model(preset):
    config = tiny(preset)
    family = choose_family(config)
    weights = family.weights(config)
    ours = [weight.ours for weight in weights]
    theirs = [name for weight in weights for name, _ in weight.theirs]
    assert sorted(ours) == sorted(parameter_shapes(config))
    assert len(set(theirs)) == len(theirs)


@pytest.mark.parametrize("preset", EXPORTED)
def test_every_name_of_a_model_without_a_head_begins_with_the_prefix(preset):
    family = choose_family(tiny(preset))
    if tiny(preset).restores or tiny(preset).captions:
        pytest.skip("a model of images without a head has no use for its decoder")
    bare = ModelConfig.model_validate(tiny(preset).model_dump() | {"head": {"kind": "none"}, "tied_embeddings": False})
    if differences(bare, family):
        pytest.skip(f"{family.model_type} has no model without a head")
    assert all(name.startswith(family.prefix) for weight in family.weights(bare) for name, _ in weight.theirs)


def test_the_transformer_of_the_paper_is_refused_for_its_sinusoids():
    with pytest.raises(ConfigError, match=r"nearest, marian, has encoder.sinusoid=halves, not interleaved, "):
        choose_family(tiny("transformer-tiny"))


def test_a_model_that_no_family_represents_is_refused_with_the_nearest_and_its_keys():
    with pytest.raises(ConfigError) as error:
        choose_family(tiny(decoder={"norm": "layer"}))
    assert str(error.value) == (
        "model: no Hugging Face family represents this model exactly; the nearest, llama, has decoder.norm=rms, "
        "not layer; train with the family's values of these keys; this model can be used by pretrain alone"
    )


def test_layers_without_a_feedforward_layer_are_those_of_mamba_2_alone():
    assert differences(tiny(decoder={"ff_width": 0}), FAMILIES["llama"]) == [
        "no such model: its layers have a feed-forward layer"
    ]
    # Heads have no effect without a layer of attention.
    assert choose_family(tiny("mamba2-tiny", decoder={"heads": 3, "head_width": None})).model_type == "mamba2"


def test_no_family_has_embeddings_of_ngrams():
    with pytest.raises(ConfigError, match="it has ngram_embeddings=0, not 2; train with"):
        choose_family(tiny(ngram_embeddings=2), "llama")


def test_a_family_by_name_must_be_exact_too():
    plain = tiny()
    assert choose_family(plain, "mistral").model_type == "mistral"
    with pytest.raises(
        ConfigError, match=r"qwen3 does not represent this model exactly; it has decoder.qk_norm=true, "
    ):
        choose_family(plain, "qwen3")
    with pytest.raises(ConfigError, match=r"unknown family 'lama'; use one of gpt2, gpt_bigcode, llama, "):
        choose_family(plain, "lama")


def test_what_transformers_would_refuse_is_a_difference():
    odd = tiny(decoder={"width": 66, "heads": 4, "head_width": 16})
    assert differences(odd, FAMILIES["llama"]) == [
        "no such model: hidden_size=66: transformers needs a multiple of num_attention_heads=4"
    ]
    assert choose_family(odd).model_type == "mistral"


@pytest.mark.parametrize(
    ("stack", "key"),
    [
        ({"kv_heads": 4}, "kv_heads"),
        ({"norm_eps": 1e-4}, "norm_eps"),
        ({"rope_theta": 1e5}, "rope_theta"),
        ({"window": 3}, "window"),
        ({"window": 3, "global_every": 2}, "windows"),
        ({"window": 3, "rope_local_theta": 7.0}, "rope_local_theta"),
        ({"rope_scaling": {"kind": "linear", "factor": 2.0}}, "rope_scaling.factor"),
        ({"rope_fraction": 0.5}, "rope_fraction"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"position": "relative"}, "relative_buckets"),
        ({"position": "sinusoidal"}, "sinusoid"),
        ({"scaled_attention": False}, "scaled_attention"),
        ({"token_types": 2}, "token_types"),
        ({"residual_scalars": True}, "residual_scalars"),
        ({"value_residual": True}, "value_residual"),
        ({"value_embeddings": 1}, "value_embeddings"),
        ({"layer_scale": 0.1}, "layer_scale"),
    ],
)
def test_a_key_that_changes_the_model_is_a_fact(stack, key):
    changed, plain = facts(tiny(decoder=stack)), facts(tiny())
    assert changed[f"decoder.{key}"] != plain.get(f"decoder.{key}")


@pytest.mark.parametrize(
    "change",
    [
        {"decoder": {"head_width": 16}},
        {"decoder": {"qkv_bias": False}},
        {"decoder": {"dropout": 0.5, "attention_dropout": 0.1, "drop_path": 0.2}},
        {"decoder": {"relative_buckets": 64}},
        {"decoder": {"rope_local_theta": 3.0}},
        {"vocab_multiple": 1},
        {"init": "xavier", "init_std": 1.0, "init_scaled": False, "init_output": "zero"},
        {"special_tokens": {"eos": 3}},
    ],
)
def test_a_key_without_effect_is_none(change):
    assert facts(tiny(**change)) == facts(tiny())


def test_scaling_of_a_kind_that_has_fewer_keys_ignores_the_others():
    linear = {"kind": "linear", "factor": 2.0}
    assert facts(tiny(decoder={"rope_scaling": linear})) == facts(
        tiny(decoder={"rope_scaling": linear | {"original_max_seq_len": 5}})
    )


def test_a_bare_model_differs_from_one_with_a_head():
    bare = ModelConfig.model_validate(tiny().model_dump() | {"head": {"kind": "none"}})
    assert facts(bare)["head.kind"] == "none"
    assert choose_family(bare).architecture(bare) == "LlamaModel"


def classifier(preset, **values):
    head = {"kind": "labels", "labels": ["no", "yes"], "bias": True} | values.pop("head", {})
    return tiny(preset, **{"head": head, "tied_embeddings": False} | values)


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (classifier("bert-tiny", pooler=True, head={"transform": False}), "BertForSequenceClassification"),
        (classifier("bert-tiny", pooler=False, head={"transform": False}), "BertForTokenClassification"),
        (classifier("modernbert-tiny", head={"transform": True}), "ModernBertForSequenceClassification"),
        (classifier("modernbert-tiny", head={"transform": True, "mean": True}), "ModernBertForSequenceClassification"),
    ],
)
def test_a_classifier_is_exported_as_the_class_with_its_head(config, architecture):
    assert choose_family(config).architecture(config) == architecture


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (
            classifier("bert-tiny", pooler=True, head={"transform": False, "mean": True}),
            "bert, has head.mean=false, not",
        ),
        (classifier("bert-tiny", pooler=True, head={"transform": True}), "bert, has head.transform=false, not true"),
        (classifier("modernbert-tiny", head={"transform": False}), "modernbert, has head.transform=true, not false"),
    ],
)
def test_a_head_that_no_class_has_is_refused_by_its_keys(config, keys):
    with pytest.raises(ConfigError, match=f"the nearest, {keys}"):
        choose_family(config)


class _GatedStack(StackConfig):
    attention_valve: bool = False


def test_a_key_of_a_stack_that_no_family_knows_is_not_left_out():
    config = tiny("llama-tiny")
    gated = _GatedStack(**config.decoder.model_dump(), attention_valve=True)
    with pytest.raises(ConfigError, match="attention_valve"):
        choose_family(config.model_copy(update={"decoder": gated}))
