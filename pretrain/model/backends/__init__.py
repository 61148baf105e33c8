"""Attention backends by name. A new one: a file with a class of the `AttentionBackend` protocol, and a line here."""

import difflib
from collections.abc import Callable

from pretrain.errors import ConfigError
from pretrain.model.backends.backend import AttentionBackend, AttentionNeeds
from pretrain.model.backends.eager import EagerAttention
from pretrain.model.backends.sdpa import SdpaAttention

BACKENDS: dict[str, Callable[[AttentionNeeds], AttentionBackend]] = {"eager": EagerAttention, "sdpa": SdpaAttention}


def build_backend(name: str, needs: AttentionNeeds) -> AttentionBackend:
    """Builds the backend of `engine.attention`; `auto` is the best one for the device.

    Raises:
        ConfigError: There is no such backend, or it cannot serve the needs: the reason is given.
    """
    chosen = "sdpa" if name == "auto" else name
    if chosen not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, n=1) or ["auto", *sorted(BACKENDS)]
        raise ConfigError(f"unknown engine.attention {name!r}", fix=f"use {' or '.join(near)}")
    return BACKENDS[chosen](needs)
