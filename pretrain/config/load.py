"""Loads a config: a YAML file and `a.b=c` overrides, validated, with all errors at once.

    read_with_includes -> overrides -> modules of `extend` imported -> preset laid under `model`
    (or the model of `init.from`) -> pydantic -> RunConfig
    read_with_includes -> overrides -> pydantic -> any other Section, such as PrepareConfig

An error names the key, its place (`file:line:column` or the override), the rule, and the nearest
key.
"""

import difflib
import importlib
import pkgutil
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic
import yaml

from pretrain.config.base import NAME_PATTERN, Section, expand_home
from pretrain.config.fields import SECRET_KEY, changed_values, check_root, known_keys, main_keys, suggest_key
from pretrain.config.prepare import TRAINED, PrepareConfig
from pretrain.config.presets import expand_preset
from pretrain.config.recipes import PREPARE, RUNS, find_config
from pretrain.config.resumption import START_FIX, follow_folder, no_start, start_folder
from pretrain.config.run import RunConfig
from pretrain.config.yaml_nodes import (
    OVERRIDE,
    LocatedTree,
    merge,
    parse_scalar,
    parse_yaml,
    read_with_includes,
    read_yaml,
    sections_around,
    short,
)
from pretrain.errors import CheckpointError, ConfigError, PretrainError
from pretrain.utils.safe_read import read_json

SectionT = TypeVar("SectionT", bound=Section)

Extensions = Literal["import", "ask", "require", "ignore"]
"""Treatment of the modules under `extend`: of a config that is trained; of one whose run is prepared
or examined, or that is only opened, whose author may be a stranger (they must be imported before:
`pretrain --extend`); of one that is read for its values. The first two name the run where it is."""


def load_config(source: str | Path, overrides: Sequence[str] = (), *, extensions: Extensions = "import") -> RunConfig:
    """Loads and checks a run's config: a YAML file or a built-in one, and `a.b=c` items in order.

    Raises:
        ConfigError: One line for each problem.
    """
    located = read_located(source, overrides)
    if extensions in ("import", "ask"):
        located = follow_folder(located, Path(source), overrides)
    named = located.values.get("extend")
    if named and isinstance(named, list) and extensions != "ignore":  # the validation refuses other types
        where = located.places.get("extend", str(source))
        if extensions in ("ask", "require"):
            _require_imported(named, where)
        else:
            if str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))
            import_extensions(named, where)
    config = parse_section(RunConfig, _lay_preset(located, str(source)), str(source))
    _check_allowed(config.resume.allow, located.places.get("resume.allow", str(source)))
    return config


def load_section(section: type[SectionT], source: str | Path, overrides: Sequence[str] = ()) -> SectionT:
    """Loads and checks another config, such as for `pretrain prepare`. Raises: ConfigError."""
    return parse_section(section, read_located(source, overrides, PREPARE), str(source))


def parse_section(section: type[SectionT], located: LocatedTree, source: str) -> SectionT:
    """Validates values; `source` is the place of those that have none. Raises: ConfigError."""
    try:
        return section.model_validate(located.values)
    except pydantic.ValidationError as error:
        check_root(section, located.values, source)
        raise ConfigError("\n".join(_describe_all(error, located, source, section))) from None


def _describe_all(
    error: pydantic.ValidationError, located: LocatedTree, source: str, section: type[Section], only: str | None = None
) -> list[str]:
    details = [detail for detail in error.errors(include_url=False) if only in (None, detail["type"])]
    return list(dict.fromkeys(_describe(detail, located, source, section) for detail in details))


def read_located(source: str | Path, overrides: Sequence[str], folders: Sequence[str] = RUNS) -> LocatedTree:
    """Returns the values of a config with its includes and overrides, not validated. Raises: ConfigError."""
    located = read_with_includes(find_config(source, folders))
    for override in overrides:
        _apply_override(located, override)
    return located


def _apply_override(located: LocatedTree, override: str) -> None:
    key, separator, text = override.partition("=")
    is_secret = SECRET_KEY.search(key) and key not in known_keys()  # model.multi_token is none
    shown = key + "=***" if is_secret else _URL.sub(r"\1\2", override)
    where = OVERRIDE + short(shown)
    if not separator or not all(part.isidentifier() or part.isdecimal() for part in key.split(".")):
        raise ConfigError("not of the form a.b=c", where=where, fix="for example optim.lr=3e-4")
    value, inner = parse_yaml(text, where)
    before = located.values
    try:
        located.values = _with_value(before, key.split("."), value)
    except (IndexError, ValueError):
        raise ConfigError(
            "there is no such item in the list",
            where=where,
            fix="name an item by its number, from 0",
        ) from None
    located.places |= dict.fromkeys((key, *(f"{key}.{name}" for name in inner)), where)
    for parent in sections_around(key):
        if not _is_section(before, parent):
            located.places[parent] = where


def _with_value(tree: Any, keys: list[str], value: Any) -> Any:
    """Returns a copy of `tree` with a value at a path, merged into a mapping that is there."""
    if not keys:
        return merge(tree, value) if isinstance(tree, dict) and isinstance(value, dict) else value
    first, *rest = keys
    if first == "0" and tree in (None, []):  # the first item of a list that is not there
        return [_with_value(None, rest, value)]
    if isinstance(tree, list):
        number = int(first)
        return [*tree[:number], _with_value(tree[number], rest, value), *tree[number + 1 :]]
    base = tree if isinstance(tree, dict) else {}  # a scalar on the path becomes a mapping
    return base | {first: _with_value(base.get(first), rest, value)}


def _is_section(values: Any, path: str) -> bool:
    for part in path.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return isinstance(values, dict)


def _lay_preset(located: LocatedTree, source: str) -> LocatedTree:
    """Lays the keys of `model` over the model of `init.from`, or over its preset."""
    model = located.values.get("model", {})
    init = located.values.get("init")
    start = init.get("from") if isinstance(init, dict) else None
    if not isinstance(model, dict):
        return located  # refused by the validation
    from_start = isinstance(start, str) and not _names_a_model(model)
    if not from_start and "model" not in located.values:
        return located
    try:
        whole = _lay_over_start(model, str(start)) if from_start else expand_preset(model)
    except PretrainError as error:
        place = located.places.get("init.from" if from_start else "model.preset", source)
        lines = [ConfigError(error.what, where=error.where or place, fix=error.fix).line()]
        try:
            RunConfig.model_validate(located.values)
        except pydantic.ValidationError as others:  # without a model others than unknown keys mean nothing
            lines = [*_describe_all(others, located, source, RunConfig, "extra_forbidden"), *lines]
        raise ConfigError("\n".join(lines)) from None
    return LocatedTree({**located.values, "model": whole}, located.places)


def _read_start_file(path: Path) -> dict[str, Any]:
    if path.name == "model.json":
        return dict(read_json(path)["model"])
    if path.name == "config.yaml":
        return dict(read_yaml(path).values["model"])
    # `interop` is a layer above and needs torch: found by its name, for the kind that needs it.
    open_release = pkgutil.resolve_name("pretrain.interop.release:open_release")
    return dict(open_release(path.parent).config.model_dump(mode="json"))


def _names_a_model(model: dict[str, Any]) -> bool:
    """Returns True if a `model:` section defines a model: by a preset, or by stacks with layers."""
    stacks = (model.get("encoder"), model.get("decoder"))
    return model.get("preset") is not None or any(isinstance(s, dict) and "layers" in s for s in stacks)


def _lay_over_start(model: dict[str, Any], start: str) -> dict[str, Any]:
    """Lays the keys of a `model:` section over the model of `init.from`."""
    base = read_start(Path(expand_home(start)))
    base.pop("preset", None)
    # The end-of-text token is taken from the data, and so are labels.
    if base.get("head"):
        base["head"] = {**base["head"], "labels": []}
    base["special_tokens"] = {**(base.get("special_tokens") or {}), "eos": None}
    if model.get("input"):  # images of another size have another number of positions
        base.pop("max_seq_len", None)
    kind = (base.get("head") or {}).get("kind", "lm")
    head = model.get("head")
    if isinstance(head, dict) and head.get("kind", kind) != kind:  # replaces that of the start
        for key in ("head", "tied_embeddings", "generator_heads"):
            base.pop(key, None)
    return merge(base, model)


def read_start(start: Path) -> dict[str, Any]:
    """Returns the values of `model` of the model at a path. Raises: ConfigError: There is none, or it is damaged."""
    folder = start_folder(start)
    is_checkpoint = (folder / "manifest.json").is_file()
    for place in (folder, folder.resolve().parent.parent) if is_checkpoint else (folder,):  # the run of a checkpoint
        for name in ("model.json", "config.yaml", "config.json"):
            if (place / name).is_file():
                try:
                    return _read_start_file(place / name)
                except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
                    raise ConfigError(f"init.from: {error}", where=str(place / name), fix=START_FIX) from None
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"init.from={folder}: adapters, not a model", fix="merge them into their model by peft")
    raise no_start(start)


def import_extensions(names: Sequence[Any], where: str) -> None:
    """Imports the modules that a config or the command line names. Raises: ConfigError."""
    for name in map(str, names):
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(
                f"extend: {short(name)} is no module's name",
                where=where,
                fix="write it as after `import`: my_lab.my_module",
            )
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # A module that exists but fails to import another keeps its traceback.
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise
            raise ConfigError(
                f"extend: there is no module {name!r}",
                where=where,
                fix="correct the name, or put its folder on PYTHONPATH",
            ) from None


def _require_imported(names: Sequence[Any], where: str) -> None:
    """Refuses modules that are not imported yet: a command that does not train runs no code of a stranger."""
    for name in map(str, names):
        if name not in sys.modules:
            text = f"extend: the module {short(name)} may be code of a stranger, and is not imported here unasked"
            fix = f"if you trust it: pretrain --extend {short(name)} COMMAND ..."
            raise ConfigError(text, where=where, fix=fix)


def _check_allowed(names: list[str], where: str) -> None:
    """Refuses names in `resume.allow` that are no keys: a misspelt one would allow nothing."""
    keys = known_keys() if names else []
    for name in names:
        if name not in keys:
            near = difflib.get_close_matches(name, sorted(keys), n=1)
            fix = f"did you mean {near[0]!r}?" if near else "name keys or sections, such as optim.lr or data"
            raise ConfigError(f"resume.allow: there is no key {short(name)}", where=where, fix=fix)


def _describe(detail: Any, located: LocatedTree, source: str, section: type[Section]) -> str:
    # pydantic adds the branch of a key of several types: `qk_norm.literal['whole','layer']`.
    keys = [str(key) for key in detail["loc"] if not str(key).startswith("literal[")]
    path = ".".join(keys)
    named: list[str] = []
    fix = _FIXES.get(detail.get("ctx", {}).get("pattern", detail["type"]), "")
    names = [key for key in detail["loc"] if not isinstance(key, int)]  # without places in lists
    if detail["type"] == "extra_forbidden":
        model = located.values.get("model")
        kind = model.get("kind", "transformer") if isinstance(model, dict) else "transformer"
        problem = f"unknown key {short(path)}"
        fix = suggest_key(names, section, kind)
    elif detail["type"] == "missing":
        problem = f"{path} is required"
        fix = f"add it, or pass {path}=..."
    elif detail["type"] == "model_type":
        problem = f"{path} is a section, not {short(detail['input'])}"
        fix = f"give keys of it, such as {path}.{f' or {path}.'.join(main_keys('.'.join(names), section))}"
    elif detail["type"] == "value_error":
        problem = f"{path + ': ' if path else ''}{detail['ctx']['error']}"
        named = [".".join([*keys, name]) for name in _NAMED_KEY.findall(problem)]
    else:
        problem = detail["msg"][0].lower() + detail["msg"][1:]
        if not located.places.get(path, "").startswith((f"override '{path}=", f'override "{path}=')):
            problem = f"{path}={short(detail['input'])}: {problem}"
    where = located.find_place(named, path)
    return ConfigError(problem, where=where or source, fix=fix).line()


_NAMED_KEY = re.compile(r"(?<![a-z_])(?<![a-z_]\.)([a-z_]++(?:\.[a-z_]++)*+)=")
"""Field in the message of a rule over several fields: `batch.seq_len=512`."""

_FIXES = {
    "string_type": "put it in quotes",
    "int_type": "write a whole number: 10000, 10_000 or 1e4",
    "int_from_float": "write a whole number: 10000, 10_000 or 1e4",
    "float_type": "write a number, without quotes",
    NAME_PATTERN: "use letters, digits, `.`, `_` and `-`, a letter or digit first",
    "bool_type": "write true or false",
    "list_type": "write a list: [a, b]",
}


_URL = re.compile(r"""(?<!\w)(\w++://)(?:[^/\s]*@)?([^\s?#,\]}'"]*)(?:[?#][^\s,\]}'"]*)?""")
"""Address; the parts outside its groups (user, password, query, fragment) may be secret."""


class _Dumper(yaml.SafeDumper):
    """Writes YAML 1.1 and 1.2 alike: floats with a point, text that looks like a number in quotes."""

    def represent_str(self, value: str) -> yaml.ScalarNode:
        style = None if parse_scalar(value) == value else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", value, style)

    def represent_float(self, value: float) -> yaml.ScalarNode:
        mantissa, e, exponent = repr(value).partition("e")
        text = mantissa if "." in mantissa else f"{mantissa}.0"
        return self.represent_scalar("tag:yaml.org,2002:float", text + e + exponent)


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_representer(float, _Dumper.represent_float)


_OF_THE_PLACE = ("run", "tracking", "profile", "resume", "launch")
_PLACES = ("path", "from", "cache_dir")


def dump_config(config: RunConfig, *, changed: bool = False, is_published: bool = False) -> str:
    """Returns the resolved config as YAML that `load_config` reads back to an equal config.

    `changed`: only what differs from the defaults and the preset. `is_published`: of that, what is
    not about the place of the run; of a path its last name remains.
    """
    values = config.model_dump(by_alias=True, mode="json")
    if changed or is_published:
        values = changed_values(config)
    if is_published:
        names = [name for name in values if name not in _OF_THE_PLACE]
        values = {name: _without_places(values[name]) for name in names}
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


def _without_places(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_places(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: Path(inner).name if name in _PLACES and isinstance(inner, str) else _without_places(inner)
        for name, inner in value.items()
    }


PREPARE_OPTIONS = {
    "output": "--output",
    "kind": "--kind",
    "inputs.0.path": "--input",
    "inputs.0.text_field": "--text-field",
    "inputs.0.max_document_bytes": "--max-document-bytes",
    "inputs.0.on_error": "--on-error",
    "max_skipped_share": "--max-skipped-share",
    "tokenizer.kind": "--tokenizer",
    "tokenizer.vocab_size": "--vocab-size",
    "split": "--split",
}
"""Options of `pretrain prepare` by key."""


def short_prepare(
    output: str | Path,
    inputs: Sequence[str] = (),
    *,
    tokenizer: str = "bpe",
    vocab_size: int | None = None,
    text_field: str = "text",
    max_document_bytes: int | None = None,
    on_error: str = "stop",
    max_skipped_share: float = 0.01,
    split: str = "hash:0.01",
    kind: str = "text",
    format: str = "auto",
) -> PrepareConfig:
    """Returns the config of `pretrain prepare` without a file. Raises: ConfigError: Invalid values.

    No inputs: the standard library of Python. `tokenizer`: a kind to train, or a `tokenizer.path`.
    """
    is_trained = tokenizer in TRAINED
    if vocab_size is not None and (not is_trained or tokenizer == "char"):
        raise ConfigError(
            f"vocab_size={vocab_size} does not go with tokenizer={tokenizer}",
            fix="leave it out",
        )
    chosen = {"kind": tokenizer} if is_trained else {"kind": "given", "path": tokenizer}
    one: dict[str, Any] = {"path": [*inputs], "text_field": text_field, "format": format}
    one["on_error"] = on_error
    if max_document_bytes is not None:
        one["max_document_bytes"] = max_document_bytes
    values: dict[str, Any] = {
        "output": str(output),
        "kind": kind,
        "inputs": [one] if inputs else [],
        "tokenizer": {**chosen, "vocab_size": vocab_size},
        "split": split,
        "max_skipped_share": max_skipped_share,
    }
    return parse_section(PrepareConfig, LocatedTree(values, dict(PREPARE_OPTIONS)), "pretrain prepare")
