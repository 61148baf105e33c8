"""Laying one tree of values over another."""

import copy
from typing import Any


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of `base` with `over` laid on it key by key; lists and scalars are replaced, not joined."""
    merged = copy.deepcopy(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if nested else copy.deepcopy(value)
    return merged
