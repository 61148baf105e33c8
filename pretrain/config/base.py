"""What every config section has in common."""

import difflib
from collections.abc import Collection

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen, strict config section: no unknown keys, no silent coercion ("10" is not 10), no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True)


def check_name(name: str, known: Collection[str]) -> str:
    """Returns `name` if it is a key of an open registry. Raises: ValueError, with the nearest ones."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)
        raise ValueError(f"unknown name {name!r}; use {' or '.join(near)}, or add it by a module under extend")
    return name
