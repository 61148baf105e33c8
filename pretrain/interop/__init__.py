"""Families of Hugging Face models that can be read and written, by the `model_type` of their config.json."""

from pretrain.interop.family import Family

FAMILIES: dict[str, Family] = {}
