"""Base class of the config sections, and the annotation of their fields for a resumed run."""

import difflib
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic.fields import FieldInfo

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Names of runs and of sources: parts of paths and of metrics."""

MAX_LAYERS = 2_000
"""Most layers of a model, twice those of the deepest that is known (Wang et al. 2022, DeepNet)."""
MAX_WIDTH = 2**20
"""Most dimensions of a vector. With the limits below, no tensor's size overflows 64 bits."""
MAX_HEADS = MAX_EXPERTS = 2**16
MAX_SIDE = 2**14
"""Most pixels of a side of an image."""
MAX_ROWS = 2**30
"""Most rows of a table: tokens, positions, hashes."""
MAX_BATCH_TOKENS = 2**40
"""Most tokens of a step: `plan` tries the divisors of its rows."""


def expand_home(path: str) -> str:
    """Returns a path with `~` expanded; it stays for an unknown user, where Path.expanduser would raise."""
    return os.path.expanduser(path)  # noqa: PTH111


UserPath = Annotated[str, AfterValidator(expand_home)]
"""A path as a user writes it; `~` is the home folder, on the machine that reads the config first."""


OFF_WORDS = ("off", "none", "never")


def _switch_off(value: Any) -> Any:
    """Takes null, false and the words for it as 0. Raises: ValueError: Another text."""
    if value is None or value is False or (isinstance(value, str) and value.lower() in OFF_WORDS):
        return 0
    if isinstance(value, str):
        raise ValueError(f"{value[:40]!r} is no number; write one, or off")
    return value


_Switch = float | Literal["off", "none", "never"] | None
OFF = BeforeValidator(_switch_off, json_schema_input_type=_Switch)
"""Annotation of a number whose 0 means never, or nothing: `off`, `none`, `never` and null are 0."""


Conflicts = Iterator[str | tuple[str, str]]
"""Rows of rules, made one by one: values that do not go together, with the reason, and the fix where it is apart."""


def refuse(conflicts: Iterable[str | tuple[str, str]]) -> None:
    """Raises: ValueError: There is a conflict; has the sentence of the first."""
    for row in conflicts:
        raise ValueError(row if isinstance(row, str) else "; ".join(row))


class Section(BaseModel):
    """A frozen, strict section: no unknown keys, no coercion ("10" is not 10), no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _reset(cls, values: Any) -> Any:
        """Takes null as the defaults, where every key has one: `optim.muon=null` undoes what a recipe says of Muon."""
        has_defaults = not any(field.is_required() for field in cls.model_fields.values())
        return {} if values is None and has_defaults else values

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        refuse(self._conflicts())
        return self

    def _conflicts(self) -> Conflicts:
        yield from ()

    def differs(self, name: str) -> bool:
        """Returns True if a field differs from its default."""
        field = type(self).model_fields[name]
        return bool(getattr(self, name) != field.get_default(call_default_factory=True, validated_data={}))


FEW = 6
"""Names of a registry that an error lists in full."""


class OnResume(StrEnum):
    """Effect of a changed value when a run is resumed: `lr: Annotated[float, OnResume.WARN]`."""

    FREE = "free"
    """Logged: changes where or how the work is done."""
    WARN = "warn"
    """Logged as a warning: the run takes another course from there on."""
    ALLOW = "allow"
    """Refused, unless `resume.allow` names the key or its section: changes the meaning of the run."""
    NEVER = "never"
    """Refused: the checkpoints do not fit, or their numbers would mean something else."""


@dataclass(frozen=True, slots=True)
class SameKeys:
    """Annotation of a section with the keys of another one: they are described there, those in `own` here."""

    other: str
    own: tuple[str, ...] = ()


def same_keys(info: FieldInfo) -> SameKeys | None:
    """Returns the annotation of a field whose keys are described elsewhere."""
    return next((item for item in info.metadata if isinstance(item, SameKeys)), None)


def on_resume(info: FieldInfo) -> OnResume | None:
    """Returns the annotation of a field. None: it is a section, or of another config."""
    return next((item for item in info.metadata if isinstance(item, OnResume)), None)


def known_names(info: FieldInfo) -> list[str]:
    """Returns the names of the open registry that `check_name` holds a field to; none for other fields."""
    checks = (item.func for item in info.metadata if isinstance(item, AfterValidator))
    return [name for check in checks if isinstance(check, partial) for name in check.keywords["known"]]


def check_name(name: str, known: Collection[str]) -> str:
    """Returns a name of an open registry. Raises: ValueError, which lists all names, or the nearest of many."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) if len(known) > FEW else []
        near = near or sorted(known)
        use = f"use {' or '.join(near)}"
        raise ValueError(f"unknown name {name!r}; {use}, or add it by a module under extend")
    return name
