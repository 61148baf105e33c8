"""Reads and merges YAML files, with the place of each key."""

import copy
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from typing import Any

import yaml

from pretrain.config.recipes import is_file, match_recipes, near_file
from pretrain.errors import ConfigError
from pretrain.utils.safe_read import open_file

MAX_FILE_BYTES = 1024 * 1024
MAX_READS = 100
MAX_KEY_CHARS = 500
"""Most characters of a dotted key, which bound the nesting too."""
OVERRIDE = "override "
"""Beginning of the place of a key that the command line gives."""
_MAX_DIGITS = 100  # a number of more than 64 bits is a float, which no count may be
_MAX_EXACT = 2.0**53  # beyond, a float is not every whole number

# Stricter than YAML 1.1: duplicate keys, aliases and tags are refused; only `true` and `false` are
# booleans (`name: no` stays text), `1e-4` is a number, and `168e9` a whole one.
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)$")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")


def sections_around(key: str) -> Iterator[str]:
    """Yields the sections around a dotted key, the nearest first."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


@dataclass
class LocatedTree:
    """A tree of plain values and the place of each dotted key."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def find_place(self, named: Sequence[str], path: str) -> str | None:
        """Returns the place of a broken rule: of a key that it names, else of `path` or the nearest section around it.

        An override comes first, since the file was right before it; one of the preset stands for
        the values of that preset.
        """
        named_places = [self.places[key] for key in named if key in self.places]
        if any(key.startswith("model.") and key not in self.places for key in named):
            named_places += [self.places[key] for key in ("model.preset", "init.from") if key in self.places]
        overrides = (place for place in named_places if place.startswith(OVERRIDE))
        own_places = (self.places[key] for key in named if key in self.places)
        others = (self.places[key] for key in (path, *sections_around(path)) if key in self.places)
        return next(chain(overrides, own_places, others), None)


class _Loader(yaml.SafeLoader):
    """SafeLoader whose scalars are resolved by `parse_scalar`; only its composer is used."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        where = _place(event.start_mark)
        if isinstance(event, yaml.events.AliasEvent):
            raise ConfigError("aliases (*name) are not allowed", where=where, fix="write the value out")
        if event.tag is not None:
            raise ConfigError(
                f"tags ({short(event.tag)}) are not allowed",
                where=where,
                fix="remove the tag",
            )
        return super().compose_node(parent, index)


def _place(mark: Any) -> str:
    return f"{mark.name}:{mark.line + 1}:{mark.column + 1}"


def short(value: object) -> str:
    """Returns a value as it is written in YAML, text in quotes, cut to about 80 characters, for an error."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}...{text[-1]}"


def parse_scalar(text: str) -> Any:
    """Returns the value of an unquoted scalar: null, boolean, integer, float, or the text itself."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if _INT.match(text) and len(text) <= _MAX_DIGITS:
        whole = int(text.replace("_", ""))
        return whole if abs(whole) < 2**63 else float(whole)
    if _FLOAT.match(text):
        number = float(text.replace("_", ""))
        is_count = "e" in text.lower() and number.is_integer() and abs(number) <= _MAX_EXACT
        return int(number) if is_count else number
    if _SPECIAL_FLOAT.match(text):
        return float(text.replace(".", ""))
    return text


def _plain(node: yaml.Node, prefix: str, places: dict[str, str]) -> Any:
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            where = _place(key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError("a key must be a plain word", where=where, fix="rename it")
            key = key_node.value
            path = f"{prefix}.{key}" if prefix else key
            if len(path) > MAX_KEY_CHARS:  # of places, each of which has all of it
                raise ConfigError(
                    f"the key {short(path)} has more than {MAX_KEY_CHARS} characters",
                    where=where,
                    fix="see configs/ for the shape",
                )
            if key in result:
                raise ConfigError(f"key {short(path)} stands twice", where=where, fix="keep one of them")
            places[path] = where
            result[key] = _plain(value_node, path, places)
        return result
    if isinstance(node, yaml.SequenceNode):
        items = enumerate(node.value)
        return [_plain(item, f"{prefix}.{number}", places) for number, item in items]
    assert isinstance(node, yaml.ScalarNode)
    return parse_scalar(node.value) if node.style is None else node.value


def parse_yaml(text: str, name: str) -> tuple[Any, dict[str, str]]:
    """Parses YAML text; returns its value and the place of each dotted key. Raises: ConfigError."""
    places: dict[str, str] = {}
    try:
        loader = _Loader(text)
        loader.name = name
        node = loader.get_single_node()
        return (None if node is None else _plain(node, "", places)), places
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = _place(mark) if mark else name
        raise ConfigError(
            f"not YAML: {error.problem or error.context}",
            where=where,
            fix="correct the syntax",
        ) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = f"{name}:{before.count(chr(10)) + 1}:{error.position - before.rfind(chr(10))}"
        raise ConfigError(
            f"not YAML: the character U+{error.character:04X} is not allowed",
            where=where,
            fix="remove it",
        ) from None
    except RecursionError:
        raise ConfigError("nested too deeply", where=name, fix="see configs/ for the shape") from None


_parse_file = lru_cache(maxsize=64)(parse_yaml)
"""Of a file that one process reads again and again, as a ladder or a notebook does: parsing is most of its loading."""


def read_yaml(path: Path) -> LocatedTree:
    """Reads one file, without its includes. Raises: ConfigError."""
    where = str(path)
    try:
        with open_file(path) as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(
                f"larger than {MAX_FILE_BYTES} bytes",
                where=where,
                fix="give a config, not data",
            )
        text = content.decode()
    except FileNotFoundError:
        fix = f"did you mean {near}?" if (near := near_file(path)) else "check the path"
        raise ConfigError("no such config file", where=where, fix=fix) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 at byte {error.start}"
        raise ConfigError(
            f"cannot read the config: {reason}",
            where=where,
            fix="give a YAML file",
        ) from None
    value, places = copy.deepcopy(_parse_file(text, where))
    if value is not None and not isinstance(value, dict):
        raise ConfigError(
            "the top level must be `key: value` pairs",
            where=where,
            fix="see configs/",
        )
    return LocatedTree(value or {}, places)


def read_with_includes(path: Path) -> LocatedTree:
    """Reads a file and everything it includes. Raises: ConfigError."""
    return _read_included(path, (), count(1))


def _read_included(path: Path, outer: tuple[Path, ...], reads: Iterator[int]) -> LocatedTree:
    """Reads a file within those that include it, `outer`, as the next of all reads."""
    if next(reads) > MAX_READS:  # thirty files that include the next one twice would be 2^30
        raise ConfigError(
            f"the includes make more than {MAX_READS} reads of files",
            where=str(path),
            fix="include each file once",
        )
    tree = read_yaml(path)
    includes = tree.values.pop("include", [])
    where = tree.places.pop("include", str(path))
    names = [includes] if isinstance(includes, str) else includes
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "include must be a file name or a list of them",
            where=where,
            fix="include: [../data/x.yaml]",
        )
    result = LocatedTree()
    opened = (*outer, path.resolve())
    for name in names:
        built_in = [recipe.path for recipe in match_recipes(name, ())]
        target = next((file for file in (path.parent / name, Path(name), *built_in) if is_file(file)), None)
        if target is None:
            problem = f"included file {short(str(path.parent / name))} does not exist"
            fix = "give a path relative to this file, or a built-in one: configs/engine/zero2.yaml"
            raise ConfigError(problem, where=where, fix=fix)
        if target.resolve().suffix not in (".yaml", ".yml"):  # an error would quote lines of it
            raise ConfigError(
                f"included file {short(name)} is not a .yaml file",
                where=where,
                fix="include configs only",
            )
        if target.resolve() in opened:
            raise ConfigError(
                f"include {short(name)} leads back to itself",
                where=where,
                fix="break the circle",
            )
        part = _read_included(target, opened, reads)
        result.values = merge(result.values, part.values)
        result.places.update(part.places)
    result.values = merge(result.values, tree.values)
    result.places.update(tree.places)
    return result


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of `base` with `over` laid on it key by key; lists and scalars are replaced."""
    merged = copy.deepcopy(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if nested else copy.deepcopy(value)
    return merged
