"""Whether the data of a resumption are those of the run: the same shards, and the same samples next."""

import logging

from pretrain.checkpoint.state import TrainState
from pretrain.config.resumption import is_allowed
from pretrain.errors import ConfigError, DataError

log = logging.getLogger(__name__)

_ORDER = ("data", "batch", "seed")
"""Sections whose keys, where they are allowed to change, change what comes next."""


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
        if old != new and not is_allowed("data.path", allow):
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
