"""Presets: named models as data over `ModelConfig`, in the sizes of families."""

import difflib

from pretrain.config.yaml_nodes import merge
from pretrain.errors import ConfigError
from pretrain.families import PRESETS
from pretrain.families.sizes import Values


def expand_preset(model: Values) -> Values:
    """Lays the keys of a `model:` section over its preset; returns a section without one unchanged.

    Mappings are merged key by key (`model: {preset: llama-5m, decoder: {layers: 8}}`); any other value replaces that
    of the preset: `decoder: null` removes a stack. Values are not checked here.

    Raises:
        ConfigError: Unknown preset; names the nearest ones.
    """
    name = model.get("preset")
    if not isinstance(name, str):
        return model
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4) or sorted(PRESETS)
        raise ConfigError(f"unknown model.preset {name!r}", fix=f"use {' or '.join(near)}")
    return merge(PRESETS[name], model)
