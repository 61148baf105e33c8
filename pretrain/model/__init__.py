"""The models. Start with `transformer.py`; the recurrent baselines are in `recurrent/`."""

from pretrain.model.build import LanguageModel, build_model, init_weights
from pretrain.model.kv_cache import KVCache
from pretrain.model.recurrent.recurrent import Recurrent
from pretrain.model.transformer import Transformer

__all__ = ["KVCache", "LanguageModel", "Recurrent", "Transformer", "build_model", "init_weights"]
