"""Completion of arguments by the shell: configs, keys and values of overrides, run folders.

Where nothing here fits, the shell completes paths. Only keys import the config, a fifth of a
second.
"""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Context

if TYPE_CHECKING:
    from pretrain.config.base import Section
    from pretrain.config.fields import ConfigField


def complete_config(incomplete: str) -> list[str]:
    """Completes a recipe of a run, or a YAML file of this folder."""
    from pretrain.config.recipes import RUNS

    return _configs(RUNS, incomplete)


def complete_override(context: Context, incomplete: str) -> list[str]:
    """Completes `key=value` of a run's config."""
    from pretrain.config.run import RunConfig

    return _overrides(RunConfig, context.params.get("overrides") or [], incomplete)


def complete_key(incomplete: str) -> list[str]:
    """Completes a key of a run's config or of `pretrain prepare`, of a section too."""
    from pretrain.config.fields import ROOTS, known_keys

    keys = dict.fromkeys(key for section in ROOTS.values() for key in known_keys(section))
    return [key for key in keys if key.startswith(incomplete)]


def complete_prepare(context: Context, incomplete: str) -> list[str]:
    """Completes a config of `pretrain prepare`, then `key=value` of it."""
    words = context.params.get("arguments") or []
    if words:
        from pretrain.config.prepare import PrepareConfig

        return _overrides(PrepareConfig, words[1:], incomplete)
    from pretrain.config.recipes import PREPARE

    return _configs(PREPARE, incomplete)


def complete_recipe(incomplete: str) -> list[str]:
    """Completes a name that `pretrain recipes cp` takes."""
    from pretrain.config.recipes import PREPARE, RUNS, list_recipes

    names = [name for recipe in list_recipes((*RUNS, *PREPARE)) for name in (recipe.short, recipe.name)]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Completes a run folder: of the folder that is typed, or else of runs/."""
    parent = Path(incomplete.rpartition("/")[0] or "/") if "/" in incomplete else Path("runs")
    runs = [str(record.parent) for record in sorted(parent.glob("*/run.json"))]
    return _quoted([run for run in runs if run.startswith(incomplete)])


def _configs(folders: tuple[str, ...], incomplete: str) -> list[str]:
    from pretrain.config.recipes import list_recipes

    names = [recipe.short for recipe in list_recipes(folders)] + sorted(path.name for path in Path().glob("*.yaml"))
    return _quoted([name for name in names if name.startswith(incomplete)])


class _Inserted(str):
    """A word that bash inserts as it is, with its quotes: typer leaves out what does not begin as the unquoted word."""

    __slots__ = ()

    def startswith(self, *_: object) -> bool:
        return True


def _quoted(words: list[str]) -> list[str]:
    """Returns words as the shell inserts them: in bash quoted, as other shells do themselves."""
    if os.environ.get("_PRETRAIN_COMPLETE") != "complete_bash":
        return words
    typed = os.environ["COMP_WORDS"].split("\n")
    place = int(os.environ["COMP_CWORD"])
    opened = typed[place][:1] if place < len(typed) else ""
    # Behind an open quote bash replaces what is in it, and closes it.
    if opened == "'":
        words = [word.replace("'", "'\"'\"'") for word in words]
    elif opened == '"':
        words = [re.sub(r'(["$`\\])', r"\\\1", word) for word in words]
    else:
        words = [shlex.quote(word) for word in words]
    return [_Inserted(word) for word in words]


def _overrides(section: "type[Section]", words: list[str], incomplete: str) -> list[str]:
    """Completes the last of the words of overrides."""
    fields = dict(_leaves(section))
    # bash divides words at `=`: `engine.kind = d`; where `=` is last, it does not come here.
    before = words[:-1] if words[-1:] == ["="] else words if not incomplete else []
    if before and before[-1] in fields:
        return _values(fields[before[-1]], incomplete)
    key, separator, value = incomplete.partition("=")
    if separator:
        return [f"{key}={one}" for one in _values(fields.get(key), value)]
    keys = [name for name in fields if name.startswith(key)]
    offers = [f"{name}=" for name in keys]
    # Behind a single offer bash writes a space; the values make them several.
    return offers + [f"{offers[0]}{one}" for one in _values(fields[keys[0]], "")] if len(keys) == 1 else offers


def _leaves(section: "type[Section]") -> "Iterator[tuple[str, ConfigField]]":
    """Yields the fields that have a value, by their key; of a list the first item's."""
    from pretrain.config.fields import walk_fields

    prefixes = {"": ""}
    for field in walk_fields(section, repeats=True):
        parent, _, name = field.key.rpartition(".")
        key = prefixes[parent] + name
        if field.subsections:
            prefixes[field.key] = f"{key}.0." if field.type.startswith("list") else f"{key}."
        else:
            yield key, field


def _values(field: "ConfigField | None", start: str) -> list[str]:
    """Returns the choices of a field that begin so; without choices its default."""
    if field is None:
        return []
    if field.key == "model.preset":
        from pretrain.config.presets import PRESETS

        values = list(PRESETS)
    elif "true or false" in field.type:
        values = ["true", "false"]
    else:
        from pretrain.config.base import known_names

        choices = re.findall(r"`([^`]+)`", field.type) or sorted(known_names(field.info))
        values = choices or [field.default.strip('"')]
    return _quoted([value for value in values if value.startswith(start) and value not in ("", "required")])
