"""The answer to a `model_type` that is not known, for all that transformers has."""

import json
import re

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from pretrain.families import FAMILIES
from pretrain.interop.nearest_family import unknown_model_type
from tests.helpers.lent import quiet_transformers

# Defaults of which transformers 5.23 makes no config.
BROKEN = {"gemma4_assistant", "nougat"}


@pytest.mark.long
def test_every_config_of_transformers_is_answered_with_the_nearest_family_or_all():
    answers = {}
    with quiet_transformers():
        for name in CONFIG_MAPPING_NAMES.keys() - FAMILIES.keys() - BROKEN:
            values = json.loads(CONFIG_MAPPING[name]().to_json_string(use_diff=False))
            answers[name] = str(unknown_model_type(values))
    assert len(answers) > 700
    nearest = re.compile(
        r"is not known; the nearest family, ([a-z0-9_-]+), (knows all of its keys|does not know its \w+)"
    )
    for name, answer in answers.items():
        match = nearest.search(answer)
        assert match is None or match[1] in FAMILIES, name
        assert match or "cannot be represented: " in answer or f"known: {', '.join(FAMILIES)}" in answer, name
        assert "\n" not in answer
