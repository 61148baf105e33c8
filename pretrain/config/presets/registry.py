"""All presets by name. A module named under `extend` may add to the dict."""

from typing import Any

from pretrain.config.presets.decoders import DECODERS
from pretrain.config.presets.encoder_decoders import ENCODER_DECODERS
from pretrain.config.presets.encoders import ENCODERS

PRESETS: dict[str, dict[str, Any]] = DECODERS | ENCODERS | ENCODER_DECODERS
"""Keys of a `model:` section, without `vocab_size`: that is the tokenizer's, unless the config says otherwise."""
