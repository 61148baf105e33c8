"""All presets by name. A module named under `extend` may add to the dict."""

import difflib
from typing import Any

from pretrain.config.presets.decoders import DECODERS
from pretrain.config.presets.encoder_decoders import ENCODER_DECODERS
from pretrain.config.presets.encoders import ENCODERS
from pretrain.config.yaml_nodes import merge
from pretrain.errors import ConfigError

PRESETS: dict[str, dict[str, Any]] = DECODERS | ENCODERS | ENCODER_DECODERS

"""Keys of a `model:` section, without `vocab_size`: that is the tokenizer's, unless the config says otherwise."""


# Laying a user's keys over a preset, down to single keys of a stack.


def expand_preset(model: dict[str, Any]) -> dict[str, Any]:
    """Lays the keys of a `model:` section over the preset that it names; without one, returns it as it is.

    A nested mapping is merged key by key (`model: {preset: llama-5m, decoder: {layers: 8}}`), any other value replaces
    the preset's: `decoder: null` removes a stack. Values are not checked here; `ModelConfig` does that.

    Raises:
        ConfigError: There is no such preset; names the nearest ones.
    """
    name = model.get("preset")
    if not isinstance(name, str):
        return model
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4) or sorted(PRESETS)
        raise ConfigError(f"unknown model.preset {name!r}", fix=f"use {' or '.join(near)}")
    return merge(PRESETS[name], model)
