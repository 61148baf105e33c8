"""Fields of the config: their keys, types, defaults and descriptions.

    walk_fields --> known_keys              keys for errors and `resume.allow`
                --> explain_key              `pretrain config --explain KEY`
                --> write_reference         docs/config.md
    json_schema (pydantic's, with the descriptions)   `pretrain config --schema`

A description is the docstring below a field, or that of a section's class. It is read from the
source when it is needed: pydantic's `use_attribute_docstrings` would cost each start of each rank
0.4 s.
"""

import ast
import difflib
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from pretrain.config.base import OFF, Section, known_names, on_resume, same_keys
from pretrain.config.model import MODEL_SECTIONS, ModelConfig, RecurrentConfig
from pretrain.config.prepare import PrepareConfig
from pretrain.config.presets import expand_preset
from pretrain.config.recipes import wrong_command
from pretrain.config.run import RunConfig
from pretrain.errors import ConfigError

ROOTS: dict[str, type[Section]] = {"run": RunConfig, "prepare": PrepareConfig}
"""Configs by what they are of."""


def check_root(section: type[Section], values: dict[str, Any], source: str) -> None:
    """Refuses values most of whose keys belong to the other root. Raises: ConfigError."""
    for name, other in ROOTS.items():
        counts = [sum(key in root.model_fields for key in values) for root in (other, section)]
        if section in ROOTS.values() and counts[0] > counts[1]:
            raise wrong_command(source, "train" if name == "run" else name)


def changed_values(section: Section, base: Section | None = None) -> dict[str, Any]:
    """Returns the values that differ from `base` (None: from the defaults), nested.

    A model is compared with its preset. Laid over the defaults they are the section again.
    """
    dumped = section.model_dump(by_alias=True, mode="json")
    changed: dict[str, Any] = {}
    for name, info in type(section).model_fields.items():
        value, key = getattr(section, name), info.alias or name
        is_same = value == getattr(base, name) if base is not None else not section.differs(name)
        is_needed = key == "preset" or (key == "kind" and isinstance(section, RecurrentConfig))
        if is_same and not is_needed:
            continue
        below = None if base is None else getattr(base, name)
        if isinstance(value, ModelConfig | RecurrentConfig) and value.preset is not None:
            below = type(value).model_validate(expand_preset({"preset": value.preset}))
        if isinstance(value, Section):
            changed[key] = changed_values(value, below if type(below) is type(value) else None)
        elif not is_same or value is not None:
            changed[key] = dumped[key]
    return changed


@dataclass(frozen=True, slots=True)
class ConfigField:
    """A field of the config and the section that has it."""

    key: str
    name: str
    info: FieldInfo
    section: type[Section]

    @property
    def subsections(self) -> list[type[Section]]:
        """Sections that the value may be, or may be a list of."""
        return list(_sections_of(self.info.annotation))

    @property
    def description(self) -> str:
        """The docstring below the field, on one line, or else of the section's class."""
        owner = next(one for one in self.section.__mro__ if self.name in inspect.get_annotations(one))
        docstring = _descriptions(owner).get(self.name)
        if docstring is None and self.subsections:
            docstring = inspect.getdoc(self.subsections[0])
        names = ", ".join(f"`{name}`" for name in known_names(self.info))
        text = (docstring or "").partition("\n")[0].replace("{names}", names)
        same = same_keys(self.info)
        return text if same is None else f"{text} Its keys: as those of `{same.other}`."

    @property
    def type(self) -> str:
        """The type in the words of YAML, with its bounds."""
        return _describe_type(self.info)

    @property
    def default(self) -> str:
        """The default as YAML, or `required`; empty for a section."""
        if self.info.is_required():
            return "required"
        value = self.info.get_default(call_default_factory=True, validated_data={})
        if isinstance(value, list):
            value = [item.model_dump() if isinstance(item, Section) else item for item in value]
        return "" if isinstance(value, Section) else json.dumps(value)


def walk_fields(
    section: type[Section] = RunConfig, prefix: str = "", model_kind: str | None = None, *, repeats: bool = False
) -> Iterator[ConfigField]:
    """Yields every field in file order; keys of sections in a list have no numbers.

    `prefix` is the key of the section, with a point at its end; `model_kind=None` enters the
    sections of all kinds of models. `repeats`: also keys that are described in another section
    (`SameKeys`), such as those of an encoder.
    """
    # The two kinds of models share keys, which an error must suggest for the right one.
    foreign = [other for kind, other in MODEL_SECTIONS.items() if model_kind not in (None, kind)]
    for name, info in section.model_fields.items():
        field = ConfigField(f"{prefix}{info.alias or name}", name, info, section)
        yield field
        same = None if repeats else same_keys(info)
        for option in field.subsections:
            if option not in foreign:
                inner = walk_fields(option, f"{field.key}.", model_kind, repeats=repeats)
                yield from (one for one in inner if same is None or (one.section is option and one.name in same.own))


def known_keys(section: type[Section] = RunConfig, model_kind: str | None = None) -> list[str]:
    """Returns all dotted keys, each once."""
    return list(dict.fromkeys(field.key for field in walk_fields(section, model_kind=model_kind, repeats=True)))


SECRET_KEY = re.compile(r"((?<!\w)\w*key|(^|[._])(token|secret|password))$", re.IGNORECASE)


def suggest_key(keys: list[str], section: type[Section], model_kind: str) -> str:
    """Suggests the nearest known key: a sibling, or a key with the same last word elsewhere."""
    all_keys = known_keys(section, model_kind)
    elsewhere = [key for key in all_keys if key.rpartition(".")[2] == keys[-1]]
    if SECRET_KEY.search(keys[-1]) and not elsewhere:  # class_token is no secret
        return "secrets are read from the environment only, never from a config"
    if not elsewhere and keys[-1] in ("pp", "pipeline"):
        why = "DeepSpeed's pipelines have a loop of their own and stop at ZeRO 1"
        return f"{why}; use engine.zero_stage=3, with parallel.tensor within a node"
    if "." in keys[-1]:
        return "indent instead of dots: optim: {lr: 3e-4}"
    parent = ".".join(keys[:-1])
    siblings = {key.rpartition(".")[2]: key for key in all_keys if key.rpartition(".")[0] == parent}
    near = [siblings[word] for word in difflib.get_close_matches(keys[-1], siblings, n=1, cutoff=0.6)]
    near = near or elsewhere or difflib.get_close_matches(".".join(keys), all_keys, n=1, cutoff=0.7)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known here: {', '.join(siblings)}" if siblings else "remove it"


def main_keys(parent: str, section: type[Section] = RunConfig) -> list[str]:
    """Returns the names of two keys of the section `parent`, required ones first."""
    inner = [field for field in walk_fields(section, repeats=True) if field.key.rpartition(".")[0] == parent]
    inner.sort(key=lambda field: not field.info.is_required())
    return [field.key.rpartition(".")[2] for field in inner[:2]]


def _sections_of(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, list):
        for option in typing.get_args(annotation):
            yield from _sections_of(option)


@cache
def _descriptions(section: type[Section]) -> dict[str, str]:
    try:
        source = inspect.getsource(section)
    except OSError:  # of a registry's sections: its class is made, and they have docstrings of their own
        return {}
    (tree,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for node, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(node.target, ast.Name):
            texts[node.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts


_WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", types.NoneType: "null"}


_BOUNDS = {
    "gt": "> {}",
    "ge": ">= {}",
    "lt": "< {}",
    "le": "<= {}",
    "multiple_of": "multiple of {}",
    "min_length": "at least {} item(s)",
    "max_length": "at most {} item(s)",
}
"""Forms of the bounds by pydantic's names."""


def _describe_type(annotation: Any) -> str:
    """Returns a type in the words of YAML, with the bounds of a number or a list: ` (>= 0, < 1)`."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _describe_type(FieldInfo.from_annotation(annotation))
    if isinstance(annotation, FieldInfo):
        limits = [
            form.format(getattr(item, name))
            for item in annotation.metadata
            for name, form in _BOUNDS.items()
            if hasattr(item, name)
        ]
        bounds = f" ({', '.join(limits)})" if limits else ""
        off = " or `off`" if OFF in annotation.metadata else ""
        return _describe_type(annotation.annotation) + bounds + off
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        # Both kinds of model are one section here.
        return " or ".join(dict.fromkeys(_describe_type(option) for option in arguments))
    if origin is list:
        return f"list of {_describe_type(arguments[0])}"
    if origin is dict:
        return f"mapping from text to {_describe_type(arguments[1])}"
    return "section" if issubclass(annotation, Section) else _WORDS[annotation]


def explain_key(key: str) -> str:
    """Returns the type, default and meaning of a key of a run's config or of `pretrain prepare`.

    Numbers of items, as in `inputs.0.path`, are left out.

    Raises:
        ConfigError: There is no such key; names the nearest ones.
    """
    texts = []
    key = ".".join(part for part in key.split(".") if not part.isdecimal())
    for root, section in ROOTS.items():
        for field in walk_fields(section, repeats=True):
            if field.key == key:
                facts = {"type": field.type, "default": field.default, "on resume": on_resume(field.info)}
                lines = [f"{key} ({'a run' if root == 'run' else 'pretrain prepare'})"]
                lines += [f"  {name:<10} {value}" for name, value in facts.items() if value]
                lines += textwrap.wrap(field.description, 100, initial_indent="  ", subsequent_indent="  ")
                lines += _explain_subkeys(field)
                texts.append("\n".join(lines))
    if not texts:
        near = _nearest_keys(key)
        fix = f"did you mean {' or '.join(near)}?" if near else "see docs/config.md"
        raise ConfigError(f"there is no key {key[:80]!r}", where="--explain", fix=fix)
    return "\n\n".join(dict.fromkeys(texts))


def _explain_subkeys(field: ConfigField) -> Iterator[str]:
    # Both kinds of models have some keys, which are explained once.
    inner = {one.key: one for section in field.subsections for one in walk_fields(section) if "." not in one.key}
    width = max(map(len, inner), default=0) + 2
    for key, one in inner.items():
        default = "" if one.default in ("", "required") else f", default {one.default}"
        text = f"{key:<{width}}{one.type}{default}: {one.description}"
        yield from textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent=" " * (width + 2))


def _nearest_keys(key: str) -> list[str]:
    """Returns up to three keys that are meant: by spelling, by the last word, or by their meaning."""
    meanings = {field.key: field.description for section in ROOTS.values() for field in walk_fields(section)}
    last = {name.rpartition(".")[2]: name for name in reversed(meanings)}
    word = key.rpartition(".")[2]
    # The shortest meaning with these words is the most about them.
    about = [name for name in meanings if word.replace("_", " ").lower() in meanings[name].lower()]
    return (
        difflib.get_close_matches(key, meanings, n=3)
        or [name for name in meanings if name.endswith(f".{key}")][:3]
        or sorted(about, key=lambda name: len(meanings[name]))[:3]
        or [last[near] for near in difflib.get_close_matches(word, last, n=3)]
    )


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of a run's config, from which an editor completes and checks YAML."""
    schema = RunConfig.model_json_schema(by_alias=True)
    sections = {field.section.__name__: field.section for field in walk_fields()}
    for name, part in (("RunConfig", schema), *schema["$defs"].items()):
        part.pop("required", None)  # an include, a preset or an override may give a key
        for field in walk_fields(sections[name]):
            if "." not in field.key:
                # pydantic drops the description of a field that refers to another section.
                part["properties"][field.key]["description"] = field.description
    files = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    included = {"description": "Files to read first, which this one is laid over.", **files}
    schema["properties"] = {"include": included, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_INTRODUCTION = """\
# Keys of the config

Written by `pretrain config --reference > docs/config.md` from the fields in `pretrain/config/`; do
not edit.

`pretrain config FILE` prints a config with every default filled in, `pretrain config --explain
optim.lr` the entry of one key. `pretrain config --schema > schema.json` writes a JSON schema, from
which editors complete and check YAML: put `# yaml-language-server: $schema=schema.json` on the
first line of a config. Where a type says `off`, this word, `none`, `never` and null are 0. A section whose
keys are those of another one has no table: `model.encoder.layers` is explained as `model.decoder.layers`.

"On resume" is the effect of a changed value when a run is resumed. `free`: logged. `warn`: logged
as a warning. `allow`: refused, unless `resume.allow` names the key or a section around it. `never`:
refused.
"""


def write_reference() -> str:
    """Returns docs/config.md."""
    parts = [_INTRODUCTION, "## Config of a run\n", *_tables(RunConfig)]
    return "\n".join([*parts, "## Config of `pretrain prepare`\n", *_tables(PrepareConfig)])


def _tables(root: type[Section]) -> Iterator[str]:
    kinds: dict[type[Section], set[str]] = {}
    for kind, model in MODEL_SECTIONS.items():
        for field in walk_fields(model):
            kinds.setdefault(field.section, set()).add(kind)
    tables: dict[tuple[str, type[Section]], dict[str, str]] = {}
    for field in walk_fields(root):
        parent = field.key.rpartition(".")[0]
        tables.setdefault((parent, field.section), {})[field.key] = _row(field)
    for (parent, section), rows in tables.items():
        if parent:
            # `model` and its stacks have other keys in each kind of model.
            only = kinds.get(section, set())
            kind = f" (`model.kind: {min(only)}`)" if len(only) == 1 else ""
            yield f"### {parent}{kind}\n\n{inspect.getdoc(section)}\n"
        yield "| key | type | default | on resume | meaning |\n|---|---|---|---|---|"
        yield "\n".join(rows.values()) + "\n"


def _row(field: ConfigField) -> str:
    default = f"`{field.default}`" if field.default not in ("", "required") else field.default
    rule = on_resume(field.info) or ""
    cells = (f"`{field.key}`", field.type, default, rule, field.description)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
