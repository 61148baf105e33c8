"""Whether a run goes on with another config: every difference is shown, and what changes its meaning is refused."""

import logging
from typing import Any

from pretrain.config.drift import changed_keys, class_of, without_places
from pretrain.config.run import RunConfig
from pretrain.config.yaml_nodes import short
from pretrain.errors import ConfigError

log = logging.getLogger(__name__)

Changes = dict[str, tuple[Any, Any]]


def check_config(stored: RunConfig, config: RunConfig, *, has_saved: bool = True) -> None:
    """Compares the config of a run with that of its resumption, and logs every difference, by class.

    Args:
        stored: What the run was started with.
        config: What is to go on.
        has_saved: Whether there is a checkpoint to go on from; without one all may change.

    Raises:
        ConfigError: Keys that define the run differ; all are named with both values, and what to add to go on.
    """
    changes = changed_keys(stored, config)
    groups: dict[str, Changes] = {}
    for key, values in changes.items():
        kind = class_of(key)
        if kind == "allow" and is_allowed(without_places(key), config.resume.allow):
            kind = "allowed"
        groups.setdefault(kind, {})[key] = values
    if has_saved and groups.keys() & {"allow", "never"}:
        raise _refusal(config, groups.get("allow", {}), groups.get("never", {}))
    if changes:
        lines = [
            f"    {kind:<7} {_shown(key, values)}"
            for kind in ("never", "allow", "allowed", "warn", "free")
            for key, values in groups.get(kind, {}).items()
        ]
        level = logging.INFO if groups.keys() <= {"free"} else logging.WARNING
        going_on = "resuming" if has_saved else "starting over, as nothing was saved,"
        log.log(level, "%s with a config that differs from the run's so far:\n%s", going_on, "\n".join(lines))


def _shown(key: str, values: tuple[Any, Any]) -> str:
    return f"{key}: {short(values[0])} -> {short(values[1])}"


def _refusal(config: RunConfig, allow: Changes, never: Changes) -> ConfigError:
    listed, fixes = [], []
    if allow:
        listed.append("on purpose only: " + ", ".join(_shown(key, values) for key, values in allow.items()))
    if never:
        listed.append("never: " + ", ".join(_shown(key, values) for key, values in never.items()))
        fixes.append(f"restore {', '.join(never)}")
    if allow:
        names = dict.fromkeys([*config.resume.allow, *map(without_places, allow)])
        fixes.append(f"add resume.allow=[{','.join(names)}]")
    return ConfigError(
        f"the run {config.run.name} was started with another config ({'; '.join(listed)})",
        fix=f"use another run.name, or {' and '.join(fixes)}",
    )


def is_allowed(key: str, allow: list[str]) -> bool:
    """Whether `resume.allow` names a key, or a section that it is in."""
    return any(key == name or key.startswith(f"{name}.") for name in allow)


def fill_from(stored: RunConfig, config: RunConfig) -> RunConfig:
    """Fills in what a config leaves to the data with what the run has found there: the data need not be at hand."""
    old, model = stored.model, config.model
    named = {name: number for name, number in model.special_tokens if number is not None}
    filled: dict[str, Any] = {"special_tokens": old.special_tokens.model_copy(update=named)}
    if model.vocab_size is None or config.init.from_ is not None:  # whose tables grow with the data's
        filled["vocab_size"] = old.vocab_size
    if not model.head.labels:
        filled["head"] = model.head.model_copy(update={"labels": old.head.labels})
    return config.model_copy(update={"model": model.model_copy(update=filled)})
