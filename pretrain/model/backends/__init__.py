"""Attention backends by name. A new one: a class of the `AttentionBackend` protocol, a line here."""

import difflib
from collections.abc import Callable

from pretrain.errors import ConfigError
from pretrain.model.backends.auto import AutoAttention
from pretrain.model.backends.backend import AttentionBackend, AttentionNeeds
from pretrain.model.backends.eager import EagerAttention
from pretrain.model.backends.flex import FlexAttention
from pretrain.model.backends.sdpa import SdpaAttention
from pretrain.model.backends.varlen import VarlenAttention

BACKENDS: dict[str, Callable[[AttentionNeeds], AttentionBackend]] = {
    "auto": AutoAttention,
    "eager": EagerAttention,
    "flex": FlexAttention,
    "sdpa": SdpaAttention,
    "varlen": VarlenAttention,
}


def build_backend(name: str, needs: AttentionNeeds) -> AttentionBackend:
    """Builds the backend that `engine.attention` names; `auto` chooses among the others.

    Raises:
        ConfigError: There is no such backend, or it cannot serve the needs: the reason is given.
    """
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, n=1) or sorted(BACKENDS)
        raise ConfigError(f"unknown engine.attention {name!r}", fix=f"use {' or '.join(near)}")
    return BACKENDS[name](needs)
