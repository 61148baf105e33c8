"""The Transformer core. Start with `transformer.py`."""

from pretrain.model.cache import KVCache
from pretrain.model.init import init_weights
from pretrain.model.transformer import Transformer, build_model

__all__ = ["KVCache", "Transformer", "build_model", "init_weights"]
