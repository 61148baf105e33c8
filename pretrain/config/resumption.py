"""Compares the configs of a run and of its resumption, by the `OnResume` of each field; finds a moved run."""

import difflib
import logging
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pretrain.config.base import NAME_PATTERN, OnResume, Section, expand_home, on_resume
from pretrain.config.fields import walk_fields
from pretrain.config.run import RunConfig
from pretrain.config.yaml_nodes import LocatedTree, short
from pretrain.errors import ConfigError
from pretrain.utils.hub import is_hub_name

log = logging.getLogger(__name__)

START_FIX = (
    "check the path; a run that has begun continues without its start: pretrain train RUN/config.yaml, "
    "which adapters need at its new place: init.from=NEW/PLACE"
)

Changes = dict[str, tuple[Any, Any]]
"""Old and new value by key."""


def without_places(key: str) -> str:
    """Returns a key without places in lists: `data.mixture.weight` for `data.mixture[2].weight`."""
    return re.sub(r"\[\d+\]", "", key)


@cache
def _rules() -> dict[str, OnResume]:
    return {field.key: rule for field in walk_fields(repeats=True) if (rule := on_resume(field.info))}


def class_of(key: str) -> OnResume:
    """Returns the effect of a changed value of a key, with or without places in lists."""
    return _rules()[without_places(key)]


def changed_keys(old: RunConfig, new: RunConfig) -> Changes:
    """Returns the keys that differ with both values; None where a section is not there."""
    left = dict(_leaves(old))
    right = dict(_leaves(new))
    both = {key: (left.get(key), right.get(key)) for key in left | right}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def _leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in type(section).model_fields.items():
        key = f"{prefix}{info.alias or name}"
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _leaves(value, f"{key}.")
        elif on_resume(info) is not None:
            yield key, value
        else:
            for place, item in enumerate(value or []):  # sections in a list, or one that is None
                yield from _leaves(item, f"{key}[{place}].")


def check_config(stored: RunConfig, config: RunConfig, *, has_saved: bool = True, effects: Sequence[str] = ()) -> None:
    """Logs every difference between a run's stored config and its resumption's.

    Without a checkpoint to resume from (`has_saved`), everything may change. `effects`: further
    lines, about what the differences change.

    Raises:
        ConfigError: Keys differ that define the run, see `refuse_changes`.
    """
    groups = refuse_changes(stored, config) if has_saved else _by_class(stored, config)
    if groups:
        lines = [
            f"    {kind:<7} {_shown(key, values)}"
            for kind in ("never", "allow", "allowed", "warn", "free")
            for key, values in groups.get(kind, {}).items()
        ]
        level = logging.INFO if groups.keys() <= {"free"} else logging.WARNING
        action = "resuming" if has_saved else "starting over, as nothing was saved,"
        lines += [f"    {effect}" for effect in effects]
        text = "%s with a config that differs from the run's so far:\n%s"
        log.log(level, text, action, "\n".join(lines))


def refuse_changes(stored: RunConfig, config: RunConfig) -> dict[str, Changes]:
    """Checks that a config can continue a run; returns the differences by class.

    Raises:
        ConfigError: Keys differ that define the run; has values and the `resume.allow` to add.
    """
    groups = _by_class(stored, config)
    if groups.keys() & {"allow", "never"}:
        raise _refusal(config, groups.get("allow", {}), groups.get("never", {}))
    return groups


def _by_class(stored: RunConfig, config: RunConfig) -> dict[str, Changes]:
    groups: dict[str, Changes] = {}
    for key, values in changed_keys(stored, config).items():
        kind: str = class_of(key)
        if kind == OnResume.ALLOW and is_allowed(without_places(key), config.resume.allow):
            kind = "allowed"
        groups.setdefault(kind, {})[key] = values
    return groups


def _shown(key: str, values: tuple[Any, Any]) -> str:
    return f"{key}: {short(values[0])} -> {short(values[1])}"


def _refusal(config: RunConfig, allow: Changes, never: Changes) -> ConfigError:
    listed = [
        f"{word}: " + ", ".join(_shown(key, values) for key, values in group.items())
        for word, group in (("on purpose only", allow), ("never", never))
        if group
    ]
    fixes = [f"restore {', '.join(never)}"] if never else []
    if allow:
        names = dict.fromkeys([*config.resume.allow, *map(without_places, allow)])
        fixes.append(f"add resume.allow=[{','.join(names)}]")
    path = shlex.quote(str(config.folder / "config.yaml"))
    as_it_was = f"pretrain train {path} continues it as it was"
    return ConfigError(
        f"the run {config.run.name} was started with another config ({'; '.join(listed)})",
        fix=f"{as_it_was}; or use another run.name, or {' and '.join(fixes)}",
    )


def is_allowed(key: str, allow: list[str]) -> bool:
    """Returns True if `resume.allow` names a key, or a section that it is in."""
    return any(key == name or key.startswith(f"{name}.") for name in allow)


def follow_folder(located: LocatedTree, source: Path, overrides: Sequence[str]) -> LocatedTree:
    """Returns the config of a run folder that was moved or copied, or is named from elsewhere, with its place today.

    `run.dir` of a stored config is relative to the folder of its start, where a start would find no
    run, or that of the original, and begin at step 0. An override of the place stays.

    Raises:
        ConfigError: The name of the folder is no name of a run.
    """
    run = located.values.get("run")
    is_of_run = source.name == "config.yaml" and source.with_name("run.json").is_file()
    is_placed = any(item.partition("=")[0] in ("run", "run.dir", "run.name") for item in overrides)
    if not is_of_run or is_placed or not isinstance(run, dict):
        return located
    folder = source.parent.resolve() if source.parent.name in ("", "..") else source.parent
    if (Path(expand_home(str(run.get("dir", "runs")))) / str(run.get("name"))).resolve() == folder.resolve():
        return located
    if not re.match(NAME_PATTERN, folder.name):
        raise ConfigError(
            "the name of a run folder is its run.name, and this is none",
            where=str(folder),
            fix="rename the folder: letters, digits, `.`, `_` and `-`, a letter or digit first",
        )
    values = {**located.values, "run": {**run, "dir": str(folder.parent), "name": folder.name}}
    return LocatedTree(values, located.places | {"run.dir": str(folder), "run.name": str(folder)})


def no_start(folder: Path) -> ConfigError:
    """Builds the error of an `init.from` that names no model, with the nearest name of a folder."""
    siblings = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
    fix = START_FIX
    if near := difflib.get_close_matches(folder.name, siblings, n=1):
        fix = f"did you mean {folder.with_name(near[0])}?"
    elif is_hub_name(str(folder)) and not folder.parent.is_dir():
        out = f"models/{folder.name}"
        fix = f"check the path; a model of the hub comes first: pretrain import {folder} {out}, then init.from={out}"
    return ConfigError(
        f"init.from={folder}: no run, checkpoint, model folder or Hugging Face folder is there",
        fix=fix,
    )


def start_folder(start: Path) -> Path:
    """Returns the folder that a model path is of: RUN for RUN/best, RUN/ema or RUN/best/ema."""
    for name in ("ema", "best"):
        if start.name == name and not start.exists():
            start = start.parent
    return start


def has_start(config: RunConfig) -> bool:
    """Returns whether there is something at `init.from`."""
    return start_folder(Path(config.init.from_ or "")).exists()


def check_start(config: RunConfig, *, has_saved: bool) -> None:
    """Checks that `init.from` is there, which a run without weights of its own needs. Raises: ConfigError."""
    # A bucket may have weights of the run: whether it does is asked later.
    if config.init.from_ is None or has_saved or config.checkpoint.upload is not None:
        return
    if not has_start(config):
        raise no_start(Path(config.init.from_))


def keep_start(stored: RunConfig, config: RunConfig) -> RunConfig:
    """Keeps the checkpoints of a run's start and teacher, where their runs are named again."""
    update: dict[str, Any] = {}
    if _is_of_same_run(stored.init.from_, config.init.from_):
        update["init"] = config.init.model_copy(update={"from_": stored.init.from_})
    before = stored.objective.distill
    distill = config.objective.distill
    if before is not None and distill is not None and _is_of_same_run(before.teacher, distill.teacher):
        distill = distill.model_copy(update={"teacher": before.teacher})
        update["objective"] = config.objective.model_copy(update={"distill": distill})
    return config.model_copy(update=update) if update else config


def _is_of_same_run(taken: str | None, given: str | None) -> bool:
    """Returns whether `given` names the run of the checkpoint that was taken, or its best one."""
    if given is None or taken is None:
        return False
    start, named = Path(taken).resolve(), Path(given).resolve()
    if start.name == named.name == "ema":  # both are the average of the weights
        start, named = start.parent, named.parent
    run = start.parent.parent
    return named in (run, run / "best")


def fill_from(stored: RunConfig, config: RunConfig) -> RunConfig:
    """Fills in what a run has resolved: vocabulary, special tokens, labels, the checkpoint of its start."""
    old = stored.model
    model = config.model
    named = {name: number for name, number in model.special_tokens if number is not None}
    filled: dict[str, Any] = {"special_tokens": old.special_tokens.model_copy(update=named)}
    # The vocabulary of a start grows with that of the data.
    if model.vocab_size is None or config.init.from_ is not None:
        filled["vocab_size"] = old.vocab_size
    if not model.head.labels:
        filled["head"] = model.head.model_copy(update={"labels": old.head.labels})
    update: dict[str, Any] = {"model": model.model_copy(update=filled)}
    if config.finetune.new_tokens == "trained":  # their tables are under `also` then
        update["finetune"] = config.finetune.model_copy(update={"also": stored.finetune.also})
    return keep_start(stored, config.model_copy(update=update))
