"""From a YAML file and `a.b=c` overrides to a checked RunConfig, or to every error at once.

    read_with_includes -> overrides (OmegaConf dotlist) -> preset laid under `model` -> pydantic -> RunConfig

An error names the key, where it was written (`file:line:column` or the override), the rule, and the nearest known key.
"""

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pretrain.config.base import Section
from pretrain.config.presets import expand_preset
from pretrain.config.run import RunConfig
from pretrain.config.yaml_nodes import Located, parse_yaml, read_with_includes
from pretrain.errors import ConfigError


def builtin_configs() -> Path:
    """Returns the folder of the configs that come with the package (a checkout's, or the wheel's copy)."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "configs", package / "configs"):
        if folder.is_dir():
            return folder
    raise ConfigError("the package's own configs are missing", where=str(package), fix="reinstall pretrain")


def find_config(source: str | Path) -> Path:
    """Returns `source` if it is a file, else the built-in config of that name (such as `configs/run/x.yaml`)."""
    path = Path(source)
    if path.is_file():
        return path
    name = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    if not path.is_absolute() and ".." not in path.parts:
        built_in = builtin_configs() / name
        if built_in.is_file():
            return built_in
    return path


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Loads and checks a run's config.

    Args:
        source: A YAML file, or the name of a built-in one such as `configs/run/quickstart.yaml`.
        overrides: `a.b=c` items, laid over the file in order.

    Raises:
        ConfigError: With one line for every problem found.
    """
    located = read_with_includes(find_config(source))
    for override in overrides:
        _apply_override(located, override)
    return _validate(located, str(source))


def _apply_override(located: Located, override: str) -> None:
    key, separator, text = override.partition("=")
    where = f"override {override!r}"
    if not separator or not all(part.isidentifier() for part in key.split(".")):
        raise ConfigError("not of the form a.b=c", where=where, fix="for example optim.lr=3e-4")
    tree = OmegaConf.create(located.values)
    try:
        OmegaConf.update(tree, key, parse_yaml(text, where)[0], merge=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], where=where, fix="check the key") from None
    located.values = OmegaConf.to_container(tree, resolve=False)
    located.places[key] = where


def _validate(located: Located, source: str) -> RunConfig:
    values = dict(located.values)
    if isinstance(values.get("model"), dict):
        try:
            values["model"] = expand_preset(values["model"])
        except ConfigError as error:
            where = located.places.get("model.preset", source)
            raise ConfigError(error.what, where=where, fix=error.fix) from None
    try:
        return RunConfig.model_validate(values)
    except pydantic.ValidationError as error:
        lines = [_describe(detail, located, source) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _describe(detail: Any, located: Located, source: str) -> str:
    keys = [str(key) for key in detail["loc"]]
    path = ".".join(keys)
    where = next((located.places[p] for p in _prefixes(keys) if p in located.places), source)
    if detail["type"] == "extra_forbidden":
        what, fix = f"unknown key {path!r}", _suggest(keys)
    elif detail["type"] == "missing":
        what, fix = f"{path} is required", f"add it, or pass {path}=..."
    elif detail["type"] == "value_error":
        what, fix = f"{path + ': ' if path else ''}{detail['ctx']['error']}", ""
    else:
        rule = detail["msg"][0].lower() + detail["msg"][1:]
        what, fix = f"{path}={detail['input']!r}: {rule}", ""
    return ConfigError(what, where=where, fix=fix).line()


def _prefixes(keys: list[str]) -> Iterator[str]:
    for length in range(len(keys), 0, -1):
        yield ".".join(keys[:length])


def _suggest(keys: list[str]) -> str:
    """Names the nearest known key: among its siblings first, then anywhere by its last word."""
    if any(word in keys[-1].lower() for word in ("key", "token", "secret", "password")) and "tokens" not in keys[-1]:
        return "secrets are read from the environment only, never from a config"
    known = list(known_keys())
    path, parent = ".".join(keys), ".".join(keys[:-1])
    siblings = [key for key in known if key.rpartition(".")[0] == parent]
    near = difflib.get_close_matches(path, siblings, n=1, cutoff=0.6)
    near = near or [key for key in known if key.rpartition(".")[2] == keys[-1]][:1]
    near = near or difflib.get_close_matches(path, known, n=1, cutoff=0.7)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known here: {', '.join(key.rpartition('.')[2] for key in siblings)}" if siblings else "remove it"


def known_keys(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yields every dotted key of the config, in file order."""
    for name, info in section.model_fields.items():
        path = f"{prefix}{info.alias or name}"
        yield path
        for option in _sections_of(info.annotation):
            yield from known_keys(option, f"{path}.")


def _sections_of(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for option in typing.get_args(annotation):
            yield from _sections_of(option)


class _Dumper(yaml.SafeDumper):
    """Writes floats so that every YAML reader takes them for floats (`1.0e-04`, never `1e-4`)."""

    def represent_float(self, value: float) -> yaml.ScalarNode:
        mantissa, e, exponent = repr(value).partition("e")
        text = mantissa if "." in mantissa else f"{mantissa}.0"
        return self.represent_scalar("tag:yaml.org,2002:float", text + e + exponent)


_Dumper.add_representer(float, _Dumper.represent_float)


def dump_config(config: RunConfig) -> str:
    """Returns the resolved config as YAML that `load_config` reads back to an equal config."""
    values = config.model_dump(by_alias=True, mode="json")
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


def changed_keys(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Returns {dotted key: (old value, new value)} of the leaves that differ."""
    left, right = (dict(_leaves(config.model_dump(by_alias=True, mode="json"))) for config in (old, new))
    keys = [*left, *(key for key in right if key not in left)]
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
