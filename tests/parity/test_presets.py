"""Presets against the `config.json` that was released under their name, key by key."""

import json
from pathlib import Path

import pytest

from pretrain.config.model import ModelConfig
from pretrain.config.presets import PRESETS, expand_preset
from pretrain.errors import ConfigError
from pretrain.families import FAMILIES
from pretrain.interop.choose import choose_family, facts
from tests.helpers.tables import distinct
from tests.parity.test_captions import MAKERS as CAPTIONERS
from tests.parity.test_decoders import MAKERS as DECODERS
from tests.parity.test_encoder_decoders import MAKERS as ENCODER_DECODERS
from tests.parity.test_encoders import MAKERS as ENCODERS
from tests.parity.test_vit import MAES
from tests.parity.test_vit import MAKERS as IMAGES

RELEASED = {path.stem: path for path in (Path(__file__).parent / "released").glob("*.json")}
"""The config.json of releases, by the name of the preset."""
OWNERS = {name: family for family in FAMILIES.values() for name in family.sizes}
"""Family of each preset that one exports."""
ALIKE = {"phi3-mini": "mistral", "phi3-medium": "mistral"}
"""Without a scaling of its own a Phi-3 is a Mistral with another layout of tensors."""


def configured(preset, vocab_size=4096):
    values = expand_preset({"preset": preset})
    if "input" not in values or values["head"]["kind"] == "lm":
        values |= {"vocab_size": vocab_size}
    elif values["head"]["kind"] == "labels":
        values |= {"head": values["head"] | {"labels": ["a", "b"]}}
    return ModelConfig.model_validate(values)


@pytest.mark.parametrize("preset", sorted(RELEASED))
def test_a_preset_is_the_released_configuration(preset):
    released = json.loads(RELEASED[preset].read_text())
    family = FAMILIES[released["model_type"]]
    ours = configured(preset, released["vocab_size"])
    names = frozenset(name for weight in family.weights(ours) for name, _ in weight.theirs)
    expected = facts(family.read_config(released, names))
    if preset.startswith("qwen"):
        # The releases count what inference stretches the context to, or room for an answer; ours is that of training.
        assert expected.pop("max_seq_len") > ours.max_seq_len == 32768
        expected["max_seq_len"] = ours.max_seq_len
    assert facts(ours) == expected


@pytest.mark.parametrize(
    "preset", distinct({name: expand_preset({"preset": name}) | {"preset": ""} for name in PRESETS})
)
def test_a_preset_is_exported_as_its_own_family_or_as_none(preset):
    config = configured(preset)
    # GPT-2's layers have biases; Marian's sinusoids are in two halves.
    if preset not in OWNERS or preset == "gpt-shakespeare":
        with pytest.raises(ConfigError, match="no Hugging Face family represents this model exactly"):
            choose_family(config)
        return
    owner = OWNERS[preset].model_type
    assert choose_family(config).model_type == ALIKE.get(preset, owner)
    assert choose_family(config, owner).model_type == owner


def test_every_family_is_compared_with_its_model_of_transformers():
    every = (DECODERS, ENCODERS, ENCODER_DECODERS, IMAGES, MAES, CAPTIONERS)
    compared = [make() for makers in every for make in makers.values()]
    assert {model.config.model_type for model in compared} == set(FAMILIES)


def test_the_readme_counts_the_families():
    readme = Path(__file__).parents[2] / "README.md"
    assert f"models of {len(FAMILIES)} Hugging Face families" in readme.read_text()
