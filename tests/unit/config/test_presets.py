"""Presets expand to valid models, and a user's keys win."""

import pytest

from pretrain.config.model import ModelConfig
from pretrain.config.presets import PRESETS, expand_preset
from pretrain.errors import ConfigError
from pretrain.families import FAMILIES
from pretrain.plan.params import count_parameters
from pretrain.plan.task import known_model


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_a_valid_model(name):
    config = ModelConfig.model_validate(expand_preset({"preset": name}))
    assert config.preset == name
    assert config.vocab_size is None


ONLY_TINY = {"granitemoeshared"}
"""Families of which no size is in a paper."""


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_family_has_a_tiny_preset_of_its_shape(family):
    config = ModelConfig.model_validate(expand_preset({"preset": family.tiny}))
    stacks = [{"encoder", "decoder"} & set(size.values) for size in family.sizes.values()]
    assert len(stacks) > 1 or family.model_type in ONLY_TINY
    assert all(set(config.shape.split("+")) == one for one in stacks)
    assert count_parameters(known_model(config, 1024)) < 2_500_000


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_two_stacks_of_a_preset_can_be_changed_one_by_one(name):
    if set(PRESETS[name]) >= {"encoder", "decoder"}:
        expanded = expand_preset({"preset": name, "decoder": {"layers": 1}})
        assert expanded["encoder"] == PRESETS[name]["encoder"]
        assert expanded["encoder"]["layers"] > 1
        assert expanded["decoder"] == PRESETS[name]["decoder"] | {"layers": 1}


def test_a_window_of_modernbert_is_its_local_attention():
    """Of 128 tokens, 64 on each side: fewer than 65 positions away. Every third layer, from the first, sees all."""
    config = ModelConfig.model_validate(expand_preset({"preset": "modernbert-base"}))
    assert config.encoder.windows[:7] == (None, 65, 65, None, 65, 65, None)


def test_keys_are_laid_over_the_preset_one_by_one():
    expanded = expand_preset({"preset": "llama-5m", "decoder": {"layers": 7}, "max_seq_len": 33})
    assert expanded["decoder"] == PRESETS["llama-5m"]["decoder"] | {"layers": 7}
    assert expanded["max_seq_len"] == 33
    assert expanded["tied_embeddings"] is True


def test_null_removes_a_stack():
    assert expand_preset({"preset": "llama-5m", "decoder": None})["decoder"] is None


def test_expanding_changes_neither_the_preset_nor_the_input():
    given = {"preset": "gpt2-tiny", "decoder": {"layers": 3}}
    expanded = expand_preset(given)
    expanded["decoder"]["width"] = 1
    assert PRESETS["gpt2-tiny"]["decoder"]["width"] == 64
    assert given == {"preset": "gpt2-tiny", "decoder": {"layers": 3}}


def test_expanding_twice_is_expanding_once():
    once = expand_preset({"preset": "llama-tiny", "decoder": {"heads": 8}})
    assert expand_preset(once) == once


def test_without_a_preset_the_section_is_left_alone():
    assert expand_preset({"vocab_size": 5}) == {"vocab_size": 5}
    assert expand_preset({"preset": None}) == {"preset": None}


def test_an_unknown_preset_is_refused_with_the_nearest_names():
    with pytest.raises(ConfigError, match=r"unknown model\.preset 'lama-5m'; use llama-5m"):
        expand_preset({"preset": "lama-5m"})
    with pytest.raises(ConfigError, match=r"use arcee-4.5b or .* or transformer-tiny or .* or xlm-roberta-xl-tiny$"):
        expand_preset({"preset": "zzzzzzzz"})
