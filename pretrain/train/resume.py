"""What may differ between a run and its resumption.

Every key of the config has a class: *free* (how the work is done), *warn* (changes the run's course; said, not
refused), or *refuse* (changes what the run means) unless `resume.allow` names the key or a prefix of it.
"""

import logging

from pretrain.checkpoint.state import TrainState
from pretrain.config.load import changed_keys
from pretrain.config.run import RunConfig
from pretrain.errors import ConfigError

log = logging.getLogger(__name__)

CLASSES: dict[str, str] = {
    "seed": "refuse",
    "extend": "free",
    "run": "free",
    "data": "refuse",
    "data.path": "free",  # its content is compared by hash
    "data.workers": "free",
    "data.prefetch": "free",
    "data.cache_dir": "free",
    "data.cache_gib": "free",
    "data.on_error": "free",
    "data.max_skipped_rows": "free",
    "batch": "refuse",
    "batch.micro": "free",
    "model": "refuse",
    "model.preset": "free",  # what it stands for is compared
    "objective": "refuse",
    "optim": "warn",
    "train": "warn",
    "train.stop_after": "free",
    "eval": "free",
    "engine": "free",
    "checkpoint": "free",
    "tracking": "free",
    "init": "free",
    "resume": "free",
}


def class_of(key: str) -> str:
    """Returns the class of a dotted key: that of its longest prefix in the table."""
    prefixes = [name for name in CLASSES if key == name or key.startswith(f"{name}.")]
    return CLASSES[max(prefixes, key=len)]


def _is_allowed(key: str, allow: list[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in allow)


def check_config(stored: RunConfig, config: RunConfig) -> None:
    """Compares the config of a run with that of its resumption.

    Raises:
        ConfigError: Keys that define the run differ; each is named with both values.
    """
    changes = changed_keys(stored, config)
    allow = config.resume.allow
    refused = {key: pair for key, pair in changes.items() if class_of(key) == "refuse" and not _is_allowed(key, allow)}
    if refused:
        listed = ", ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in refused.items())
        raise ConfigError(
            f"the run {config.run.name} was started with another config ({listed})",
            fix="use another run.name, or name the keys in resume.allow",
        )
    for key, (old, new) in changes.items():
        if class_of(key) == "warn":
            log.warning("resuming with %s changed from %r to %r", key, old, new)


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
        if old != new and "data" not in allow:
            raise ConfigError(
                f"the {what} at data.path differ from those of the run (sha256 {old[:12]} -> {new[:12]})",
                fix="restore them, use another run.name, or pass resume.allow=[data]",
            )
