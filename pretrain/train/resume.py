"""What may differ between a run and its resumption: the config by the class of each key, the data by their hashes."""

import logging
from typing import Any

from pretrain.checkpoint.state import TrainState
from pretrain.config.drift import changed_keys, class_of, without_places
from pretrain.config.run import RunConfig
from pretrain.config.yaml_nodes import short
from pretrain.errors import ConfigError, DataError

log = logging.getLogger(__name__)

Changes = dict[str, tuple[Any, Any]]


_ORDER = ("data", "batch", "seed")
"""Sections whose keys, where they are allowed to change, change what comes next."""


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
        is_allowed = kind == "allow" and _is_allowed(without_places(key), config.resume.allow)
        groups.setdefault("allowed" if is_allowed else kind, {})[key] = values
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


def _is_allowed(key: str, allow: list[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in allow)


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


def check_data(saved: TrainState, fresh: TrainState, allow: list[str]) -> None:
    """Compares the data of a checkpoint with the data at hand.

    Raises:
        ConfigError: They are not the same shards or tokenizer.
    """
    pairs = {
        "tokenizer": (saved.tokenizer_hash, fresh.tokenizer_hash),
        "token shards": (saved.data_hash, fresh.data_hash),
    }
    for what, (old, new) in pairs.items():
        if old != new and not _is_allowed("data.path", allow):
            raise ConfigError(
                f"the {what} at data.path differ from those of the run (sha256 {old[:12]} -> {new[:12]})",
                fix="restore them, use another run.name, or pass resume.allow=[data]",
            )


def check_order(saved: TrainState, next_digest: int | None, allow: list[str]) -> None:
    """Compares the samples that come with those that were to come when the checkpoint was saved.

    Args:
        saved: The state that the run goes on from.
        next_digest: Of the global sample ids of its next step; None: there is none.
        allow: `resume.allow`. Where it lets the order change, a difference is only said.

    Raises:
        DataError: They are others.
    """
    found = "" if next_digest is None else f"{next_digest:016x}"
    if not (found and saved.next_digest) or found == saved.next_digest:
        return
    error = DataError(
        f"the samples of step {saved.step + 1} are not those that its checkpoint says come next "
        f"(digest {saved.next_digest} -> {found})",
        fix="go on with the data, config and version of the run so far, or pass resume.allow=[data]",
    )
    if not any(key.split(".")[0] in _ORDER for key in allow):
        raise error
    log.warning("%s", error.what)
